"""Sampling in Triton by the rule of kernels/sampling.py, without sorting the vocabulary.

The vocabulary is cut into chunks, one program each, so that one row fills a GPU as well as many do:

1. the likeliest token of each chunk, hence of the row, and whether the row is finite;
2. where top_k or top_p is on, the least kept logit. A search over the logits' bit patterns, made to order
   like integers, compares NUM_PIVOTS evenly spaced pivots a pass and keeps the gap in which the count
   (top_k) or the mass (top_p) at and above crosses its target. Equal logits weigh the same, so the number
   of them to keep is a division; the lowest ids are kept;
3. the mass kept in each chunk, then the chunk and the token in which the uniform number falls.

Weights are integers as in the torch path, from fp32 instead of fp64 exponentials: a draw differs from the
torch path's only where the uniform number lies within about 1e-6 of the edge between two tokens. Sums are
exact, so rows stay independent of their neighbours, bit for bit.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.triton_support import cdiv, next_power_of_2, on_device, tl, triton

CHUNK = 4096
NUM_PIVOTS = 16
# Low bits that are the same in every fp32 that came from the type: the search leaves them out.
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


Newest = tuple[Tensor, Tensor]
"""(newest [slots] int64, slots [rows] int64): each row's id becomes newest[slots[row]], or 0 where the row has none."""


def greedy(logits: Tensor, *, keep_in: Newest | None = None) -> Tensor:
    """The likeliest id of each row, the lowest on a tie, -1 as of `sample`: [rows, vocab_size] to [rows] int64."""
    return _Rows(logits).draw(None, keep_in)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    *,
    any_top_k: bool,
    any_top_p: bool,
    keep_in: Newest | None = None,
) -> Tensor:
    """One id a row, [rows] int64; arguments as of kernels.sampling.sample, all on logits' device.

    any_top_k, any_top_p: whether some row filters; a search that no row needs is not launched. A row whose logits,
    as fp32 if they were fp64, hold a NaN, a +inf, or nothing above -inf, gets -1. Temperatures are fp32.
    """
    # Contiguous, since kernels index them by row; one value expanded over the rows is not.
    rows = _Rows(logits, temperature.contiguous(), top_k.long().contiguous(), top_p.double().contiguous())
    if any_top_k:
        rows.search(by_count=True)
    rows.weigh()
    if any_top_p:
        rows.search(by_count=False)
        rows.weigh()
    return rows.draw(uniform.contiguous(), keep_in)


class _Rows:
    """Scratch of one call, and the launches that fill it. Per row and chunk, but for `cut` (per row)."""

    def __init__(
        self,
        logits: Tensor,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
    ) -> None:
        logits = logits if logits.dtype in UNUSED_BITS else logits.float()
        self.logits = logits if logits.stride(1) == 1 else logits.contiguous()
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.num_rows, self.vocab_size = logits.shape
        self.chunk = min(CHUNK, next_power_of_2(self.vocab_size))
        self.num_chunks = cdiv(self.vocab_size, self.chunk)
        device = logits.device
        per_chunk = (self.num_rows, self.num_chunks)
        self.chunk_max = torch.empty(per_chunk, dtype=torch.float32, device=device)
        self.chunk_id = torch.empty(per_chunk, dtype=torch.int64, device=device)
        self.mass_above = torch.empty(per_chunk, dtype=torch.int64, device=device)
        self.num_ties = torch.empty(per_chunk, dtype=torch.int64, device=device)
        # The least kept key, and how many of its equals are kept.
        self.cut = torch.empty((self.num_rows, 2), dtype=torch.int64, device=device)
        self.constants: dict[str, Any] = {
            "VOCAB_SIZE": self.vocab_size,
            "CHUNK": self.chunk,
            "NUM_CHUNKS": self.num_chunks,
            "CHUNKS": next_power_of_2(self.num_chunks),
            "UNUSED_BITS": UNUSED_BITS[self.logits.dtype],
            "UNIT": float(1 << (62 - self.vocab_size.bit_length())),
        }
        self.is_cut = False
        self._launch(_chunk_max_kernel, self.chunk_max, self.chunk_id, self.cut, per_row=False)

    def search(self, *, by_count: bool) -> None:
        """Set `cut` of the rows with top_k (by_count) or top_p on."""
        self.is_cut = True
        width, num_passes = 1 << (32 - self.constants["UNUSED_BITS"]), 0
        while width > 1:
            width, num_passes = cdiv(width, NUM_PIVOTS + 1), num_passes + 1
        # Bounds and measures alternate between two places: a pass reads one while it writes the other.
        bounds = self.cut.new_empty((2, self.num_rows, 3))
        measures = self.cut.new_empty((2, self.num_rows, self.num_chunks, NUM_PIVOTS))
        state = (self.chunk_max, self.mass_above, self.cut, self.temperature, self.top_k, self.top_p)
        for index in range(num_passes + 1):
            last = index == num_passes
            self._launch(
                _search_kernel,
                *state,
                bounds[index % 2],
                measures[index % 2],
                bounds[(index + 1) % 2],
                measures[(index + 1) % 2],
                per_row=last,
                FIRST=index == 0,
                LAST=last,
                BY_COUNT=by_count,
                NUM_PIVOTS=NUM_PIVOTS,
            )

    def weigh(self) -> None:
        """Mass above the cut and number of tokens at it, for each chunk."""
        self._launch(
            _weigh_kernel,
            self.chunk_max,
            self.mass_above,
            self.num_ties,
            self.cut,
            self.temperature,
            per_row=False,
            CUT=self.is_cut,
        )

    def draw(self, uniform: Tensor | None, keep_in: Newest | None) -> Tensor:
        ids = torch.empty(self.num_rows, dtype=torch.int64, device=self.logits.device)
        newest, slots = keep_in if keep_in is not None else (ids, ids)
        self._launch(
            _draw_kernel,
            self.chunk_max,
            self.chunk_id,
            self.mass_above,
            self.num_ties,
            self.cut,
            self.temperature if self.temperature is not None else self.chunk_max,
            uniform if uniform is not None else self.chunk_max,
            ids,
            newest,
            slots,
            per_row=True,
            GREEDY=uniform is None,
            CUT=self.is_cut,
            KEEP=keep_in is not None,
        )
        return ids

    def _launch(self, kernel: Any, *arguments: Tensor | None, per_row: bool, **constants: Any) -> None:
        if not self.num_rows:
            return
        grid = (self.num_rows, 1 if per_row else self.num_chunks)
        with on_device(self.logits):
            kernel[grid](
                self.logits, self.logits.stride(0), *arguments, **constants, **self.constants, num_warps=8
            )


@triton.jit
def _key(x, UNUSED_BITS: tl.constexpr):
    """fp32 as int32 of the same order, both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED_BITS


@triton.jit
def _logit(key, UNUSED_BITS: tl.constexpr):
    """The fp32 whose key it is."""
    ordered = key.to(tl.int32) << UNUSED_BITS
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    # Below zero the unused bits were all ones before the shift.
    bits = bits & (-1 << UNUSED_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, row_max, temperature, UNIT: tl.constexpr):
    """exp((x - row_max) / temperature) in whole units, of a finite row; so 0 for the -inf beyond its end."""
    # The likeliest is 1 by itself: its 0 would meet an infinite reciprocal at the least temperatures.
    power = tl.where(x < row_max, tl.exp2((x - row_max) * (1.4426950408889634 / temperature)), 1.0)
    return (power * UNIT).to(tl.int64)


@triton.jit
def _load_chunk(logits_ptr, stride_row, row, chunk, VOCAB_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB_SIZE
    x = tl.load(logits_ptr + row * stride_row + ids, mask=inside, other=float("-inf")).to(tl.float32)
    return ids, inside, x


@triton.jit
def _row_max(chunk_max_ptr, row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    maxima = tl.load(chunk_max_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf"))
    return tl.max(maxima, 0)


@triton.jit
def _row_sum(values_ptr, row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(values_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0), 0)


@triton.jit
def _chunk_max_kernel(
    logits_ptr,
    stride_row,
    chunk_max_ptr,
    chunk_id_ptr,
    cut_ptr,
    VOCAB_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    _ids, _inside, x = _load_chunk(logits_ptr, stride_row, row, chunk, VOCAB_SIZE, CHUNK)
    # A NaN makes its row as invalid as +inf does; all kernels see it in the row's maximum.
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, 0)
    # Two reductions of one value each take fewer instructions than one of pairs.
    index = tl.min(tl.where(x == best, tl.arange(0, CHUNK), CHUNK), 0)
    tl.store(chunk_max_ptr + row * NUM_CHUNKS + chunk, best)
    tl.store(chunk_id_ptr + row * NUM_CHUNKS + chunk, (chunk * CHUNK + index).to(tl.int64))
    if chunk == 0:  # nothing is cut: every key is above
        tl.store(cut_ptr + row * 2, tl.full([], -(1 << 31), tl.int64))
        tl.store(cut_ptr + row * 2 + 1, tl.full([], 0, tl.int64))


# Bounds start at any multiple of 8 bytes where the number of rows is odd: read one by one, they need no other kernel.
@triton.jit(do_not_specialize_on_alignment=["bounds_ptr", "new_bounds_ptr"])
def _search_kernel(
    logits_ptr,
    stride_row,
    chunk_max_ptr,
    mass_above_ptr,
    cut_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    bounds_ptr,
    measures_ptr,
    new_bounds_ptr,
    new_measures_ptr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BY_COUNT: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One pass. Bounds are (low, high, measure at and above high): low's measure reaches the target, high's
    does not. The last pass only settles the cut."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    is_on = temperature > 0
    if BY_COUNT:
        is_on = is_on & (top_k > 0) & (top_k < VOCAB_SIZE)
    else:
        is_on = is_on & (top_p < 1)
    if not is_on:
        return
    row_max = _row_max(chunk_max_ptr, row, NUM_CHUNKS, CHUNKS)
    if BY_COUNT:
        target = top_k
    else:
        total = _row_sum(mass_above_ptr, row, NUM_CHUNKS, CHUNKS)
        cut = tl.load(cut_ptr + row * 2)
        kept_ties = tl.load(cut_ptr + row * 2 + 1)
        if kept_ties > 0:
            total += kept_ties * _weight(_logit(cut, UNUSED_BITS), row_max, temperature, UNIT)
        wanted = total.to(tl.float64) * top_p
        target = wanted.to(tl.int64)
        # Rounded up: a cumulative mass reaches `wanted` when it reaches this.
        target = tl.maximum(tl.where(target.to(tl.float64) < wanted, target + 1, target), 1)

    pivot_index = tl.arange(0, NUM_PIVOTS)
    if FIRST:
        low = tl.full([], -(1 << (31 - UNUSED_BITS)), tl.int64)
        high = _key(row_max, UNUSED_BITS).to(tl.int64) + 1
        high_measure = tl.full([], 0, tl.int64)
    else:
        low = tl.load(bounds_ptr + row * 3)
        high = tl.load(bounds_ptr + row * 3 + 1)
        high_measure = tl.load(bounds_ptr + row * 3 + 2)
        chunks = tl.arange(0, CHUNKS)
        offsets = (row * NUM_CHUNKS + chunks)[:, None] * NUM_PIVOTS + pivot_index[None, :]
        measures = tl.sum(tl.load(measures_ptr + offsets, mask=(chunks < NUM_CHUNKS)[:, None], other=0), 0)
        step = (high - low + NUM_PIVOTS) // (NUM_PIVOTS + 1)
        reached = tl.sum((measures >= target).to(tl.int64), 0)
        short = tl.max(tl.where(measures < target, measures, 0), 0)
        low += step * reached
        high = tl.minimum(low + step, high)
        high_measure = tl.maximum(high_measure, short)

    if LAST:
        if BY_COUNT:
            kept = target - high_measure
        else:
            weight = _weight(_logit(low, UNUSED_BITS), row_max, temperature, UNIT)
            weight = tl.maximum(weight, 1)  # 0 only in a row that is not finite
            kept = (target - high_measure + weight - 1) // weight
        tl.store(cut_ptr + row * 2, low)
        tl.store(cut_ptr + row * 2 + 1, kept)
    else:
        if chunk == 0:
            tl.store(new_bounds_ptr + row * 3, low)
            tl.store(new_bounds_ptr + row * 3 + 1, high)
            tl.store(new_bounds_ptr + row * 3 + 2, high_measure)
        _ids, inside, x = _load_chunk(logits_ptr, stride_row, row, chunk, VOCAB_SIZE, CHUNK)
        keys = _key(x, UNUSED_BITS)
        if BY_COUNT:
            amounts = inside.to(tl.int32)
        else:
            amounts = _weight(x, row_max, temperature, UNIT)
        step = (high - low + NUM_PIVOTS) // (NUM_PIVOTS + 1)
        new_measures = tl.zeros([NUM_PIVOTS], tl.int64)
        for j in tl.static_range(NUM_PIVOTS):
            # At high and beyond, the measure falls short of the target, as it must.
            pivot = tl.minimum(low + step * (j + 1), high).to(tl.int32)
            measure = tl.sum(tl.where(keys >= pivot, amounts, 0), 0).to(tl.int64)
            new_measures = tl.where(pivot_index == j, measure, new_measures)
        tl.store(new_measures_ptr + (row * NUM_CHUNKS + chunk) * NUM_PIVOTS + pivot_index, new_measures)


@triton.jit
def _weigh_kernel(
    logits_ptr,
    stride_row,
    chunk_max_ptr,
    mass_above_ptr,
    num_ties_ptr,
    cut_ptr,
    temperature_ptr,
    CUT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """CUT: whether any row has a cut; without one no ties are counted."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    if temperature <= 0:
        return
    row_max = _row_max(chunk_max_ptr, row, NUM_CHUNKS, CHUNKS)
    _ids, inside, x = _load_chunk(logits_ptr, stride_row, row, chunk, VOCAB_SIZE, CHUNK)
    weights = _weight(x, row_max, temperature, UNIT)
    if CUT:
        cut = tl.load(cut_ptr + row * 2).to(tl.int32)
        keys = _key(x, UNUSED_BITS)
        weights = tl.where(keys > cut, weights, 0)
        ties = tl.sum((inside & (keys == cut)).to(tl.int32), 0).to(tl.int64)
        tl.store(num_ties_ptr + row * NUM_CHUNKS + chunk, ties)
    tl.store(mass_above_ptr + row * NUM_CHUNKS + chunk, tl.sum(weights, 0))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _draw_kernel(
    logits_ptr,
    stride_row,
    chunk_max_ptr,
    chunk_id_ptr,
    mass_above_ptr,
    num_ties_ptr,
    cut_ptr,
    temperature_ptr,
    uniform_ptr,
    ids_ptr,
    newest_ptr,
    slots_ptr,
    GREEDY: tl.constexpr,
    CUT: tl.constexpr,
    KEEP: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    is_chunk = chunks < NUM_CHUNKS
    offsets = row * NUM_CHUNKS + chunks
    maxima = tl.load(chunk_max_ptr + offsets, mask=is_chunk, other=float("-inf"))
    row_max = tl.max(maxima, 0)
    best_ids = tl.load(chunk_id_ptr + offsets, mask=is_chunk, other=VOCAB_SIZE)
    token = tl.min(tl.where(maxima == row_max, best_ids, VOCAB_SIZE), 0)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row).to(tl.float32)
        if temperature > 0:
            mass = tl.load(mass_above_ptr + offsets, mask=is_chunk, other=0)
            if CUT:
                cut = tl.load(cut_ptr + row * 2).to(tl.int32)
                kept_ties = tl.load(cut_ptr + row * 2 + 1)
                tie_weight = _weight(_logit(cut, UNUSED_BITS), row_max, temperature, UNIT)
                ties = tl.load(num_ties_ptr + offsets, mask=is_chunk, other=0)
                # Ties are kept in the order of ids, until there are enough.
                ties_before = tl.cumsum(ties, 0) - ties
                kept = tl.minimum(tl.maximum(kept_ties - ties_before, 0), ties)
                mass += kept * tie_weight
            cumulative = tl.cumsum(mass, 0)
            total = tl.sum(mass, 0)
            target = (tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            chunk = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), NUM_CHUNKS - 1)
            target -= tl.sum(tl.where(chunks < chunk, mass, 0), 0)

            _ids, inside, x = _load_chunk(logits_ptr, stride_row, row, chunk, VOCAB_SIZE, CHUNK)
            weights = _weight(x, row_max, temperature, UNIT)
            if CUT:
                kept_here = tl.sum(tl.where(chunks == chunk, kept, 0), 0)
                keys = _key(x, UNUSED_BITS)
                is_tie = inside & (keys == cut)
                tie_rank = tl.cumsum(is_tie.to(tl.int32), 0)
                weights = tl.where((keys > cut) | (is_tie & (tie_rank <= kept_here)), weights, 0)
            index = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
            token = tl.minimum(chunk * CHUNK + index, VOCAB_SIZE - 1).to(tl.int64)
    token = tl.where((row_max < float("inf")) & (row_max > float("-inf")), token, -1)
    tl.store(ids_ptr + row, token)
    if KEEP:
        tl.store(newest_ptr + tl.load(slots_ptr + row), tl.maximum(token, 0))
