"""The old way: one program a sequence and query head, which walks the whole context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeKernel, DecodeProblem, check_inputs
from kernels.decode.launch import padded_dim, unsupported_by_triton
from kernels.decode.online_softmax import LOG2_E
from kernels.triton_support import on_device, tl, triton, triton_unavailable

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


class SinglePassDecode(DecodeKernel):
    """The baseline that split_kv is measured against: batch * num_q_heads programs, whatever the context.

    Each query head of a group reads its KV head's keys anew, and a long context is one program's serial work.
    """

    name = "single_pass"

    def unavailable(self, device: torch.device) -> str | None:
        return triton_unavailable(device)

    def supports(self, problem: DecodeProblem) -> str | None:
        return unsupported_by_triton(problem)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        scale: float | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if options:
            raise TypeError(f"single_pass takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, out)
        out = torch.empty_like(q) if out is None else out
        batch_size, num_q_heads, head_dim = q.shape
        if batch_size == 0:
            return out
        with on_device(q):
            _attend_sequence[(num_q_heads, batch_size)](
                q,
                k_cache,
                v_cache,
                block_table,
                context_lens,
                out,
                (head_dim**-0.5 if scale is None else scale) * LOG2_E,
                *q.stride()[:2],
                *k_cache.stride()[:3],
                *v_cache.stride()[:3],
                block_table.stride(0),
                *out.stride()[:2],
                GROUP=num_q_heads // k_cache.shape[2],
                HEAD_DIM=head_dim,
                DIM=padded_dim(head_dim),
                BLOCK_SIZE=k_cache.shape[1],
                TILE=TILE,
                num_warps=4,
            )
        return out
