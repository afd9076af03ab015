"""From logits to the next token of each row, and its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.scheduling.step import SampledToken, SamplingRow
from kernels import sampling


def sample_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Choose one token a row.

    logits: [len(rows), vocab_size], any float dtype, on the device. A row whose logits hold NaN or +inf gets
    token_id None; its neighbours are unaffected.
    """
    finite = sampling.finite_rows(logits)
    if all(row.temperature == 0 for row in rows):
        token_ids = sampling.greedy(logits)
    else:
        # The parameters stay on the host: that is where it is decided which rows need a sort.
        token_ids = sampling.sample(
            logits,
            torch.tensor([row.temperature for row in rows], dtype=torch.float32),
            torch.tensor([row.top_k for row in rows], dtype=torch.int64),
            torch.tensor([row.top_p for row in rows], dtype=torch.float64),
            torch.tensor([row.uniform for row in rows], dtype=torch.float64),
        )
    chosen, is_finite = torch.stack([token_ids, finite.to(token_ids.dtype)]).tolist()
    logprobs = _logprobs(logits, token_ids, rows)
    return [
        SampledToken(token if ok else None, logprobs.get(i))
        for i, (token, ok) in enumerate(zip(chosen, is_finite))
    ]


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[SamplingRow]
) -> dict[int, dict[int, float]]:
    """Of the rows that ask: the most likely tokens and the chosen one, with natural-log probabilities."""
    asking = [(i, row.num_logprobs) for i, row in enumerate(rows) if row.num_logprobs is not None]
    if not asking:
        return {}
    index = torch.tensor([i for i, _ in asking], device=logits.device)
    logprobs = torch.log_softmax(logits[index].float(), dim=-1)
    chosen = token_ids[index]
    chosen_values = logprobs.gather(1, chosen[:, None]).squeeze(1).tolist()
    values, ids = logprobs.topk(max(count for _, count in asking), dim=-1)
    result = {}
    for j, (i, count) in enumerate(asking):
        row = dict(zip(ids[j, :count].tolist(), values[j, :count].tolist()))
        row.setdefault(int(chosen[j]), chosen_values[j])
        result[i] = row
    return result
