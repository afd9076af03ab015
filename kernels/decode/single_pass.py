"""The old way: one program a sequence and query head, which walks the whole context."""

from __future__ import annotations

from kernels.decode.launch import Call, TritonDecodeKernel
from kernels.decode.planner import padded_dim
from kernels.triton_support import tl, triton

TILE = 16


@triton.jit(
    do_not_specialize=["stride_table_row"],
    do_not_specialize_on_alignment=["table_ptr", "context_lens_ptr"],
)
def _attend_sequence(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_lens_ptr,
    out_ptr,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_table_row,
    stride_out_row,
    stride_out_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Online softmax in base 2, TILE keys a step, products as fp32 sums (no tensor cores)."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    dims = tl.arange(0, DIM)
    dim_mask = dims < HEAD_DIM
    context_len = tl.load(context_lens_ptr + row)
    q = tl.load(q_ptr + row * stride_q_row + head * stride_q_head + dims, mask=dim_mask, other=0.0)
    q = q.to(tl.float32) * scale_log2
    acc = tl.zeros([DIM], tl.float32)
    peak = float("-inf")
    total = 0.0
    for tile_start in range(0, context_len, TILE):
        positions = tile_start + tl.arange(0, TILE)
        valid = positions < context_len
        mask = valid[:, None] & dim_mask[None, :]
        entry = table_ptr + row * stride_table_row + positions // BLOCK_SIZE
        block = tl.load(entry, mask=valid, other=0).to(tl.int64)
        offset = (positions % BLOCK_SIZE).to(tl.int64)
        # Masked to 0, since memory past the context may hold NaN.
        k_tokens = block * stride_k_block + offset * stride_k_token + kv_head * stride_k_head
        k = tl.load(k_ptr + k_tokens[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(valid, tl.sum(k * q[None, :], 1), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp2(scores - new_peak)
        decay = tl.exp2(peak - new_peak)
        v_tokens = block * stride_v_block + offset * stride_v_token + kv_head * stride_v_head
        v = tl.load(v_ptr + v_tokens[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        acc = acc * decay + tl.sum(weights[:, None] * v, 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    out = acc / tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + row * stride_out_row + head * stride_out_head + dims,
        out.to(out_ptr.dtype.element_ty),
        mask=dim_mask,
    )


class SinglePassDecode(TritonDecodeKernel):
    """The baseline that split_kv is measured against: batch * num_q_heads programs, whatever the context.

    Each query head of a group reads its KV head's keys anew, and a long context is one program's serial work.
    """

    name = "single_pass"

    def launch(self, call: Call) -> None:
        problem = call.problem
        _attend_sequence[(problem.num_q_heads, problem.batch_size)](
            call.q,
            call.k_cache,
            call.v_cache,
            call.block_table,
            call.context_lens,
            call.out,
            call.scale_log2,
            *call.q.stride()[:2],
            *call.cache_strides,
            call.block_table.stride(0),
            *call.out.stride()[:2],
            GROUP=problem.group_size,
            HEAD_DIM=problem.head_dim,
            DIM=padded_dim(problem.head_dim),
            BLOCK_SIZE=problem.block_size,
            TILE=TILE,
            num_warps=4,
        )
