"""Prefill attention over paged KV: kernels by name, behind one contract (kernels/prefill/contract.py).

    from kernels import prefill
    kernel = prefill.get("triton")
    out = kernel(q, k_cache, v_cache, block_table, context_lens, query_start_loc, max_query_len)

A kernel of another package joins through the entry-point group `decodelab.prefill`.
"""

from kernels.prefill.contract import PrefillKernel, PrefillProblem, check_inputs
from kernels.prefill.cudnn_sdpa import CudnnSdpaPrefill
from kernels.prefill.flash_varlen import FlashVarlenPrefill
from kernels.prefill.reference import ReferencePrefill
from kernels.prefill.torch_sdpa import TorchPrefill
from kernels.prefill.triton_flash import TritonPrefill
from kernels.prefill.warp_specialized import WarpSpecializedPrefill
from kernels.registry import Registry, UnknownKernelError

__all__ = [
    "CONTIGUOUS_ONLY",
    "PrefillKernel",
    "PrefillProblem",
    "UnknownKernelError",
    "available",
    "check_inputs",
    "get",
    "names",
    "register",
]

_registry: Registry[PrefillKernel] = Registry("prefill kernel", "decodelab.prefill")
names = _registry.names
available = _registry.available
get = _registry.get
register = _registry.register

_kernels: tuple[PrefillKernel, ...] = (
    ReferencePrefill(),
    TorchPrefill(),
    TritonPrefill(),
    WarpSpecializedPrefill(),
    FlashVarlenPrefill(),
    CudnnSdpaPrefill(),
)
for _kernel in _kernels:
    register(_kernel.name)(_kernel)

CONTIGUOUS_ONLY = tuple(kernel.name for kernel in _kernels if not kernel.paged)
"""Peers of this project's kernels, which know no paging."""
