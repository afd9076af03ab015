"""Decode kernels compiled and run on a GPU: precision, poison, large offsets, capture and bounded compiles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from kernels import decode
from kernels.decode import DecodeKernel, DecodeProblem
from kernels.decode.launch import TritonDecodeKernel
from kernels.fp8_cache import FP8
from tests.kernels.decode_cases import GARBAGE, Case, expected, make_case, quantised, worst_error
from tests.kernels.test_shared_prefix import shared_case

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PROBLEM = DecodeProblem(1, 4, 2, 64, 16, 100, torch.bfloat16, CUDA)
KERNELS = [
    name for name in decode.names() if name != "reference" and decode.get(name).supports(PROBLEM) is None
]
TRITON_KERNELS = [name for name in KERNELS if isinstance(decode.get(name), TritonDecodeKernel)]
# Take any head_dim up to 256, any group and any block size.
GENERAL = {"torch", "single_pass", "split_kv", "split_kv_fused", "fixed_split", "stream_k", "shared_prefix"}
# Those whose scratch grows with num_splits.
SPLIT_KERNELS = {"split_kv", "split_kv_fused", "split_kv_tma", "fixed_split", "shared_prefix"}
HEADS = [(64, 8), (32, 8), (16, 8), (14, 2), (8, 8), (9, 3)]
RAGGED = [1, 0, 15, 16, 17, 255, 256, 257, 1000, 4096, 40_000]

# Largest |out - reference| / |reference| of a row and head: two roundings of the type, probabilities and output.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def run(kernel: DecodeKernel, case: Case, **options: object) -> torch.Tensor:
    """One planned call with a poisoned workspace."""
    reason = kernel.supports(case.problem)
    if reason is not None:
        pytest.skip(reason)
    workspace = kernel.workspace(case.problem, CUDA)
    if workspace is not None:
        workspace.fill_(float("nan"))
    prepared = kernel.prepare(case.problem, case.block_table, case.context_lens)
    options = kernel.plan(case.problem) | prepared | options
    return kernel(*case.inputs, out=case.out, workspace=workspace, **options)


def check_all(case: Case) -> None:
    """All kernels that take the case, on one pool and one oracle: poisoned out, pool and scratch, garbage in tables."""
    reference = expected(case)
    names = [name for name in KERNELS if decode.get(name).supports(case.problem) is None]
    assert GENERAL.issubset(names)
    for name in names:
        case.out.fill_(float("nan"))
        assert worst_error(run(decode.get(name), case), reference) < TOLERANCE[case.q.dtype], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ragged_contexts(heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    check_all(
        make_case(RAGGED, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=CUDA)
    )


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [*itertools.product([(2, 2), (5, 1), (14, 2), (16, 2)], [80, 96]), ((8, 2), 256)],
    ids=str,
)
def test_other_head_dims(heads: tuple[int, int], head_dim: int) -> None:
    """Groups of 1, 5, 7, 8 and 4, in strided views."""
    shape = {"heads": heads, "head_dim": head_dim, "strided": True}
    check_all(make_case([3000, 0, 77, 16, 33], **shape, dtype=torch.bfloat16, device=CUDA))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("heads", [(64, 1), (100, 1), (5, 1), (7, 1)], ids=str)
def test_other_groups(name: str, heads: tuple[int, int]) -> None:
    case = make_case([3000, 0, 77], heads=heads, head_dim=128, dtype=torch.bfloat16, device=CUDA)
    assert worst_error(run(decode.get(name), case), expected(case)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("heads", "block_size"), [((4, 2), 16), ((5, 5), 64), ((7, 1), 256), ((64, 8), 16)], ids=str
)
def test_strided_views(name: str, heads: tuple[int, int], block_size: int) -> None:
    shape = {"heads": heads, "block_size": block_size, "strided": True}
    case = make_case([1000, 0, 77], **shape, dtype=torch.bfloat16, device=CUDA)
    assert worst_error(run(decode.get(name), case), expected(case)) < TOLERANCE[torch.bfloat16]
    around = case.out._base
    assert around is not None
    assert around[:, case.out.shape[1] :].isnan().all()


@pytest.mark.parametrize("name", TRITON_KERNELS)
@pytest.mark.parametrize("heads", [(8, 8), (64, 8), (64, 1)], ids=str)
def test_fp32_is_exact_to_fp32(name: str, heads: tuple[int, int]) -> None:
    """TF32 would be off by about 1e-3: the products must be IEEE."""
    case = make_case([1000, 31], heads=heads, head_dim=128, device=CUDA)
    assert worst_error(run(decode.get(name), case), expected(case)) < 1e-5


@pytest.mark.parametrize("name", KERNELS)
def test_offsets_past_2_to_31(name: str) -> None:
    """Keys and values lie more than 2^31 elements into one poisoned buffer."""
    small = make_case([500, 0], heads=(16, 8), head_dim=128, dtype=torch.bfloat16, device=CUDA)
    shape = small.k_cache.shape[1:]
    num_blocks = 2**31 // shape.numel() + 64
    kv = torch.full((num_blocks, 2, *shape), float("nan"), dtype=torch.bfloat16, device=CUDA)
    used = small.block_table[0, :32].long()
    last = torch.arange(num_blocks - 32, num_blocks, device=CUDA)
    kv[last, 0], kv[last, 1] = small.k_cache[used], small.v_cache[used]
    table = torch.tensor(GARBAGE, dtype=torch.int32, device=CUDA).repeat(2, 12)[:, :34]
    table[0, :32] = last.int()
    far = replace(small, k_cache=kv[:, 0], v_cache=kv[:, 1], block_table=table)
    assert worst_error(run(decode.get(name), far), expected(small)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", [name for name in KERNELS if name in SPLIT_KERNELS])
def test_scratch_past_2_to_31(name: str) -> None:
    """272 rows of 64 heads in 1,024 splits: the last 16 rows' partial outputs lie past 2^31 elements."""
    num_splits, rows = 1024, 272
    case = make_case(
        [33] * (rows - 1) + [300], heads=(64, 8), head_dim=128, dtype=torch.bfloat16, device=CUDA
    )
    assert (rows - 16) * 64 * num_splits * 128 >= 2**31
    workspace = torch.full((rows * 64 * num_splits * 129 + 2**20,), float("nan"), device=CUDA)
    decode.get(name)(*case.inputs, out=case.out, workspace=workspace, num_splits=num_splits)
    assert worst_error(case.out, expected(case)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype"),
    [
        ((64, 8), 128, 16, torch.bfloat16),
        ((64, 8), 128, 64, torch.float16),
        ((8, 8), 128, 16, torch.bfloat16),
        ((5, 1), 80, 64, torch.bfloat16),
        ((14, 2), 96, 16, torch.bfloat16),
        ((16, 2), 256, 16, torch.bfloat16),
    ],
    ids=str,
)
def test_shared_prefix(heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    """The cascade itself: rows longer than the prefix, as long, shorter and empty, planned and poisoned as above."""
    case = shared_case(
        [3000, 2048, 0, 2049, 777, 4000],
        2048,
        heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=CUDA,
    )
    kernel = decode.get("shared_prefix")
    problem = replace(case.problem, shared_prefix_len=2048)
    workspace = kernel.workspace(problem, CUDA)
    assert workspace is not None
    workspace.fill_(float("nan"))
    plan = kernel.plan(problem)
    assert plan["prefix_len"] == 2048
    kernel(*case.inputs, out=case.out, workspace=workspace, **plan)
    assert worst_error(case.out, expected(case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", [name for name in TRITON_KERNELS if FP8 in decode.get(name).kv_dtypes])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype"),
    [
        ((64, 8), 128, 16, torch.bfloat16),
        ((64, 8), 128, 64, torch.bfloat16),
        ((64, 8), 128, 16, torch.float16),
        ((16, 8), 128, 16, torch.float32),
        ((8, 8), 64, 256, torch.bfloat16),
        ((5, 1), 80, 16, torch.bfloat16),
        ((14, 2), 96, 64, torch.bfloat16),
    ],
    ids=str,
)
def test_fp8_cache(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, name: str
) -> None:
    """Against the oracle on the same fp8 values, each head with its own scale; NaN wherever no token is."""
    shape = {"heads": heads, "head_dim": head_dim, "block_size": block_size}
    case = make_case(RAGGED, **shape, dtype=dtype, device=CUDA)
    case.k_cache[:, :, 0] *= 2
    case.v_cache[:, :, -1] *= 30
    case, scales = quantised(case)
    for prefetch in (False, True):
        case.out.fill_(float("nan"))
        out = run(decode.get(name), case, prefetch=prefetch, **scales)
        assert worst_error(out, expected(case, **scales)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", KERNELS)
def test_every_batch_and_context_of_one_plan(name: str) -> None:
    """As a captured graph would: planned for the longest context, used for all shorter ones."""
    kernel = decode.get(name)
    case = make_case([5000] * 4, heads=(16, 8), head_dim=128, dtype=torch.bfloat16, device=CUDA)
    plan = kernel.plan(case.problem)
    for lengths in ([1, 5000, 0, 63], [64, 65, 127, 128], [4999, 4096, 2, 1]):
        case.context_lens.copy_(torch.tensor(lengths))
        kernel(*case.inputs, out=case.out, **plan)
        assert worst_error(case.out, expected(case)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", KERNELS)
def test_captured_and_replayed(name: str) -> None:
    kernel = decode.get(name)
    case = make_case([2000, 2000], heads=(16, 8), head_dim=128, dtype=torch.bfloat16, device=CUDA)
    run(kernel, case)
    workspace = kernel.workspace(case.problem, CUDA)
    plan = kernel.plan(case.problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(*case.inputs, out=case.out, workspace=workspace, **plan)
    for lengths in ([2000, 300], [17, 1999]):
        case.context_lens.copy_(torch.tensor(lengths))
        case.out.fill_(float("nan"))
        if workspace is not None:
            workspace.fill_(float("nan"))
        graph.replay()
        assert worst_error(case.out, expected(case)) < TOLERANCE[torch.bfloat16]


def test_a_row_in_company_differs_by_rounding_only() -> None:
    """The default splits by the batch: within 2 bf16 units in the last place. With split_size: the same bits."""
    alone = make_case([900], heads=(16, 8), head_dim=128, dtype=torch.bfloat16, device=CUDA)
    kernel = decode.get("split_kv")
    for others in ([8000], list(range(40, 1900, 124))):
        company = make_case(
            [*others, 900], heads=(16, 8), head_dim=128, dtype=torch.bfloat16, device=CUDA, seed=1
        )
        blocks, mine = company.block_table[-1, :57].long(), alone.block_table[0, :57].long()
        company.k_cache[blocks], company.v_cache[blocks] = alone.k_cache[mine], alone.v_cache[mine]
        company.q[-1] = alone.q[0]
        single, row = run(kernel, alone)[0].float(), run(kernel, company)[-1].float()
        unit = torch.exp2(torch.floor(torch.log2(single.abs().clamp(min=1e-30))) - 7)
        # Where terms cancel, rounding is of the terms' size rather than of the sum's.
        unit = unit.clamp(min=float(single.abs().mean()) * 2**-8)
        assert bool(((single - row).abs() <= 2 * unit).all())
        fixed = [kernel(*case.inputs, split_size=256)[-1].clone() for case in (alone, company)]
        assert torch.equal(*fixed)


def test_compiles_are_bounded() -> None:
    """After one call, other batch sizes and contexts of the same model compile nothing new."""
    from kernels.decode.merge import _merge_splits
    from kernels.decode.single_pass import _attend_sequence
    from kernels.decode.split_kv import _attend_split

    def compiled() -> int:
        device = torch.cuda.current_device()
        return sum(len(f.device_caches[device][0]) for f in (_attend_split, _merge_splits, _attend_sequence))

    def call(batch_size: int, context: int, num_splits: int) -> None:
        case = make_case(
            [context] * batch_size, heads=(16, 8), head_dim=128, dtype=torch.bfloat16, device=CUDA
        )
        decode.get("split_kv")(*case.inputs, num_splits=num_splits)
        decode.get("single_pass")(*case.inputs)

    for num_splits in (1, 16, 32, 64):  # writing directly, and the three steps of the merge
        call(2, 100, num_splits)
    before = compiled()
    for batch_size in (1, 2, 3, 15, 16, 17, 32):
        for context, num_splits in ((1, 1), (16, 2), (100, 3), (1024, 16), (1030, 33)):
            call(batch_size, context, num_splits)
    assert compiled() == before


@pytest.mark.parametrize("num_splits", [2, 7, 16])  # 384 programs at most: more do not fit an H200 at once
def test_fused_cooperative(num_splits: int) -> None:
    """Programs that wait for one another: repeated, so that a counter left wrong would hang or show."""
    kernel = decode.get("split_kv_fused")
    case = make_case([4096, 0, 70], heads=(16, 8), head_dim=128, dtype=torch.bfloat16, device=CUDA)
    # More splits than the plan's own: the workspace of a batch that needs as many partial results.
    workspace = kernel.workspace(replace(case.problem, batch_size=3 * num_splits), CUDA)
    for _ in range(20):
        case.out.fill_(float("nan"))
        kernel(*case.inputs, out=case.out, workspace=workspace, num_splits=num_splits, cooperative=True)
        assert worst_error(case.out, expected(case)) < TOLERANCE[torch.bfloat16]


def test_fused_under_contention() -> None:
    """Many rows and splits, many times: a race between publishing and merging would show as an error that moves."""
    kernel = decode.get("split_kv_fused")
    case = make_case([700] * 48, heads=(16, 8), head_dim=64, dtype=torch.float16, device=CUDA)
    reference = expected(case)
    first = None
    for _ in range(200):
        case.out.fill_(float("nan"))
        kernel(*case.inputs, out=case.out, num_splits=11)
        assert worst_error(case.out, reference) < TOLERANCE[torch.float16]
        first = case.out.clone() if first is None else first
        assert torch.equal(case.out, first)


def test_first_call_equals_second() -> None:
    """Nothing is tuned on the caller's tensors."""
    case = make_case([777, 3], heads=(16, 8), head_dim=96, dtype=torch.bfloat16, device=CUDA)
    first = run(decode.get("split_kv"), case).clone()
    assert torch.equal(first, run(decode.get("split_kv"), case))
