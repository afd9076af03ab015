"""What the peers of the prefill kernels share: torch's own attention, on KV that lies contiguous, on CUDA devices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.prefill.contract import PrefillKernel, PrefillProblem, check_inputs

DTYPES = (torch.float16, torch.bfloat16)
OLDEST = (8, 0)
"""The least compute capability."""


class ContiguousPrefill(PrefillKernel):
    """What prefill attention costs without paging: for problems marked `contiguous`, no other; so never in an engine.

    The pool is viewed as sequences: nothing is gathered, and the table is not read. A call needs the option
    contiguous_len, which `plan` gives: the longest context, and the promise that the blocks lie as PrefillProblem says.
    Nothing checks it, since that would wait for the device. Where `out` is None, the result is torch's own tensor,
    and nothing is copied.
    """

    paged = False
    max_head_dim: int

    @abstractmethod
    def is_built(self) -> bool:
        """Whether this build of torch has the operation."""

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda" or not torch.cuda.is_available():
            return f"{self.name} needs a CUDA device"
        if not self.is_built():
            return f"{self.name} is not in this build of torch"
        found = torch.cuda.get_device_capability(device)
        if found < OLDEST:
            return f"{self.name} needs compute capability {OLDEST[0]}.{OLDEST[1]}, {device} has {found[0]}.{found[1]}"
        return None

    def supports(self, problem: PrefillProblem) -> str | None:
        if (reason := self.unavailable(problem.device)) is not None:
            return reason
        if not problem.contiguous:
            return f"{self.name} needs contiguous KV (problem.contiguous)"
        if problem.dtype not in DTYPES:
            return f"dtype is {problem.dtype}, supported: {', '.join(map(str, DTYPES))}"
        if problem.head_dim % 8 or problem.head_dim > self.max_head_dim:
            return f"head_dim is {problem.head_dim}, supported: multiples of 8 up to {self.max_head_dim}"
        return None

    def plan(self, problem: PrefillProblem) -> dict[str, Any]:
        return {"contiguous_len": problem.max_context_len} if problem.contiguous else {}

    def check_call(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor,
        max_query_len: int,
        out: Tensor | None,
        contiguous_len: int | None,
        options: Mapping[str, Any],
    ) -> int:
        """The promised contiguous_len. Raises TypeError for an option that there is not, ValueError for tensors that do
        not fit together, where nothing is promised, and on a device that the operation is not for."""
        if options:
            raise TypeError(f"{self.name} takes no option {sorted(options)}")
        check_inputs(q, k_cache, v_cache, block_table, context_lens, query_start_loc, max_query_len, out)
        if contiguous_len is None:
            raise ValueError(f"{self.name} reads contiguous KV only: contiguous_len must promise its length")
        if contiguous_len < 0:
            raise ValueError(f"contiguous_len is {contiguous_len}, the least is 0")
        if (reason := self.unavailable(q.device)) is not None:
            raise ValueError(f"{reason}, q is on {q.device}")
        return contiguous_len
