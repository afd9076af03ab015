"""The product phase of a persistent kernel: a program's outputs of a few rows, its weights two tiles ahead.

Weights go from memory to registers, 16 bytes a load; a tile is BLOCK_N outputs by BLOCK_K inputs. The outputs are dealt
out in stripes of BLOCK_N: program p has stripes p, p + P, p + 2 P, ... of the P programs, and goes through a stripe
BLOCK_K inputs a step, then through the next, without a pause in its loads.
"""

from __future__ import annotations

from kernels.triton_support import tl, triton


@triton.jit
def first_weights(
    weight_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
):
    """The tiles of a program's first two steps, for `product`: what it loads before it waits for its input."""
    first = _load_weights(weight_ptr, 0, IN, OUT, BLOCK_N, BLOCK_K, GATED)
    second = _load_weights(weight_ptr, 1, IN, OUT, BLOCK_N, BLOCK_K, GATED)
    return first, second


@triton.jit
def _load_weights(
    weight_ptr,
    step,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K] of weight [OUT, IN]: this program's tile of a step, zeros past the matrix."""
    CHUNKS: tl.constexpr = tl.cdiv(IN, BLOCK_K)
    n = _stripe(step // CHUNKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = step % CHUNKS * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (n < OUT)[:, None]
    if IN % BLOCK_K:
        mask = mask & (k < IN)[None, :]
    return tl.load(
        weight_ptr + _weight_row(n, OUT, GATED).to(tl.int64)[:, None] * IN + k[None, :],
        mask=mask,
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def _stripe(i):
    """Which of all stripes is this program's i-th."""
    return tl.program_id(0) + i * tl.num_programs(0)


@triton.jit
def _weight_row(n, OUT: tl.constexpr, GATED: tl.constexpr):
    """The row of the weight that makes output n. GATED: rows of the gate, then of up; their outputs alternate."""
    if GATED:
        n = n // 2 + n % 2 * (OUT // 2)
    return n


@triton.jit
def product(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    weights,
    rows,
    eps,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    """This program's outputs of x [rows, IN] by weight [OUT, IN], into out_ptr [rows, OUT].

    weights: first_weights. NORM: of rms_norm(x) with norm_ptr's weight. ADD: onto what out_ptr holds. GATED: weight is
    gate and up, and out [rows, OUT / 2] is silu(gate) * up. ROWS: rows up to 1, 2 or 4. BLOCK_IN: IN up to a power of
    two. Sums are fp32; each is rounded where the separate kernels round.
    """
    CHUNKS: tl.constexpr = tl.cdiv(IN, BLOCK_K)
    first, second = weights
    # A sum a row, each a variable of its own: as one tensor they would change places among threads.
    sums0 = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    scale0 = _norm_scale(x_ptr, 0, rows, eps, IN, BLOCK_IN, NORM)
    scale1 = _norm_scale(x_ptr, 1, rows, eps, IN, BLOCK_IN, NORM and ROWS > 1)
    scale2 = _norm_scale(x_ptr, 2, rows, eps, IN, BLOCK_IN, NORM and ROWS > 2)
    scale3 = _norm_scale(x_ptr, 3, rows, eps, IN, BLOCK_IN, NORM and ROWS > 2)
    stripes = (tl.cdiv(OUT, BLOCK_N) - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)
    for step in tl.range(0, stripes * CHUNKS, num_stages=1):
        third = _load_weights(weight_ptr, step + 2, IN, OUT, BLOCK_N, BLOCK_K, GATED)
        chunk = step % CHUNKS
        # In the weights' own layout, each thread what it multiplies: no exchange through shared memory.
        k = (chunk * BLOCK_K + tl.arange(0, BLOCK_K))[None, :] + tl.zeros([BLOCK_N, 1], tl.int32)
        norm = tl.load(norm_ptr + k, mask=k < IN, other=0.0) if NORM else None
        kept = tl.where(chunk == 0, 0.0, 1.0)
        sums0 = kept * sums0 + _products(first, x_ptr, 0, rows, k, norm, scale0, IN, BLOCK_N, BLOCK_K, NORM)
        if ROWS > 1:
            sums1 = kept * sums1 + _products(
                first, x_ptr, 1, rows, k, norm, scale1, IN, BLOCK_N, BLOCK_K, NORM
            )
        if ROWS > 2:
            sums2 = kept * sums2 + _products(
                first, x_ptr, 2, rows, k, norm, scale2, IN, BLOCK_N, BLOCK_K, NORM
            )
            sums3 = kept * sums3 + _products(
                first, x_ptr, 3, rows, k, norm, scale3, IN, BLOCK_N, BLOCK_K, NORM
            )
        if chunk == CHUNKS - 1:
            n = _stripe(step // CHUNKS) * BLOCK_N
            _store_stripe(sums0, bias_ptr, out_ptr, 0, rows, n, OUT, BLOCK_N, BIAS, GATED, ADD)
            if ROWS > 1:
                _store_stripe(sums1, bias_ptr, out_ptr, 1, rows, n, OUT, BLOCK_N, BIAS, GATED, ADD)
            if ROWS > 2:
                _store_stripe(sums2, bias_ptr, out_ptr, 2, rows, n, OUT, BLOCK_N, BIAS, GATED, ADD)
                _store_stripe(sums3, bias_ptr, out_ptr, 3, rows, n, OUT, BLOCK_N, BIAS, GATED, ADD)
        first = second
        second = third


@triton.jit
def _norm_scale(x_ptr, row, rows, eps, IN: tl.constexpr, BLOCK_IN: tl.constexpr, NORM: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row of x [rows, IN]; 1 without NORM."""
    scale = 1.0
    if NORM:
        k = tl.arange(0, BLOCK_IN)
        x = tl.load(x_ptr + row * IN + k, mask=(k < IN) & (row < rows), other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / IN + eps)
    return scale


@triton.jit
def _products(
    weights,
    x_ptr,
    row,
    rows,
    k,
    norm,
    scale,
    IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K / 8]: weights [BLOCK_N, BLOCK_K] by the inputs k of a row, summed over eight neighbours.

    Those eight are in one thread; what is left is summed when a stripe is complete.
    """
    x = tl.load(x_ptr + row * IN + k, mask=(k < IN) & (row < rows), other=0.0)
    if NORM:
        x = ((x.to(tl.float32) * scale).to(x.dtype).to(tl.float32) * norm.to(tl.float32)).to(x.dtype)
    products = weights.to(tl.float32) * x.to(tl.float32)
    return tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 8, 8]), 2)


@triton.jit
def _store_stripe(
    sums,
    bias_ptr,
    out_ptr,
    row,
    rows,
    first_n,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    """What becomes of a row's sums [BLOCK_N, ...] of the outputs from first_n on."""
    dtype = out_ptr.dtype.element_ty
    n = first_n + tl.arange(0, BLOCK_N)
    sums = tl.sum(sums, 1)
    if BIAS:
        bias = tl.load(bias_ptr + _weight_row(n, OUT, GATED), mask=n < OUT, other=0.0)
        sums += bias.to(tl.float32)
    out = sums.to(dtype).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(out, [BLOCK_N // 2, 2]))
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        pair = first_n // 2 + tl.arange(0, BLOCK_N // 2)
        mask = (pair < OUT // 2) & (row < rows)
        tl.store(out_ptr + row * (OUT // 2) + pair, (silu * up).to(dtype), mask=mask)
    else:
        mask = (n < OUT) & (row < rows)
        at = out_ptr + row * OUT + n
        if ADD:
            out += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, out.to(dtype), mask=mask)
