"""Every prefill kernel that runs here, against attention written out position by position in fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import prefill
from kernels.prefill.triton_flash import PrefillTile, choose_tile
from tests.kernels.prefill_case import DEVICE, make_case

KERNELS = ["reference", "torch", "triton"]
# Absolute error of the outputs, which are averages of standard normals. The interpreter multiplies bf16
# operands in fp32, so here only q, k, v and the result are rounded.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check(name: str, case, scale=None, tolerance=None, **options) -> None:
    out = case.untouched_out()
    returned = prefill.get(name)(*case.args, scale=scale, out=out, **options)
    assert returned is out
    tolerance = TOLERANCE[case.q.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(out.double(), case.expected(scale), atol=tolerance, rtol=tolerance)


def test_names_and_unknown_name():
    assert prefill.names()[:3] == KERNELS
    assert set(KERNELS) <= set(prefill.available(DEVICE))
    with pytest.raises(prefill.UnknownKernelError, match=r"flash3.*reference, torch, triton"):
        prefill.get("flash3")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 64, 256])
def test_whole_prompts_chunks_prefix_hits_and_empty_chunks(name, block_size):
    # whole prompt; one token after a prefix; chunk after a prefix; nothing to do; not even a context
    check(name, make_case([19, 1, 33, 0, 0], [19, 50, 70, 20, 0], block_size=block_size))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("field", ["block_table", "context_lens", "query_start_loc"])
def test_strides_of_tables_and_lengths(name, field):
    case = make_case([19, 1, 3], [19, 50, 20])
    tensor = getattr(case, field)
    check(name, dataclasses.replace(case, **{field: torch.stack([tensor * 0, tensor], -1)[..., 1]}))
    check(name, dataclasses.replace(case, **{field: tensor.T.contiguous().T if tensor.dim() > 1 else tensor}))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(name, head_dim):
    check(name, make_case([9, 2], [9, 37], head_dim=head_dim))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(2, 2), (5, 1), (14, 2), (9, 3), (16, 2), (20, 1)])
def test_groups(name, num_q_heads, num_kv_heads):
    check(name, make_case([21, 3], [21, 40], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name, dtype):
    check(name, make_case([17, 4], [17, 66], dtype=dtype))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("scale", [0.3, 4.0, 0.0, -0.2])
def test_scale(name, scale):
    # Large scores carry large rounding errors into the exponentials.
    # A chunk after a prefix, and a whole prompt.
    check(name, make_case([18, 7], [30, 7]), scale=scale, tolerance=1e-4 if scale > 1 else None)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("magnitude", [1e-3, 60.0])
def test_scores_far_from_one(name, magnitude):
    """Scores in the hundreds: the running maximum must keep exponentials finite."""
    case = make_case([18], [50])
    check(name, dataclasses.replace(case, q=case.q * magnitude), tolerance=2e-4 if magnitude > 1 else None)


@pytest.mark.parametrize("tile", [(16, 16), (32, 16), (64, 32), (16, 64), (128, 128)])
@pytest.mark.parametrize("block_size", [16, 24, 64])
def test_triton_tiles(tile, block_size):
    """Tiles above and below the block size, and chunks that begin and end off tile edges."""
    check("triton", make_case([37, 5], [64, 69], block_size=block_size), tile=PrefillTile(*tile, 1, 1))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_chunks_equal_the_whole(name):
    """The same queries in one chunk, in chunks of 7 and one by one give the same rows."""
    case = make_case([40], [40])
    whole = prefill.get(name)(*case.args)
    for size in (1, 7):
        for start in range(0, 40, size):
            end = min(start + size, 40)
            rows = prefill.get(name)(
                case.q[start:end],
                case.k_cache,
                case.v_cache,
                case.block_table,
                torch.tensor([end], dtype=torch.int32, device=DEVICE),
                torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
                end - start,
            )
            torch.testing.assert_close(rows, whole[start:end], atol=2e-6, rtol=2e-6)


def test_torch_masks_in_pieces(monkeypatch):
    """Chunks longer than a mask piece after a prefix."""
    monkeypatch.setattr("kernels.prefill.torch_sdpa.QUERIES_PER_MASK", 16)
    check("torch", make_case([50, 16, 17], [61, 30, 17]))


@pytest.mark.parametrize("name", KERNELS)
def test_allocates_out_and_allows_larger_max_query_len(name):
    case = make_case([5, 3], [5, 10])
    out = prefill.get(name)(*case.args[:-1], len(case.q))
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    torch.testing.assert_close(out[:8].double(), case.expected()[:8], atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_empty_batch(name):
    case = make_case([], [])
    out = case.untouched_out()
    prefill.get(name)(*case.args, out=out)
    assert (out == case.untouched_out()).all()


def test_triton_offsets_past_2_31_elements():
    """Blocks whose first element lies beyond what 32 bits count. The pool is virtual: few pages are touched."""
    case = make_case([6], [40], head_dim=128, num_kv_heads=2, dtype=torch.float16)
    shape = case.k_cache.shape[1:]
    num_blocks = 2**31 // (2 * shape.numel()) + 4
    pool = torch.empty(num_blocks, 2, *shape, dtype=torch.float16, device=DEVICE)
    table = case.block_table.clone()
    for i in range(3):
        block = num_blocks - 1 - i
        pool[block, 0] = case.k_cache[case.block_table[0, i]]
        pool[block, 1] = case.v_cache[case.block_table[0, i]]
        table[0, i] = block
    far = dataclasses.replace(case, k_cache=pool[:, 0], v_cache=pool[:, 1], block_table=table)
    assert far.k_cache.stride(0) * (num_blocks - 3) > 2**31
    check("triton", far)


def test_triton_supports():
    kernel = prefill.get("triton")
    problem = prefill.PrefillProblem(
        batch_size=4,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        max_query_len=100,
        max_context_len=200,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    assert kernel.supports(problem) is None
    assert set(kernel.plan(problem)) == {"tile"}
    assert "head_dim 512" in kernel.supports(dataclasses.replace(problem, head_dim=512))
    assert "float64" in kernel.supports(dataclasses.replace(problem, dtype=torch.float64))
    assert "batch_size 65536" in kernel.supports(dataclasses.replace(problem, batch_size=2**16))
    assert "160 query heads" in kernel.supports(dataclasses.replace(problem, num_q_heads=160, num_kv_heads=1))
    with pytest.raises(ValueError, match="num_q_heads 15 is not a multiple of num_kv_heads 8"):
        dataclasses.replace(problem, num_q_heads=15)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        dataclasses.replace(problem, block_size=0)


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("group", [1, 5, 7, 8, 16, 100])
def test_few_tiles_are_ever_compiled(capability, group):
    """Whatever the chunk lengths, a model compiles at most three kernels (rule 12, case K12)."""
    for dtype in (torch.bfloat16, torch.float32):
        tiles = {choose_tile(128, dtype, group, length, capability) for length in range(1, 2000)}
        assert len(tiles) <= 3
        assert all(tile.block_m >= group for tile in tiles)


BAD = {
    "q": lambda c: {"q": c.q[:, :3]},
    "k_cache": lambda c: {"k_cache": c.k_cache[0]},
    "v_cache": lambda c: {"v_cache": c.v_cache[:, :, :1]},
    "block_table": lambda c: {"block_table": c.block_table.long()},
    "context_lens": lambda c: {"context_lens": c.context_lens[:1]},
    "query_start_loc": lambda c: {"query_start_loc": c.query_start_loc[:-1]},
    "max_query_len": lambda c: {"max_query_len": len(c.q) + 1},
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments_are_named(name, argument):
    case = make_case([5, 3], [5, 10])
    case = dataclasses.replace(case, **BAD[argument](case))
    with pytest.raises(ValueError, match=argument):
        prefill.get(name)(*case.args)


@pytest.mark.parametrize("name", KERNELS)
def test_bad_out_and_option_are_named(name):
    case = make_case([5], [5])
    with pytest.raises(ValueError, match="out must be like q"):
        prefill.get(name)(*case.args, out=torch.empty(1))
    with pytest.raises(TypeError, match="num_splits"):
        prefill.get(name)(*case.args, num_splits=2)
