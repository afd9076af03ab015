"""The Triton prefill kernel compiled, on a GPU: accuracy by dtype, every tile height, far offsets, compilations."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import prefill
from kernels.prefill import triton_flash
from kernels.prefill.triton_flash import choose_tile
from tests.kernels.prefill_case import PrefillCase, make_case

pytestmark = pytest.mark.gpu

# Norm of the error over the norm of the answer, for each token and head. bf16 and fp16 round the
# probabilities and the result; fp32 products are exact ("ieee"), never TF32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def check(case: PrefillCase, **options) -> torch.Tensor:
    out = case.untouched_out()
    prefill.get("triton")(*case.args, out=out, **options)
    precise = [t.float() for t in (case.q, case.k_cache, case.v_cache)]
    expected = prefill.get("reference")(*precise, *case.args[3:], out=case.untouched_out().float())
    used = int(case.query_start_loc[-1])
    assert torch.equal(out[used:], case.untouched_out()[used:])
    error = (out[:used].float() - expected[:used]).norm(dim=-1) / expected[:used].norm(dim=-1)
    assert error.max() < TOLERANCE[case.q.dtype], f"relative error {error.max():.2e}"
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"), [(64, 8), (32, 8), (16, 8), (14, 2), (8, 8), (9, 3), (5, 1)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_accuracy(dtype, num_q_heads, num_kv_heads, head_dim, block_size):
    check(
        make_case(
            [300, 1, 0, 77, 512],
            [300, 2049, 33, 1000, 1500],
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            device="cuda",
        )
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [80, 96, 256])
@pytest.mark.parametrize("block_size", [1, 4, 24])
def test_odd_head_dims_and_block_sizes(dtype, head_dim, block_size):
    shape = {"num_q_heads": 12, "num_kv_heads": 4, "head_dim": head_dim, "block_size": block_size}
    check(make_case([130, 5, 1], [130, 700, 64], **shape, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_contexts(dtype):
    """A chunk at the end of 40,000 tokens, and one token there."""
    check(
        make_case(
            [200, 1],
            [40_000, 39_999],
            num_q_heads=16,
            num_kv_heads=8,
            head_dim=128,
            dtype=dtype,
            device="cuda",
        )
    )


@pytest.mark.parametrize("query_len", [1, 2, 4, 8, 9, 16, 32, 33, 100])
def test_every_tile_height(query_len):
    case = make_case(
        [query_len], [query_len + 500], num_q_heads=14, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    check(case)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_tiles_of_other_gpus_are_right_here_too(head_dim, capability):
    if capability[0] == 9 and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs 227 KB of shared memory")
    for length in (1, 20, 300):
        tile = choose_tile(head_dim, torch.bfloat16, 2, length, capability)
        check(
            make_case([length], [length + 300], head_dim=head_dim, dtype=torch.bfloat16, device="cuda"),
            tile=tile,
        )


def test_a_row_is_the_same_alone_and_in_company():
    """Bit-equal, given the same tile: no sum crosses rows."""
    shape = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    case = make_case([64, 300, 200], [900, 300, 4000], **shape)
    tile = choose_tile(128, torch.bfloat16, 2, 300, torch.cuda.get_device_capability())
    together = check(case, tile=tile)
    alone = dataclasses.replace(
        case,
        q=case.q[:64],
        block_table=case.block_table[:1],
        context_lens=case.context_lens[:1],
        query_start_loc=case.query_start_loc[:2],
        max_query_len=64,
    )
    assert torch.equal(prefill.get("triton")(*alone.args, tile=tile), together[:64])


def test_offsets_past_2_31_elements():
    case = make_case(
        [40], [100], head_dim=128, num_kv_heads=8, num_q_heads=16, dtype=torch.bfloat16, device="cuda"
    )
    shape = case.k_cache.shape[1:]
    num_blocks = 2**31 // (2 * shape.numel()) + 16
    pool = torch.full((num_blocks, 2, *shape), float("nan"), dtype=torch.bfloat16, device="cuda")
    table = case.block_table.clone()
    used = -(-100 // shape[0])
    blocks = num_blocks - 1 - torch.arange(used, device="cuda")
    pool[blocks, 0] = case.k_cache[case.block_table[0, :used].long()]
    pool[blocks, 1] = case.v_cache[case.block_table[0, :used].long()]
    table[0, :used] = blocks.int()
    far = dataclasses.replace(case, k_cache=pool[:, 0], v_cache=pool[:, 1], block_table=table)
    assert torch.equal(prefill.get("triton")(*far.args)[:40], prefill.get("triton")(*case.args)[:40])


def test_lengths_and_batch_sizes_do_not_recompile():
    """Case K12: batches of 1 to 17, table widths and views at odd offsets share the compiled kernels."""
    shape = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}

    def compiled() -> int:
        return len(triton_flash._prefill_kernel.device_caches[torch.cuda.current_device()][0])

    check(make_case([200], [200], **shape))
    before = compiled()
    for batch in (1, 2, 3, 15, 16, 17):
        case = make_case([100 + i for i in range(batch)], [130 + 5 * i for i in range(batch)], **shape)
        check(case)
        first = int(case.query_start_loc[1])
        tail = dataclasses.replace(
            case,
            q=case.q[first:],
            block_table=case.block_table[1:, :-1],
            context_lens=case.context_lens[1:],
            query_start_loc=case.query_start_loc[1:] - first,
            max_query_len=100 + batch - 1 if batch > 1 else 0,
        )
        prefill.get("triton")(*tail.args)
    assert compiled() == before


def test_can_be_captured():
    case = make_case(
        [64, 100],
        [500, 100],
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
    )
    out = case.untouched_out()
    expected = check(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.get("triton")(*case.args, out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out[:164], expected[:164])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_kernel(dtype):
    case = make_case(
        [300, 1, 0, 77], [300, 500, 3, 900], num_q_heads=16, num_kv_heads=8, dtype=dtype, device="cuda"
    )
    expected = prefill.get("reference")(*case.args)
    used = int(case.query_start_loc[-1])
    actual = prefill.get("torch")(*case.args)[:used].float()
    error = (actual - expected[:used].float()).norm(dim=-1) / expected[:used].float().norm(dim=-1)
    assert error.max() < TOLERANCE[dtype]
