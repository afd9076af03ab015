"""Elementwise Triton kernels and sampling on a GPU. Most accuracy tests run there by their `device` fixture."""

from __future__ import annotations

import pytest
import torch

from kernels import activation, kv_write, norm, rope, sampling_triton
from kernels.activation import silu_mul
from kernels.kv_write import write_kv
from kernels.norm import add_rms_norm, rms_norm
from kernels.qk_norm_rope_write import qk_norm_rope_write
from kernels.rope import apply_rope
from kernels.sampling import filtered_probs, finite_rows, greedy, sample

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TWO_ULP = {torch.float32: 2e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def random(*shape, dtype=torch.float32, scale=1.0):
    generator = torch.Generator(device="cuda").manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 576, 1024, 4096, 5120, 8192])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_norm(dtype, hidden, tokens):
    x, residual = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype, scale=5)
    weight = 1 + random(hidden, dtype=dtype, scale=0.1)
    actual, actual_residual = add_rms_norm(x, residual, weight, 1e-6, use_triton=True)
    expected, expected_residual = add_rms_norm(x, residual, weight, 1e-6, use_triton=False)
    assert torch.equal(actual_residual, expected_residual)
    torch.testing.assert_close(actual, expected, atol=TWO_ULP[dtype], rtol=TWO_ULP[dtype])
    if dtype != torch.float32:
        assert (actual != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_inside_packed_qkv(dtype):
    qkv = random(50, 32, 128, dtype=dtype, scale=3)
    weight = 1 + random(128, dtype=dtype, scale=0.1)
    for heads in (qkv[:, :16], qkv[:, 16:24]):
        actual = rms_norm(heads, weight, 1e-6, use_triton=True)
        expected = rms_norm(heads, weight, 1e-6, use_triton=False)
        torch.testing.assert_close(actual, expected, atol=TWO_ULP[dtype], rtol=TWO_ULP[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [96, 3072, 25600])
def test_silu_mul(dtype, intermediate):
    x = random(33, 2 * intermediate, dtype=dtype, scale=4)
    actual, expected = silu_mul(x, use_triton=True), silu_mul(x, use_triton=False)
    torch.testing.assert_close(actual, expected, atol=TWO_ULP[dtype], rtol=TWO_ULP[dtype])
    if dtype != torch.float32:
        assert (actual != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(16, 8, 128), (14, 2, 64), (9, 3, 80)])
def test_rope(dtype, heads):
    num_q_heads, num_kv_heads, head_dim = heads
    angles = random(5000, head_dim // 2, scale=10)
    cos_sin = torch.stack([angles.cos(), angles.sin()], 1)
    positions = torch.randint(0, 5000, (77,), device="cuda")
    qkv = random(77, num_q_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    by_torch = qkv.clone()
    for packed, use_triton in ((qkv, True), (by_torch, False)):
        q, k, _ = packed.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
        apply_rope(q, k, positions, cos_sin, use_triton=use_triton)
    torch.testing.assert_close(qkv, by_torch, atol=TWO_ULP[dtype], rtol=TWO_ULP[dtype])


@pytest.mark.parametrize("use_triton", [False, True])
def test_write_kv_under_capture(use_triton):
    """Neither path waits for the device, padding or not, so both can be captured and replayed."""
    k, v = random(6, 8, 128, dtype=torch.bfloat16), random(6, 8, 128, dtype=torch.bfloat16, scale=2)
    pool = torch.full((2, 10, 16, 8, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([5, 0, -1, 33, -1, 159], device="cuda")
    write_kv(k, v, pool[0], pool[1], slots, use_triton=use_triton)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv(k, v, pool[0], pool[1], slots, use_triton=use_triton)
    for wanted in ([5, 0, -1, 33, -1, 159], [-1, -1, 0, -1, -1, -1], [-1] * 6, [9, 8, 7, 6, 4, 3]):
        pool.fill_(float("nan"))
        slots.copy_(torch.tensor(wanted))
        graph.replay()
        flat = pool.flatten(1, 2)
        expected = torch.full_like(flat, float("nan"))
        for token, slot in enumerate(wanted):
            if slot >= 0:
                expected[0, slot], expected[1, slot] = k[token], v[token]
        torch.testing.assert_close(flat, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 256, 4000])
def test_qk_norm_rope_write_is_exact_again_and_again(dtype, tokens):
    """In place on q: many tokens at once show a read after a neighbour's write, if there is one."""
    qkv = random(tokens, 32, 128, dtype=dtype, scale=3)
    weights = [1 + random(128, dtype=dtype, scale=0.1) for _ in range(2)]
    angles = random(5000, 64, scale=10)
    cos_sin = torch.stack([angles.cos(), angles.sin()], 1)
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    slots = torch.randperm(tokens + 100, device="cuda")[:tokens]
    slots[5::7] = -1

    def run(use_triton):
        packed = qkv.clone()
        q, k, v = packed.split([16, 8, 8], dim=1)
        pool = torch.zeros(2, tokens // 16 + 8, 16, 8, 128, dtype=dtype, device="cuda")
        rest = (1e-6, positions, cos_sin, pool[0], pool[1], slots)
        qk_norm_rope_write(q, k, v, *weights, *rest, use_triton=use_triton)
        return q.clone(), pool

    first, again, by_torch = run(True), run(True), run(False)
    for a, b, c in zip(first, again, by_torch):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=2 * TWO_ULP[dtype], rtol=2 * TWO_ULP[dtype])


def test_write_kv_past_2_31_elements():
    num_blocks = 2**31 // (2 * 16 * 8 * 128) + 4
    pool = torch.zeros(num_blocks, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = random(2, 8, 128, dtype=torch.bfloat16), random(2, 8, 128, dtype=torch.bfloat16, scale=2)
    slots = torch.tensor([num_blocks * 16 - 1, 3], device="cuda")
    write_kv(k, v, pool[:, 0], pool[:, 1], slots, use_triton=True)
    assert torch.equal(pool[-1, 0, 15], k[0])
    assert torch.equal(pool[-1, 1, 15], v[0])
    assert torch.equal(pool[0, 0, 3], k[1])
    assert pool.count_nonzero() <= 4 * 8 * 128


def test_token_counts_do_not_recompile():
    """Case K12: after a warm-up, further token counts and views at odd offsets compile nothing."""
    kernels = (
        norm._rms_norm_kernel,
        activation._silu_mul_kernel,
        rope._rope_kernel,
        kv_write._write_kv_kernel,
    )
    cos_sin = torch.stack([random(100, 64).cos(), random(100, 64).sin()], 1)
    pool = torch.zeros(2, 20, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    positions = torch.arange(64, device="cuda")

    def step(tokens: int, offset: int = 0) -> None:
        rows = slice(offset, offset + tokens)
        x = random(64, 1024, dtype=torch.bfloat16)[rows]
        add_rms_norm(x, x, torch.ones(1024, dtype=torch.bfloat16, device="cuda"), 1e-6, use_triton=True)
        silu_mul(random(64, 6144, dtype=torch.bfloat16)[rows], use_triton=True)
        qkv = random(64, 32, 128, dtype=torch.bfloat16)[rows]
        q, k, v = qkv.split([16, 8, 8], dim=1)
        apply_rope(q, k, positions[rows], cos_sin, use_triton=True)
        write_kv(k, v, pool[0], pool[1], positions[rows], use_triton=True)

    def compiled() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    step(5)
    before = compiled()
    for tokens in (1, 2, 3, 15, 16, 17, 31):
        step(tokens)
        step(tokens, offset=3)
    assert compiled() == before


def parameters(rows, temperature=1.0, top_k=-1, top_p=1.0):
    return torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p)


def test_sampling_rows_do_not_depend_on_their_neighbours():
    """Integer sums: bit-equal alone, in any batch and in any order, at the size of Qwen3's vocabulary."""
    logits = random(40, 151_936, dtype=torch.bfloat16, scale=3)
    temperature, top_k, top_p = parameters(40)
    temperature[::4], temperature[1::4], top_k[::3], top_p[::2] = 0.0, 0.6, 20, 0.9
    uniform = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    together = sample(logits, temperature, top_k, top_p, uniform)
    on_device = sample(logits, temperature.cuda(), top_k.cuda(), top_p.cuda(), uniform.cuda())
    assert torch.equal(together, on_device)
    for row in range(40):
        one = slice(row, row + 1)
        assert sample(logits[one], temperature[one], top_k[one], top_p[one], uniform[one])[0] == together[row]
    assert torch.equal(together[::4], greedy(logits[::4]))


def test_sampling_agrees_with_the_cpu():
    logits = random(8, 5000, scale=2)
    args = parameters(8, 0.8, 50, 0.9)
    uniform = torch.linspace(0.01, 0.99, 8, dtype=torch.float64)
    assert torch.equal(sample(logits, *args, uniform).cpu(), sample(logits.cpu(), *args, uniform))
    probs = filtered_probs(logits, *args)
    torch.testing.assert_close(probs.cpu(), filtered_probs(logits.cpu(), *args), atol=1e-7, rtol=1e-6)


def edge_distance(logits, ids, args, uniform):
    """How far the uniform number lies outside the chosen token's interval of the exact distribution."""
    cumulative = filtered_probs(logits, *args).double().cumsum(1)
    upper = cumulative.gather(1, ids[:, None])[:, 0] / cumulative[:, -1]
    previous = cumulative.gather(1, (ids - 1).clamp(min=0)[:, None])[:, 0] / cumulative[:, -1]
    lower = torch.where(ids > 0, previous, 0.0)
    return torch.maximum(lower - uniform, uniform - upper).clamp(min=0).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(-1, 1.0), (50, 1.0), (-1, 0.9), (1000, 0.95), (1, 1.0), (-1, 0.9999999)]
)
def test_sampling_without_a_sort(dtype, top_k, top_p):
    """The drawn token's interval holds the uniform number, but for rounding in fp32."""
    rows = 64
    logits = random(rows, 151_936, dtype=dtype, scale=3)
    args = parameters(rows, 0.9, top_k, top_p)
    uniform = torch.linspace(0, 1 - 1e-9, rows, dtype=torch.float64)
    ids = sample(logits, *args, uniform, use_triton=True)
    assert (ids == sample(logits, *args, uniform)).float().mean() > 0.95
    on_device = [parameter.cuda() for parameter in args]
    assert edge_distance(logits, ids, on_device, uniform.cuda()) < 2e-5
    for row in range(0, rows, 7):
        one = slice(row, row + 1)
        alone = sample(logits[one], *(p[one] for p in args), uniform[one], use_triton=True)
        assert torch.equal(alone, ids[one])


def test_greedy_without_torch():
    logits = random(9, 151_936, dtype=torch.bfloat16)
    assert torch.equal(greedy(logits, use_triton=True), greedy(logits))
    logits[:, [5, 70_000, 150_000]] = 99.0
    assert greedy(logits, use_triton=True).tolist() == [5] * 9


def test_sampling_can_be_captured():
    logits = random(4, 151_936, dtype=torch.bfloat16, scale=3)
    args = [p.cuda() for p in parameters(4, 0.8, 50, 0.9)]
    uniform = torch.zeros(4, dtype=torch.float64, device="cuda")

    def run():
        return sampling_triton.sample(logits, *args, uniform, any_top_k=True, any_top_p=True)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for value in (0.1, 0.9):
        uniform.fill_(value)
        graph.replay()
        assert torch.equal(captured, run())


def test_ties_rank_by_id_however_the_device_sorts():
    logits = torch.zeros(1, 151_936, device="cuda", dtype=torch.bfloat16)
    logits[0, 100_000] = 1.0
    probs = filtered_probs(logits, *parameters(1, 1.0, 1000))[0]
    assert (probs > 0).nonzero().squeeze(1).tolist() == [*range(999), 100_000]


def test_greedy_ties_and_finite_rows():
    logits = random(3, 151_936, dtype=torch.bfloat16).clamp(max=2)
    logits[0, [77, 140_000]] = 9.0
    logits[1, 5] = float("nan")
    logits[2, 151_935] = float("inf")
    for use_triton in (False, True):
        assert greedy(logits, use_triton=use_triton).tolist() == [77, -1, -1]
    assert finite_rows(logits).tolist() == [True, False, False]
