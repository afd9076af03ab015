"""The product phase of a persistent kernel: a program's outputs of a few rows, its weights two tiles ahead.

Weights go from memory to registers, 16 bytes a load; a tile is BLOCK_N outputs by BLOCK_K inputs. The outputs are dealt
out in stripes of BLOCK_N: program p has stripes p, p + P, p + 2 P, ... of the P programs, and goes through a stripe
BLOCK_K inputs a step, then through the next, without a pause in its loads.

Sixteen-bit numbers travel as words of two: the compiler takes pairs of such registers apart before it lets a loop turn,
and so waits at every turn for what it has only just asked memory for. Two steps a turn, each with a tile of its own,
spare it from moving tiles among registers, which is as bad.
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
    """Words of [BLOCK_N, BLOCK_K] of weight [OUT, IN]: this program's tile of a step, zeros past the matrix."""
    CHUNKS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    PER_WORD: tl.constexpr = 32 // weight_ptr.dtype.element_ty.primitive_bitwidth
    n = _stripe(step // CHUNKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = step % CHUNKS * (BLOCK_K // PER_WORD) + tl.arange(0, BLOCK_K // PER_WORD)
    mask = (n < OUT)[:, None]
    if IN % BLOCK_K:
        mask = mask & (k < IN // PER_WORD)[None, :]
    row = _weight_row(n, OUT, GATED).to(tl.int64)
    return tl.load(
        weight_ptr.to(tl.pointer_type(tl.int32)) + row[:, None] * (IN // PER_WORD) + k[None, :],
        mask=mask,
        other=0,
        eviction_policy="evict_first",
    )


@triton.jit
def _number(words, HIGH: tl.constexpr, dtype: tl.constexpr):
    """fp32 of the lower or the higher number in each word; of the word itself where dtype fills it."""
    if dtype == tl.bfloat16:
        bits = words & -65536 if HIGH else words << 16
        return bits.to(tl.float32, bitcast=True)
    if dtype == tl.float16:
        bits = words >> 16 if HIGH else words
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return words.to(tl.float32, bitcast=True)


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
    gate and up, and out [rows, OUT / 2] is silu(gate) * up. ROWS: 1 or 2, the most that rows can be. BLOCK_IN: IN up to
    a power of two. Sums are fp32; each is rounded where the separate kernels round.
    """
    CHUNKS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    first, second = weights
    # A sum a row, each a variable of its own: as one tensor they would change places among threads.
    sums0 = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    sums1 = sums0
    scale0 = _norm_scale(x_ptr, 0, rows, eps, IN, BLOCK_IN, NORM)
    scale1 = _norm_scale(x_ptr, 1, rows, eps, IN, BLOCK_IN, NORM and ROWS > 1)
    stripes = (tl.cdiv(OUT, BLOCK_N) - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)
    for turn in tl.range(0, stripes * CHUNKS, 2, num_stages=1):
        for half in tl.static_range(2):
            step = turn + half  # the last may lie past the end: then all of it is masked
            tile = second if half else first
            sums0, sums1 = _add_products(
                tile,
                x_ptr,
                norm_ptr,
                sums0,
                sums1,
                scale0,
                scale1,
                step % CHUNKS,
                rows,
                IN,
                ROWS,
                BLOCK_N,
                BLOCK_K,
                NORM,
            )
            if step % CHUNKS == CHUNKS - 1:
                n = _stripe(step // CHUNKS) * BLOCK_N
                _store_stripe(sums0, bias_ptr, out_ptr, 0, rows, n, OUT, BLOCK_N, BIAS, GATED, ADD)
                if ROWS > 1:
                    _store_stripe(sums1, bias_ptr, out_ptr, 1, rows, n, OUT, BLOCK_N, BIAS, GATED, ADD)
            tile = _load_weights(weight_ptr, step + 2, IN, OUT, BLOCK_N, BLOCK_K, GATED)
            if half:
                second = tile
            else:
                first = tile


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
def _add_products(
    weights,
    x_ptr,
    norm_ptr,
    sums0,
    sums1,
    scale0,
    scale1,
    chunk,
    rows,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
):
    """The rows' sums [BLOCK_N, BLOCK_K / 8] with a chunk's products added; the first chunk begins them anew."""
    CHUNKS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    PER_WORD: tl.constexpr = 32 // x_ptr.dtype.element_ty.primitive_bitwidth
    # In the weights' own layout, each thread what it multiplies: no exchange through shared memory.
    k = chunk * (BLOCK_K // PER_WORD) + tl.arange(0, BLOCK_K // PER_WORD)
    k = k[None, :] + tl.zeros([BLOCK_N, 1], tl.int32)
    norm = None
    if NORM:
        norm = tl.load(norm_ptr.to(tl.pointer_type(tl.int32)) + k, mask=k < IN // PER_WORD, other=0)
    products = _products(weights, x_ptr, 0, rows, k, norm, scale0, IN, BLOCK_N, BLOCK_K, NORM)
    sums0 = products if CHUNKS == 1 else tl.where(chunk == 0, 0.0, sums0) + products
    if ROWS > 1:
        products = _products(weights, x_ptr, 1, rows, k, norm, scale1, IN, BLOCK_N, BLOCK_K, NORM)
        sums1 = products if CHUNKS == 1 else tl.where(chunk == 0, 0.0, sums1) + products
    return sums0, sums1


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
    """[BLOCK_N, BLOCK_K / 8]: a tile of weights by a row's words k, summed over eight neighbouring inputs.

    Those eight are in one thread; what is left is summed when a stripe is complete.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER_WORD: tl.constexpr = 32 // dtype.primitive_bitwidth
    x = tl.load(
        x_ptr.to(tl.pointer_type(tl.int32)) + row * (IN // PER_WORD) + k,
        mask=(k < IN // PER_WORD) & (row < rows),
        other=0,
    )
    products = _number(weights, False, dtype) * _input(x, norm, scale, False, dtype, NORM)
    if PER_WORD == 2:
        products += _number(weights, True, dtype) * _input(x, norm, scale, True, dtype, NORM)
    return tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 8, 8 // PER_WORD]), 2)


@triton.jit
def _input(x, norm, scale, HIGH: tl.constexpr, dtype: tl.constexpr, NORM: tl.constexpr):
    """fp32 of one number in each word of x; NORM: normalised by its row's scale and the weights in norm's words."""
    number = _number(x, HIGH, dtype)
    if NORM:
        number = (number * scale).to(dtype).to(tl.float32) * _number(norm, HIGH, dtype)
        number = number.to(dtype).to(tl.float32)
    return number


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
