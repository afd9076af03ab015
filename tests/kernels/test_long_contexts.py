"""Decode and prefill attention up to 131,072 tokens against fp64, within a bound that half-precision sums would miss.

Values are positive, so that nothing cancels and an error relative to the answer, element by element, has the meaning it
has on paper. Half of the weight lies on three tokens near the start, the middle and the end, and the other half is
spread thinly over all the rest: a kernel that loses a place is wrong by a sixth, one whose sums stop growing by half.

The bound, against fp64 attention of the same rounded inputs, with u the unit roundoff of their type, n tokens, d the
head size, and A the largest sum of |q_i k_i| / sqrt(d) over a key:

    u  for the output  +  u  for the weights, which half-precision kernels round before they multiply values
       (Triton's interpreter does not, but cuts off what it should round: the same 2u)
    +  n 2^-25 / total  in fp16: weights below its smallest number, against a total in units of the largest weight
    +  (16 + sqrt(d) A + 2 sqrt(n)) 2^-24  for what is fp32 in every kernel: a fixed number of roundings in scale,
       exponent and quotient; scores, sums of d products; and sums of n terms, one by one at worst. Errors of sums grow
       as the square root of their number (Higham and Mary, 2019).
    +  n 2^-26  for half-precision tensor cores, which cut every product off at the last place of the sum so far, or a
       bit or two below it (Fasi, Higham, Mikaitis and Pranesh, 2021): half a place each time, always towards zero. An
       H200's whole prompt of 131,072 tokens was 1e-3 too small in fp16; what is split into shorter sums loses less.

At n = 131,072 the fp32 term is about 5e-5, against 1e-3 (fp16) and 8e-3 (bf16) for the first two: without tensor cores
n hardly counts, as it should, and with them it adds 2e-3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import decode, prefill
from kernels.decode import DecodeProblem
from kernels.decode.launch import TritonDecodeKernel
from kernels.prefill import PrefillProblem

LONGEST = 131_072
BLOCK_SIZE = 16
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class LongCase:
    """The tensors of one call; exact and bound: of the tokens of q named in checked, in fp64."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    checked: list[int]
    exact: Tensor
    bound: Tensor

    def excess(self, out: Tensor) -> float:
        """The largest error in units of the bound; infinite where out is not finite."""
        error = (out[self.checked].double() - self.exact).abs() / self.exact
        return float((error / self.bound).nan_to_num(nan=math.inf).max())


def make_case(
    context_lens: Sequence[int],
    dtype: torch.dtype,
    head_dim: int,
    *,
    num_queries: int = 1,
    checked: Sequence[int] | None = None,
    in_order: bool = False,
) -> LongCase:
    """Two query heads over one KV head; each row has num_queries tokens at the end of its context.

    checked: which of a row's tokens, all by default. in_order: blocks lie as tokens do, and the pool holds no others.
    """
    generator = torch.Generator(DEVICE).manual_seed(head_dim)
    checked = range(num_queries) if checked is None else checked
    blocks = [-(-length // BLOCK_SIZE) for length in context_lens]
    num_blocks = sum(blocks) + (0 if in_order else 3)
    order = torch.randperm(num_blocks, generator=generator, device=DEVICE)
    if in_order:
        order = order.sort().values
    pool = torch.full((2, num_blocks, BLOCK_SIZE, 1, head_dim), math.nan, dtype=dtype, device=DEVICE)
    table = torch.full((len(blocks), max(blocks)), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(blocks) * num_queries, 2, head_dim, generator=generator, device=DEVICE).to(dtype)
    results, used = [], 0
    for row, length in enumerate(context_lens):
        mine = order[used : used + blocks[row]]
        used += blocks[row]
        table[row, : len(mine)] = mine.int()
        positions = [length - num_queries + i for i in checked]
        queries = q[[row * num_queries + i for i in checked]].double()
        keys = torch.randn(length, head_dim, generator=generator, device=DEVICE).to(dtype)
        values = (torch.rand(length, head_dim, generator=generator, device=DEVICE) + 0.5).to(dtype)
        # Each of three keys weighs a sixth for every checked query: the total of the others' weights, over 3.
        typical = (keys.double() @ queries[-1, 0] / math.sqrt(head_dim)).logsumexp(0)
        target = torch.full((2 * len(checked),), float(typical) - math.log(3), dtype=torch.float64)
        heavy = torch.linalg.pinv(queries.flatten(0, 1).cpu()) @ (target * math.sqrt(head_dim))
        keys[[0, positions[0] // 2, positions[0]]] = heavy.to(DEVICE, dtype)
        for side, tokens in zip(pool, (keys, values)):
            padded = torch.full((len(mine) * BLOCK_SIZE, head_dim), math.nan, dtype=dtype, device=DEVICE)
            padded[:length] = tokens
            side[mine] = padded.view(-1, BLOCK_SIZE, 1, head_dim)
        results += [
            _exact_and_bound(query, keys[: position + 1], values[: position + 1])
            for query, position in zip(queries, positions)
        ]
    exact, bound = (torch.stack(tensors) for tensors in zip(*results))
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    tokens = [row * num_queries + i for row in range(len(blocks)) for i in checked]
    return LongCase(q, pool[0], pool[1], table, lens, tokens, exact, bound)


def _exact_and_bound(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Of one token: [heads, head_dim] and [heads, 1]. query is in fp64, keys and values are [tokens, head_dim]."""
    length, head_dim = keys.shape
    scores = query @ keys.double().T / math.sqrt(head_dim)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    assert float(total.min()) > 3  # the heaviest token is one among several, or there would be no sum to lose
    unit = UNIT_ROUNDOFF[keys.dtype]
    reach = (query.abs() @ keys.double().abs().T / math.sqrt(head_dim)).amax(-1, keepdim=True)
    bound = unit + (16 + math.sqrt(head_dim) * reach + 2 * math.sqrt(length)) * 2.0**-24
    if keys.dtype != torch.float32:
        bound += unit
    if keys.dtype == torch.float16:
        bound += length * 2.0**-25 / total
    if keys.dtype != torch.float32 and keys.is_cuda:
        bound += length * 2.0**-26
    return weights @ values.double() / total, bound


def check_decode(
    name: str,
    context_lens: Sequence[int],
    dtype: torch.dtype,
    head_dim: int,
    make: Callable[..., LongCase] = make_case,
) -> None:
    kernel = decode.get(name)
    contiguous = name == "sdpa"  # the one that reads KV of equal lengths in the order of tokens
    if contiguous:
        context_lens = (context_lens[0],) * len(context_lens)
    shape = (len(context_lens), 2, 1, head_dim, BLOCK_SIZE, max(context_lens))
    problem = DecodeProblem(*shape, dtype, DEVICE, contiguous=contiguous)
    reason = kernel.supports(problem)
    if reason is not None:
        pytest.skip(reason)
    case = make(context_lens, dtype, head_dim, in_order=contiguous)
    inputs = (case.q, case.k_cache, case.v_cache, case.block_table, case.context_lens)
    options = kernel.plan(problem) | kernel.prepare(problem, case.block_table, case.context_lens)
    workspace = kernel.workspace(problem, DEVICE)
    if workspace is not None:
        workspace.fill_(math.nan)
    assert case.excess(kernel(*inputs, workspace=workspace, **options)) < 1


def check_prefill(name: str, case: LongCase, num_queries: int) -> None:
    rows, (_, num_q_heads, head_dim) = len(case.context_lens), case.q.shape
    shape = (rows, num_q_heads, 1, head_dim, BLOCK_SIZE, num_queries, LONGEST, case.q.dtype, DEVICE)
    reason = prefill.get(name).supports(PrefillProblem(*shape))
    if reason is not None:
        pytest.skip(reason)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * num_queries
    inputs = (case.q, case.k_cache, case.v_cache, case.block_table, case.context_lens)
    assert case.excess(prefill.get(name)(*inputs, starts, num_queries)) < 1


# --- what runs on any machine -------------------------------------------------------------------------------

TORCH_DECODE = ["reference", "torch", "sdpa"]
TORCH_PREFILL = ["reference", "torch"]
TRITON_DECODE = [name for name in decode.names() if isinstance(decode.get(name), TritonDecodeKernel)]
KINDS = [(torch.float32, 64), (torch.float16, 128), (torch.bfloat16, 64)]
longest_case = functools.lru_cache(maxsize=len(KINDS))(make_case)
"""The same for the next kernel: most of the time goes into the exact answer."""


@pytest.mark.parametrize(("dtype", "head_dim"), KINDS)
@pytest.mark.parametrize("name", TORCH_DECODE)
def test_decode_of_torch(name, dtype, head_dim):
    check_decode(name, (LONGEST,), dtype, head_dim, longest_case)


@pytest.mark.parametrize(("dtype", "head_dim"), KINDS)
@pytest.mark.parametrize("name", TORCH_PREFILL)
def test_prefill_of_torch(name, dtype, head_dim):
    check_prefill(name, longest_case((LONGEST,), dtype, head_dim, num_queries=3), 3)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), KINDS[:2]
)  # the interpreter's bf16 proves little: see `slow` and `gpu`
@pytest.mark.parametrize("name", TRITON_DECODE)
def test_decode_of_triton(name, dtype, head_dim):
    check_decode(name, [1021], dtype, head_dim)


@pytest.mark.parametrize(("dtype", "head_dim"), KINDS[:2])
def test_prefill_of_triton(dtype, head_dim):
    check_prefill("triton", make_case([1021], dtype, head_dim, num_queries=3), 3)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), KINDS)
@pytest.mark.parametrize("name", TRITON_DECODE)
def test_decode_of_triton_at_the_longest(name, dtype, head_dim):
    check_decode(name, [LONGEST], dtype, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), KINDS)
def test_prefill_of_triton_at_the_longest(dtype, head_dim):
    check_prefill("triton", make_case([LONGEST], dtype, head_dim, num_queries=3), 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounded", ["acc", "total"])
def test_the_bound_is_missed_by_sums_in_half_precision(rounded, dtype):
    """The same attention, tile by tile, with one running sum kept in the inputs' type: what the bound is to find."""
    case = make_case([LONGEST], dtype, 64)
    kept = {"acc": torch.float32, "total": torch.float32}
    for types, found in ((kept, False), (kept | {rounded: dtype}, True)):
        assert (case.excess(_attend_in_tiles(case, LONGEST, **types)) > 1) == found


def _attend_in_tiles(case: LongCase, length: int, acc: torch.dtype, total: torch.dtype) -> Tensor:
    keys, values = (
        cache[case.block_table[0].long()].flatten(0, 2)[:length].float()
        for cache in (case.k_cache, case.v_cache)
    )
    scores = case.q[0].float() @ keys.T / math.sqrt(keys.shape[1])
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    sum_of_values = torch.zeros(2, keys.shape[1], dtype=acc, device=DEVICE)
    sum_of_weights = torch.zeros(2, 1, dtype=total, device=DEVICE)
    for first in range(0, length, 64):
        tile = weights[:, first : first + 64]
        sum_of_values = (sum_of_values.float() + tile @ values[first : first + 64]).to(acc)
        sum_of_weights = (sum_of_weights.float() + tile.sum(-1, keepdim=True)).to(total)
    return (sum_of_values.float() / sum_of_weights.float())[None].to(case.q.dtype)


# --- compiled -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", decode.names())
def test_decode_on_a_gpu(name, dtype, head_dim):
    check_decode(name, [LONGEST, LONGEST - 37], dtype, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in prefill.names() if name not in prefill.CONTIGUOUS_ONLY])
def test_prefill_on_a_gpu(name, dtype, head_dim):
    num_queries = 40 if name == "warp_specialized" else 3  # fewer would go to `triton`
    checked = [0, num_queries // 2, num_queries - 1]
    case = make_case([LONGEST, LONGEST - 37], dtype, head_dim, num_queries=num_queries, checked=checked)
    check_prefill(name, case, num_queries)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["triton", "warp_specialized"])
def test_a_whole_prompt_on_a_gpu(name, dtype):
    """131,072 tokens at once: tokens near the start, the middle and the end are checked."""
    case = make_case([LONGEST], dtype, 64, num_queries=LONGEST, checked=[20_000, LONGEST // 2, LONGEST - 1])
    check_prefill(name, case, LONGEST)
