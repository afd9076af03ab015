"""What a forward pass must know of its batch, and the kernels it runs: handed down explicitly, never global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.decode import DecodeKernel
from kernels.prefill import PrefillKernel


@dataclass(frozen=True)
class KernelChoice:
    """The attention kernels, and whether everything else takes its Triton or torch path. persistent_layers: with
    Triton, decode steps of the fewest rows run kernels/persistent (Decoder.prepare_persistent_layers)."""

    decode: DecodeKernel
    prefill: PrefillKernel
    use_triton: bool
    persistent_layers: bool = False

    def __post_init__(self) -> None:
        if self.persistent_layers and not self.use_triton:
            raise ValueError("persistent_layers needs use_triton")


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of one forward pass read and write KV.

    Tokens are ordered: one per decode row first, then the prefill chunks one after another; either may end in padding.

    slot_mapping: [num_tokens] int64, where each token's KV is written (block * block_size + offset); -1 = padding.
    num_decodes: decode rows, each of one token: tokens 0 .. num_decodes.
    decode_block_table: [num_decodes, max_blocks] int32; entries past a row's context are never read.
    decode_context_lens: [num_decodes] int32, the new token included; 0 = padding row.
    decode_plan: options of the decode kernel's calls; decode_workspace: its scratch, or None.
    num_prefill_tokens: tokens num_decodes .. num_decodes + num_prefill_tokens are prefill chunks, then their padding.
    prefill_block_table: [num_chunks, max_blocks] int32.
    prefill_context_lens: [num_chunks] int32, tokens of the sequence up to and including its chunk.
    query_start_loc: [num_chunks + 1] int32, chunk boundaries counted from the first prefill token.
    max_query_len: tokens of the longest chunk, or more; on the host.
    """

    slot_mapping: Tensor
    num_decodes: int
    decode_block_table: Tensor
    decode_context_lens: Tensor
    decode_plan: Mapping[str, Any]
    decode_workspace: Tensor | None
    num_prefill_tokens: int
    prefill_block_table: Tensor
    prefill_context_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
