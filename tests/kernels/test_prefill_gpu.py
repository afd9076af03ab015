"""The prefill kernels compiled, on a GPU: accuracy by dtype, every tile height, far offsets, compilations."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kernels import prefill
from kernels.prefill import PrefillProblem, triton_flash, warp_specialized
from kernels.prefill.triton_flash import TritonPrefill, choose_tile
from tests.kernels.prefill_case import PrefillCase, make_case

pytestmark = pytest.mark.gpu

# Norm of the error over the norm of the answer, for each token and head. bf16 and fp16 round the
# probabilities and the result; fp32 products are exact ("ieee"), never TF32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


KERNELS = ("triton", "warp_specialized")


def check(case: PrefillCase, kernel: str = "triton", **options) -> torch.Tensor:
    """Its output; skips what the kernel does not take."""
    num_q_heads, head_dim = case.q.shape[1:]
    block_size, num_kv_heads = case.k_cache.shape[1:3]
    longest, device = int(case.context_lens.max()), case.q.device
    shape = (
        len(case.context_lens),
        num_q_heads,
        num_kv_heads,
        head_dim,
        block_size,
        case.max_query_len,
        longest,
    )
    reason = prefill.get(kernel).supports(PrefillProblem(*shape, case.q.dtype, device))
    if reason is not None:
        pytest.skip(reason)
    out = case.untouched_out()
    prefill.get(kernel)(*case.args, out=out, **options)
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
@pytest.mark.parametrize("kernel", KERNELS)
def test_accuracy(kernel, dtype, num_q_heads, num_kv_heads, head_dim, block_size):
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
        ),
        kernel,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [80, 96, 256])
@pytest.mark.parametrize("block_size", [1, 4, 24])
def test_odd_head_dims_and_block_sizes(dtype, head_dim, block_size):
    shape = {"num_q_heads": 12, "num_kv_heads": 4, "head_dim": head_dim, "block_size": block_size}
    check(make_case([130, 5, 1], [130, 700, 64], **shape, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", KERNELS)
def test_long_contexts(kernel, dtype):
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
        ),
        kernel,
    )


@pytest.mark.parametrize("query_len", [1, 2, 4, 8, 9, 16, 32, 33, 100])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_tile_height(kernel, query_len):
    case = make_case(
        [query_len], [query_len + 500], num_q_heads=14, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    check(case, kernel)


def test_a_hopper_has_specialised_warps():
    """Or every test of them would be skipped without a word."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a GPU of compute capability 9.0")
    assert prefill.get("warp_specialized").unavailable(torch.device("cuda")) is None


def test_specialised_warps_give_tritons_bits():
    """Their tiles are alike, and so are their sums."""
    shape = {"num_q_heads": 16, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    case = make_case([700, 300], [700, 2300], **shape)
    one, other = (check(case, kernel) for kernel in KERNELS)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("queries", "heads"),
    [
        ([3000, 3000, 1500, 3000], (32, 8)),  # 2,632 items, twenty a multiprocessor
        ([random.Random(i).randrange(65, 131) for i in range(300)], (16, 8)),
        ([random.Random(i).choice([0, 0, 1, 70]) for i in range(300)], (8, 2)),
        ([40] * 20, (64, 1)),  # two tokens an item
    ],
    ids=["long", "short", "few", "group 64"],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_items_a_program(queries, heads, head_dim):
    """And Triton's bits in all of them."""
    case = make_case(
        queries,
        [n + 37 * i % 500 for i, n in enumerate(queries)],
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    found = check(case, "warp_specialized")
    assert torch.equal(found, prefill.get("triton")(*case.args, out=case.untouched_out()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_queries_at_any_stride(kernel):
    """16-byte aligned or not: cp.async copies only those that are."""
    case = make_case([150, 40], [400, 40], num_q_heads=16, head_dim=128, dtype=torch.bfloat16, device="cuda")
    expected = check(case, kernel)
    shape = case.q.shape
    for extra, start in ((8, 0), (8, 3), (16, 0), (16, 1)):
        wide = torch.full((*shape[:2], shape[2] + extra), float("nan"), dtype=case.q.dtype, device="cuda")
        q = wide[..., start : start + shape[2]].copy_(case.q)
        assert torch.equal(check(dataclasses.replace(case, q=q), kernel), expected)


@pytest.mark.parametrize("seed", range(12))
def test_specialised_warps_give_the_same_bits_each_time(seed):
    """A wait that is missing somewhere would show as a difference now and then; another grid, another timing."""
    rng = random.Random(seed)
    queries = [rng.choice([0, 1, 33, 128, 129, 700]) for _ in range(rng.choice([1, 3, 40]))]
    queries[0] = 200  # long enough not to go to `triton`
    group, kv_heads = rng.choice([(1, 3), (2, 8), (4, 2), (5, 2), (8, 8), (64, 1)])
    case = make_case(
        queries,
        [n + rng.choice([1, 60, 128, 3000]) for n in queries],
        num_q_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=rng.choice([64, 128]),
        block_size=rng.choice([8, 16, 24, 32, 256]),
        dtype=rng.choice([torch.float16, torch.bfloat16]),
        device="cuda",
        seed=seed,
    )
    first = check(case, "warp_specialized")
    for _ in range(20):
        again = case.untouched_out()
        prefill.get("warp_specialized")(*case.args, out=again)
        assert torch.equal(first, again)


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_scales(kernel, scale):
    case = make_case([150], [400], num_q_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
    check(case, kernel)
    found = prefill.get(kernel)(*case.args, scale=scale)[:150]
    torch.testing.assert_close(found.double(), case.expected(scale)[:150], atol=0.01, rtol=0.01)


def test_long_chunks_do_not_go_to_another_kernel(monkeypatch):
    case = make_case([150], [400], num_q_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
    in_a_row = dataclasses.replace(case, k_cache=case.k_cache.contiguous(), v_cache=case.v_cache.contiguous())

    def refuse(*_arguments, **_options):
        raise AssertionError("went to triton")

    monkeypatch.setattr(TritonPrefill, "_launch", refuse)
    for one in (case, in_a_row):
        check(one, "warp_specialized")
    heads_first = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)  # TMA sees no slots there
    with pytest.raises(AssertionError, match="went to triton"):
        check(dataclasses.replace(case, k_cache=heads_first), "warp_specialized")


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


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_is_the_same_alone_and_in_company(kernel):
    """Bit-equal, given the same tile: no sum crosses rows."""
    shape = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    case = make_case([64, 300, 200], [900, 300, 4000], **shape)
    tile = choose_tile(128, torch.bfloat16, 2, 300, torch.cuda.get_device_capability())
    options = {"tile": tile} if kernel == "triton" else {}
    together = check(case, kernel, **options)
    alone = dataclasses.replace(
        case,
        q=case.q[:64],
        block_table=case.block_table[:1],
        context_lens=case.context_lens[:1],
        query_start_loc=case.query_start_loc[:2],
        max_query_len=64,
    )
    assert torch.equal(prefill.get(kernel)(*alone.args, **options), together[:64])


@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_past_2_31_elements(kernel):
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
    assert torch.equal(check(far, kernel)[:40], check(case, kernel)[:40])


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_queries_and_outputs_past_2_31_elements(kernel, heads_first):
    """The last tokens, or the last heads, lie there."""
    case = make_case([40], [100], num_q_heads=16, head_dim=128, dtype=torch.bfloat16, device="cuda")
    expected = check(case, kernel)
    tokens, heads, dim = case.q.shape
    last = (heads if heads_first else 40) - 1
    apart = (2**31 // last // 16 + 1) * 16
    strides = (dim, apart) if heads_first else (apart, dim)
    size = strides[0] * (tokens - 1) + strides[1] * (heads - 1) + dim
    q, out = (
        torch.empty(size, dtype=torch.bfloat16, device="cuda").as_strided(case.q.shape, (*strides, 1))
        for _ in range(2)
    )
    q.copy_(case.q)
    out.copy_(case.untouched_out())
    prefill.get(kernel)(q, *case.args[1:], out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_lengths_and_batch_sizes_do_not_recompile(kernel):
    """Case K12: batches of 1 to 17, table widths and views at odd offsets share the compiled kernels."""
    shape = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}

    module = {"triton": triton_flash, "warp_specialized": warp_specialized}[kernel]

    def compiled() -> int:
        return len(module._prefill_kernel.device_caches[torch.cuda.current_device()][0])

    check(make_case([200], [200], **shape), kernel)
    before = compiled()
    for batch in (1, 2, 3, 15, 16, 17):
        case = make_case([100 + i for i in range(batch)], [130 + 5 * i for i in range(batch)], **shape)
        check(case, kernel)
        first = int(case.query_start_loc[1])
        tail = dataclasses.replace(
            case,
            q=case.q[first:],
            block_table=case.block_table[1:, :-1],
            context_lens=case.context_lens[1:],
            query_start_loc=case.query_start_loc[1:] - first,
            max_query_len=100 + batch - 1 if batch > 1 else 0,
        )
        prefill.get(kernel)(*tail.args)
    assert compiled() == before


@pytest.mark.parametrize("kernel", KERNELS)
def test_can_be_captured(kernel):
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
    expected = check(case, kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.get(kernel)(*case.args, out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out[:164], expected[:164])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_call_serves_other_chunks(kernel):
    """From no item at all to many a program, and padding tokens after them: each replay gives the bits of a call."""
    if (reason := prefill.get(kernel).unavailable(torch.device("cuda"))) is not None:
        pytest.skip(reason)
    most_tokens, batch = 9000, 6
    shape = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    whole = make_case([1500] * batch, [3000] * batch, **shape)  # blocks and keys for every chunk to come
    q = whole.q[:most_tokens]
    lens, locs = whole.context_lens.clone(), whole.query_start_loc.clone()
    tensors = (q, whole.k_cache, whole.v_cache, whole.block_table, lens, locs)
    out = torch.empty_like(q)
    prefill.get(kernel)(*tensors, most_tokens, out=out)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.get(kernel)(*tensors, most_tokens, out=out)
    rng = random.Random(0)
    chunks = [[0] * batch, [1] * batch, [1500] * batch, [0, 0, 0, 0, 0, 1500], [1500, 0, 0, 0, 0, 0]]
    for queries in [
        *chunks,
        *([rng.choice([0, 1, 64, 128, 129, 1000]) for _ in range(batch)] for _ in range(12)),
    ]:
        lens.copy_(torch.tensor([rng.randrange(n, 3001) for n in queries]))
        locs.copy_(torch.tensor([0, *queries]).cumsum(0))
        replayed, called = (torch.full_like(q, 7.0) for _ in range(2))
        out.copy_(replayed)
        graph.replay()
        prefill.get(kernel)(*tensors, most_tokens, out=called)
        assert torch.equal(out, called)
        used = sum(queries)
        assert torch.equal(out[used:], replayed[used:])
        expected = prefill.get("reference")(*(x.float() for x in tensors[:3]), *tensors[3:], most_tokens)
        error = (out[:used].float() - expected[:used]).norm(dim=-1) / expected[:used].norm(dim=-1)
        assert used == 0 or error.max() < TOLERANCE[torch.bfloat16]


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
