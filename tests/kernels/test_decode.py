"""Every decode kernel that runs here (Triton's in the interpreter) against the fp64 oracle, and the contract."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import decode
from kernels.decode.contract import DecodeProblem
from kernels.decode.torch_paged import GATHER_LIMIT, TorchDecode
from kernels.triton_support import INTERPRETING
from tests.kernels.decode_cases import Case, expected, make_case, worst_error

PROBLEM = DecodeProblem(
    1, 4, 2, 64, 16, 100, torch.float32, torch.device("cuda" if torch.cuda.is_available() else "cpu")
)
KERNELS = [
    name for name in decode.names() if name != "reference" and decode.get(name).supports(PROBLEM) is None
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

# (query heads, KV heads): groups of 1, 3, 5, 7 and 8.
GROUPS = [(2, 2), (3, 1), (5, 1), (7, 1), (8, 1)]


def check(name: str, case: Case, scale: float | None = None, **options: object) -> None:
    kernel = decode.get(name)
    reason = kernel.supports(case.problem)
    if reason is not None:
        pytest.skip(reason)
    out = kernel(*case.inputs, scale=scale, out=case.out, **(kernel.plan(case.problem) | options))
    assert out is case.out
    assert worst_error(out, expected(case, scale)) < TOLERANCE[case.q.dtype]


def test_reference_is_the_formula() -> None:
    """One row, one head, written out by hand: the oracle itself must not be taken on trust."""
    q = torch.tensor([[[2.0, 0.0]]])
    keys = torch.tensor([[[[1.0, 9.0]], [[0.0, 9.0]]], [[[-1.0, 9.0]], [[5.0, 9.0]]]])
    values = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]], [[[4.0, 4.0]], [[9.0, 9.0]]]])
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    out = decode.get("reference")(q, keys, values, table, torch.tensor([3], dtype=torch.int32), scale=0.5)
    weights = torch.softmax(torch.tensor([1.0, 0.0, -1.0]), 0)
    wanted = weights @ torch.tensor([[1.0, 0.0], [0.0, 1.0], [4.0, 4.0]])
    torch.testing.assert_close(out[0, 0], wanted)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("block_size", "strided"),
    [(1, False), (16, True), pytest.param(64, False, marks=pytest.mark.slow), (256, True)],
)
def test_ragged_contexts(name: str, block_size: int, strided: bool, device: torch.device) -> None:
    lengths = [1, 0, 300] if block_size > 64 else [1, 0, 150, 64]
    case = make_case(lengths, block_size=block_size, strided=strided, device=device)
    check(name, case)


@pytest.mark.parametrize("name", KERNELS)
def test_strides_of_tables_and_lengths(name: str, device: torch.device) -> None:
    case = make_case([40, 1, 0, 17], device=device)
    columns = torch.stack([case.context_lens + 1, case.context_lens], 1)
    check(name, dataclasses.replace(case, context_lens=columns[:, 1]))
    check(name, dataclasses.replace(case, block_table=case.block_table.T.contiguous().T))
    check(
        name,
        dataclasses.replace(
            case, block_table=torch.stack([case.block_table * 0, case.block_table], 2)[..., 1]
        ),
    )
    equal = make_case([20, 20, 20], device=device)
    check(name, dataclasses.replace(equal, context_lens=equal.context_lens[:1].expand(3)))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("heads", GROUPS)
def test_groups(name: str, heads: tuple[int, int], device: torch.device) -> None:
    check(name, make_case([70, 5], heads=heads, head_dim=32, device=device))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("head_dim", [8, 80, 96, 128])
def test_head_dims(name: str, head_dim: int, device: torch.device) -> None:
    check(name, make_case([70, 5], heads=(2, 1), head_dim=head_dim, device=device))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(name, make_case([90, 33], dtype=dtype, device=device))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_scale(name: str, scale: float, device: torch.device) -> None:
    check(name, make_case([90], device=device), scale=scale)


@pytest.mark.parametrize("name", KERNELS)
def test_more_query_heads_than_one_tile(name: str, device: torch.device) -> None:
    check(name, make_case([40], heads=(70, 1), head_dim=16, device=device))


@pytest.mark.parametrize("name", KERNELS)
def test_large_scores_stay_finite(name: str, device: torch.device) -> None:
    case = make_case([150], device=device)
    case.q.mul_(300)
    check(name, case)


@pytest.mark.parametrize("name", KERNELS)
def test_all_contexts_empty(name: str, device: torch.device) -> None:
    case = make_case([0, 0], device=device)
    check(name, case)
    assert not case.out.any()


@pytest.mark.parametrize("name", KERNELS)
def test_empty_batch(name: str, device: torch.device) -> None:
    case = make_case([5], device=device)
    out = decode.get(name)(*(t[:0] if t.shape[0] == 1 else t for t in case.inputs))
    assert out.shape == (0, *case.q.shape[1:])


@pytest.mark.parametrize("name", KERNELS)
def test_writes_only_out(name: str, device: torch.device) -> None:
    """Inputs keep their bits, and what lies around a strided out stays poisoned."""
    case = make_case([50, 7], strided=True, device=device)
    before = [tensor.clone() for tensor in case.inputs]
    check(name, case)
    for tensor, copy in zip(case.inputs, before):
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(copy))
    around = case.out._base
    assert around is not None
    assert around[:, case.out.shape[1] :].isnan().all()


@pytest.mark.parametrize("name", KERNELS)
def test_allocates_out_and_plans_by_itself(name: str, device: torch.device) -> None:
    case = make_case([100, 30], device=device)
    out = decode.get(name)(*case.inputs)
    assert worst_error(out, expected(case)) < 1e-5


@pytest.mark.parametrize("name", KERNELS)
def test_poisoned_workspace_of_a_larger_problem(name: str, device: torch.device) -> None:
    kernel = decode.get(name)
    case = make_case([90, 0, 31], device=device)
    larger = DecodeProblem(9, 4, 2, 64, 16, 5000, torch.float32, device)
    workspace = kernel.workspace(larger, device)
    if workspace is not None:
        workspace.fill_(float("nan"))
    kernel(*case.inputs, out=case.out, workspace=workspace, **kernel.plan(case.problem))
    assert worst_error(case.out, expected(case)) < 1e-5


@pytest.mark.parametrize("splits", [0, -1])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("split_kv", {}),
        ("split_kv_fused", {}),
        ("split_kv_tma", {}),
        ("fixed_split", {}),
        ("shared_prefix", {}),
        ("shared_prefix", {"prefix_len": 32, "num_splits": 1}),
    ],
)
def test_no_splits_are_refused_by_name(name: str, options: dict, splits: int, device: torch.device) -> None:
    """They would leave the output as it was, without a word."""
    field = "prefix_splits" if options else "num_splits"
    case = make_case([40, 48], device=device)
    with pytest.raises(ValueError, match=f"{field} is {splits}"):
        decode.get(name)(*case.inputs, out=case.out, **(options | {field: splits}))


@pytest.mark.parametrize("name", KERNELS)
def test_unknown_option(name: str, device: torch.device) -> None:
    with pytest.raises(TypeError, match="num_slits"):
        decode.get(name)(*make_case([5], device=device).inputs, num_slits=3)


@pytest.mark.parametrize("name", [n for n in KERNELS if n != "torch"])
def test_offsets_past_2_to_31(name: str, device: torch.device) -> None:
    """The pool has more than 2^31 elements (on a CPU untouched pages cost nothing); the last blocks are used."""
    heads, head_dim, block_size = 1, 64, 16
    num_blocks = 2 * (2**31 // (block_size * heads * head_dim)) + 8
    pool = torch.empty(num_blocks * block_size * heads * head_dim, dtype=torch.float16, device=device)
    kv = pool.view(2, num_blocks // 2, block_size, heads, head_dim)
    small = make_case([40], heads=(2, 1), dtype=torch.float16, device=device)
    last = torch.arange(num_blocks // 2 - 3, num_blocks // 2, device=device)
    used = small.block_table[0, :3].long()
    kv[0, last], kv[1, last] = small.k_cache[used], small.v_cache[used]
    table = last.int()[None]
    out = decode.get(name)(small.q, kv[0], kv[1], table, small.context_lens)
    assert worst_error(out, expected(small)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("name", KERNELS)
def test_matches_while_a_context_grows(name: str, device: torch.device) -> None:
    """One plan for every length up to the problem's, as a captured graph would use it."""
    kernel = decode.get(name)
    case = make_case([130, 20], heads=(2, 1), device=device)
    plan = kernel.plan(case.problem)
    for length in (1, 15, 16, 17, 64, 65, 129):
        case.context_lens[0] = length
        kernel(*case.inputs, out=case.out, **plan)
        assert worst_error(case.out, expected(case)) < 1e-5, length


def test_torch_in_row_chunks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setitem(GATHER_LIMIT, device.type, 1)
    check("torch", make_case([1, 0, 50, 33], device=device))


@settings(max_examples=60, deadline=None)
@given(
    context_lens=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.integers(1, 40),
    block_size=st.integers(1, 20),
    strided=st.booleans(),
)
def test_torch_on_any_shape(
    context_lens: list[int], num_kv_heads: int, group: int, head_dim: int, block_size: int, strided: bool
) -> None:
    case = make_case(
        context_lens,
        heads=(num_kv_heads * group, num_kv_heads),
        head_dim=head_dim,
        block_size=block_size,
        strided=strided,
    )
    out = TorchDecode()(*case.inputs, out=case.out)
    # Absolute: with a head_dim of 1 the sum may cancel.
    torch.testing.assert_close(out.double(), expected(case), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"q": c.q[0]}, r"q must be \[rows"),
        (lambda c: {"q": c.q[:, :3]}, "q has 3 heads, not a multiple of k_cache's 2"),
        (lambda c: {"q": c.q[:1]}, "q has 1 rows, block_table has 2"),
        (lambda c: {"q": c.q.double()}, "k_cache is torch.float32, q is torch.float64"),
        (lambda c: {"q": c.q[..., :32]}, "k_cache has head_dim 64, q has 32"),
        (lambda c: {"k_cache": c.k_cache[0]}, "k_cache must be"),
        (lambda c: {"v_cache": c.v_cache[:, :8]}, "v_cache has shape"),
        (lambda c: {"v_cache": c.v_cache.transpose(0, 3).contiguous().transpose(0, 3)}, "v_cache's last"),
        (lambda c: {"block_table": c.block_table.long()}, "block_table must be"),
        (lambda c: {"context_lens": c.context_lens[:1]}, "context_lens must be"),
        (lambda c: {"out": c.out[:, :2]}, "out is"),
        (lambda c: {"out": c.out.half()}, "out is"),
    ],
)
@pytest.mark.parametrize("name", decode.names())
def test_misfit_is_a_value_error(name: str, change: object, message: str, device: torch.device) -> None:
    case = make_case([20, 3], device=device)
    arguments = {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "block_table": case.block_table,
        "context_lens": case.context_lens,
        "out": case.out,
    }
    with pytest.raises(ValueError, match=message):
        decode.get(name)(**(arguments | change(case)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("num_q_heads", 5),
        ("max_context_len", -1),
        ("block_size", 0),
        ("mean_context_len", 10),
        ("mean_context_len", -1),
    ],
)
def test_problem_is_checked(field: str, value: int) -> None:
    valid = DecodeProblem(1, 4, 2, 8, 4, 9, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        dataclasses.replace(valid, **{field: value})


def test_triton_kernels_say_what_they_do_not_take(device: torch.device) -> None:
    wide = DecodeProblem(1, 4, 2, 512, 16, 100, torch.float16, device)
    double = DecodeProblem(1, 4, 2, 64, 16, 100, torch.float64, device)
    for name in ("single_pass", "split_kv"):
        assert "head_dim is 512" in str(decode.get(name).supports(wide))
        assert "torch.float64" in str(decode.get(name).supports(double))
        assert "batch_size is 65536" in str(
            decode.get(name).supports(dataclasses.replace(wide, head_dim=64, batch_size=2**16))
        )
        assert decode.get(name).supports(DecodeProblem(1, 4, 2, 64, 16, 100, torch.float16, device)) is None
        with pytest.raises(ValueError, match=f"{name}: dtype is torch.float64"):
            decode.get(name)(*make_case([5], dtype=torch.float64, device=device).inputs)


@pytest.mark.skipif(not INTERPRETING, reason="about Triton's interpreter")
def test_the_interpreter_cannot_be_trusted_with_bf16() -> None:
    """Guards the reason for dot_dtype: should this fail, Triton has mended bf16 and the upcast can go."""
    import triton
    import triton.language as tl

    from kernels.triton_support import dot_dtype

    @triton.jit
    def product(x_ptr, y_ptr, out_ptr, UPCAST: tl.constexpr):
        x, y = tl.load(x_ptr), tl.load(y_ptr)
        if UPCAST:
            x, y = x.to(tl.float32), y.to(tl.float32)
        tl.store(out_ptr, (x * y).to(tl.float32))

    x, y = torch.tensor([1.5]).bfloat16(), torch.tensor([2.0]).bfloat16()
    raw, upcast = torch.zeros(1), torch.zeros(1)
    product[(1,)](x, y, raw, UPCAST=False)
    product[(1,)](x, y, upcast, UPCAST=True)
    assert raw.item() != 3.0
    assert upcast.item() == 3.0
    assert dot_dtype(torch.bfloat16) == tl.float32


def test_torch_refuses_a_workspace_that_does_not_fit() -> None:
    case = make_case([20, 3])
    needed = 2 * 2 * 20 * 2 * 64
    for workspace in (torch.empty(needed - 1), torch.empty(needed, dtype=torch.float16)):
        with pytest.raises(ValueError, match="workspace is"):
            TorchDecode()(*case.inputs, workspace=workspace)
    TorchDecode()(*case.inputs, out=case.out, workspace=torch.empty(needed))
    assert worst_error(case.out, expected(case)) < 1e-5
