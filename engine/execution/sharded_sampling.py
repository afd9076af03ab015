"""Choosing tokens when each rank holds the logits of its own ids: only what may win travels between the ranks.

A candidate is one int64: the logit as an integer of the same order, then the id turned round, so that the largest key
is the likeliest id, and the lowest of equals. Keys are gathered bit by bit, so every rank decides from the same data;
what is drawn at random is rank 0's decision, sent to all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.embedding import VocabParallelHead
from kernels import sampling

_LAST_ID = 0x7FFFFFFF


def greedy_tokens(local: Tensor, head: VocabParallelHead, *, use_triton: bool) -> Tensor:
    """[rows] int64: the likeliest id over all ranks, the lowest on a tie; -1 where some rank holds NaN or +inf.

    local: [rows, num_rows] of this rank's ids (VocabParallelHead.local_logits).
    """
    ids = sampling.greedy(local, use_triton=use_triton)
    keys = _encode(local.amax(dim=-1), ids + head.ids.start)  # the maximum itself, since it tells of a NaN
    values, ids = _decode(head.group.all_gather(keys[:, None], dim=1).amax(dim=1))
    return ids.masked_fill(~values.isfinite(), -1)


def likeliest_logits(local: Tensor, head: VocabParallelHead, num_candidates: int) -> Tensor:
    """[rows, vocab_size]: the logits of each rank's num_candidates likeliest ids, and -inf for all others.

    As good as all logits for greedy rows, and for rows with top_k up to num_candidates: those keep no other id. A NaN
    becomes +inf, which makes its row as invalid. local: as for greedy_tokens.
    """
    num_rows = head.ids.num_rows
    ids = torch.arange(num_rows, device=local.device) + head.ids.start
    # In pieces of rows, since a key takes four times the memory of a 16-bit logit.
    pieces = local.split(max(1, sampling.PIECE_ELEMENTS // num_rows))
    count = min(num_candidates, num_rows)
    keys = torch.cat([_encode(piece, ids).topk(count, dim=-1, sorted=False).values for piece in pieces])
    values, ids = _decode(head.group.all_gather(keys, dim=-1))
    # Ranks with fewer ids than rows also offer ids beyond the vocabulary, at -inf: room for them, then cut off.
    shape = (len(local), head.group.size * num_rows + num_rows)
    logits = torch.full(shape, -torch.inf, dtype=local.dtype, device=local.device)
    return logits.scatter_(1, ids, values.to(local.dtype))[:, : head.full_shape[0]]


def _encode(logits: Tensor, ids: Tensor) -> Tensor:
    # Adding 0 makes -0 equal to 0.
    bits = (logits.float().nan_to_num(torch.inf, torch.inf, -torch.inf) + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (_LAST_ID - ids)


def _decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(logits fp32, ids int64) of keys."""
    ordered = (keys >> 32).int()
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), _LAST_ID - (keys & 0xFFFFFFFF)
