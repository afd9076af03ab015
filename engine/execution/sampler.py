"""From logits to the next token of each row, and its log-probabilities: on the device, then to the host unhurried."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.execution.batch_state import SamplingKind
from engine.execution.device_clock import DeviceSpan, DeviceTimes
from engine.execution.upload import upload
from engine.scheduling.step import SampledToken
from kernels import sampling, sampling_triton
from kernels.sampling_triton import Newest
from kernels.slot_state import DrawSettings


def choose_tokens(
    logits: torch.Tensor,
    settings: DrawSettings | None,
    kind: SamplingKind,
    *,
    use_triton: bool,
    keep_in: Newest | None = None,
) -> torch.Tensor:
    """[rows] int64, the next token of each row, or -1 where its logits hold NaN or +inf, or nothing above -inf.

    logits: [rows, vocab_size], any float dtype. settings: of the rows, or None if no row is drawn. keep_in: where each
    token becomes its slot's newest as it is chosen; only with use_triton. Waits for nothing when use_triton is on, so
    that it can be captured.
    """
    if not use_triton:
        assert keep_in is None
        if settings is None:
            return sampling.greedy(logits)
        return sampling.sample(logits, settings.temperature, settings.top_k, settings.top_p, settings.uniform)
    if settings is None:
        return sampling_triton.greedy(logits, keep_in=keep_in)
    return sampling_triton.sample(
        logits,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.uniform,
        any_top_k=kind.any_top_k,
        any_top_p=kind.any_top_p,
        keep_in=keep_in,
    )


@dataclass(frozen=True)
class _Logprobs:
    """For one row each: the likeliest ids with their log-probabilities, and the chosen token's."""

    rows: list[tuple[int, int]]
    ids: torch.Tensor
    values: torch.Tensor
    chosen: torch.Tensor


class PendingTokens:
    """Tokens on their way to the host. result() waits for this step alone, not for what was launched since.

    logits: of the rows, where num_logprobs (row, how many) names any. span: of the step on the device, which ends when
    the tokens have left it; None on a CPU. device_times: once result() has returned, what the span has measured.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        logits: torch.Tensor | None,
        num_logprobs: list[tuple[int, int]],
        span: DeviceSpan | None = None,
    ) -> None:
        self._logprobs = None
        if num_logprobs:
            assert logits is not None
            self._logprobs = _gather_logprobs(logits, token_ids, num_logprobs)
        self._token_ids = _to_host(token_ids)
        self._span = span
        if span is not None:
            span.end()
        self.device_times: DeviceTimes = (None, None)

    def result(self) -> list[SampledToken]:
        """One token a row, None where the logits were not finite."""
        if self._span is not None:
            self.device_times = self._span.wait()
        token_ids = self._token_ids.tolist()
        logprobs = self._row_logprobs(token_ids)
        return [
            SampledToken(token if token >= 0 else None, logprobs.get(row))
            for row, token in enumerate(token_ids)
        ]

    def _row_logprobs(self, token_ids: list[int]) -> dict[int, dict[int, float]]:
        if self._logprobs is None:
            return {}
        columns = (
            self._logprobs.ids.tolist(),
            self._logprobs.values.tolist(),
            self._logprobs.chosen.tolist(),
        )
        result = {}
        for (row, count), ids, values, chosen in zip(self._logprobs.rows, *columns):
            result[row] = dict(zip(ids[:count], values[:count]))
            result[row].setdefault(token_ids[row], chosen)
        return result


def _gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, rows: list[tuple[int, int]]) -> _Logprobs:
    (index,) = upload(logits.device, [row for row, _ in rows])
    logprobs = torch.log_softmax(logits[index].float(), dim=-1)
    values, ids = logprobs.topk(max(count for _, count in rows), dim=-1)
    chosen = logprobs.gather(1, token_ids[index].clamp(min=0)[:, None]).squeeze(1)
    return _Logprobs(rows, _to_host(ids), _to_host(values), _to_host(chosen))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
