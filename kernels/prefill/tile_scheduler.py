"""Which tiles of queries the programs of a persistent prefill kernel attend to, and in what order, in Gluon.

An item is a tile of a row's queries for one KV head. Items are numbered row by row, so that programs at work share a
row's keys in the L2; heads side by side; tiles from last to first in the last row, first to last in the one before, and
so on: the work of an item changes slowly with its number. Numbers are dealt to the programs to and fro, which evens out
what changes. Rows without queries have no numbers. Lengths are read on the device, so a CUDA graph serves other chunks.
"""

from kernels.triton_support import gl, gluon


@gluon.jit
def find_row(number, row, first, locs_ptr, batch, TOKENS: gl.constexpr, KV_HEADS: gl.constexpr):
    """(the row of an item, the number of its first one, where its chunk starts, and stops), searched from `row` on.

    The row is `batch` after the last item. first: the number of the first item of the row given.
    """
    start = gl.load(locs_ptr + row)
    stop = gl.load(locs_ptr + row + 1)
    items = (stop - start + TOKENS - 1) // TOKENS * KV_HEADS
    while (row < batch) & (number >= first + items):
        first += items
        row += 1
        start = stop
        stop = gl.load(locs_ptr + gl.minimum(row + 1, batch))
        items = (stop - start + TOKENS - 1) // TOKENS * KV_HEADS
    return row, first, start, stop


@gluon.jit
def next_item(number, row, first, turn, step, locs_ptr, batch, TOKENS: gl.constexpr, KV_HEADS: gl.constexpr):
    """(number, what find_row() says of it) of a program's item `turn`, which comes after item `number`.

    step: twice the programs. Numbers are dealt from the first program to the last, then back.
    """
    number = turn * step - 1 - number
    row, first, start, stop = find_row(number, row, first, locs_ptr, batch, TOKENS, KV_HEADS)
    return number, row, first, start, stop


@gluon.jit
def item_at(
    number,
    row,
    first,
    start,
    stop,
    lens_ptr,
    batch,
    TOKENS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """(its KV head, first token, tokens, the first one's position, its keys, their tiles); no tokens after the last."""
    context_len = gl.load(lens_ptr + row, mask=row < batch, other=0)
    chunk_len = stop - start
    level = (number - first) // KV_HEADS
    kv_head = (number - first) % KV_HEADS
    tile = (chunk_len + TOKENS - 1) // TOKENS - 1 - level
    tile += ((batch + row + 1) & 1) * (level - tile)
    num_tokens = gl.minimum(chunk_len - tile * TOKENS, TOKENS)
    first_position = context_len - chunk_len + tile * TOKENS
    end = first_position + num_tokens
    return kv_head, start + tile * TOKENS, num_tokens, first_position, end, (end + BLOCK_N - 1) // BLOCK_N
