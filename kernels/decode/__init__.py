"""Paged GQA decode attention: kernels by name, behind one contract (kernels/decode/contract.py).

    from kernels import decode
    kernel = decode.get("split_kv")
    out = kernel(q, k_cache, v_cache, block_table, context_lens)

A kernel of another package joins through the entry-point group `decodelab.decode`.
"""

from __future__ import annotations

from kernels.decode.contract import DecodeKernel, DecodeProblem, check_inputs
from kernels.decode.fixed_split import FixedSplitDecode
from kernels.decode.flashinfer import FlashInferDecode
from kernels.decode.planned import PlannedDecode
from kernels.decode.reference import ReferenceDecode
from kernels.decode.sdpa import SdpaDecode
from kernels.decode.shared_prefix import SharedPrefixDecode
from kernels.decode.single_pass import SinglePassDecode
from kernels.decode.split_kv import SplitKVDecode
from kernels.decode.split_kv_fused import SplitKVFusedDecode
from kernels.decode.split_kv_tma import SplitKVTmaDecode
from kernels.decode.stream_k import StreamKDecode
from kernels.decode.stream_k_tma import StreamKTmaDecode
from kernels.decode.torch_paged import TorchDecode
from kernels.registry import Registry, UnknownKernelError

__all__ = [
    "DecodeKernel",
    "DecodeProblem",
    "UnknownKernelError",
    "available",
    "check_inputs",
    "get",
    "names",
    "register",
]

_registry: Registry[DecodeKernel] = Registry("decode kernel", "decodelab.decode")
names = _registry.names
available = _registry.available
get = _registry.get
register = _registry.register

for _kernel in (
    ReferenceDecode(),
    TorchDecode(),
    SinglePassDecode(),
    SplitKVDecode(),
    SplitKVFusedDecode(),
    SplitKVTmaDecode(),
    PlannedDecode(),
    FixedSplitDecode(),
    StreamKDecode(),
    StreamKTmaDecode(),
    SharedPrefixDecode(),
    SdpaDecode(),
    FlashInferDecode(),
):
    register(_kernel.name)(_kernel)
