"""SwiGLU's gate, silu(gate) * up (Shazeer, 2020), on the packed output of the gate and up projections."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.triton_support import cdiv, on_device, tl, triton

BLOCK = 1024


def silu_mul(gate_up: Tensor, *, use_triton: bool) -> Tensor:
    """silu(gate) * up, silu rounded to the input's dtype before the product, as Transformers does.

    gate_up [tokens, 2 * intermediate], gate first; returns a new contiguous [tokens, intermediate].
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [tokens, 2 * intermediate], got shape {tuple(gate_up.shape)}")
    if not use_triton:
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate).mul_(up)
    tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        with on_device(gate_up):
            _silu_mul_kernel[(tokens, cdiv(intermediate, BLOCK))](
                gate_up, out, gate_up.stride(0), INTERMEDIATE=intermediate, BLOCK=BLOCK, num_warps=4
            )
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, stride_token, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < INTERMEDIATE
    gate_ptr = gate_up_ptr + token * stride_token + columns
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + INTERMEDIATE, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    out_offsets = token * INTERMEDIATE + columns
    tl.store(out_ptr + out_offsets, (silu * up).to(out_ptr.dtype.element_ty), mask=mask)
