"""What the Triton decode kernels share on the host: checks, defaults, and the arguments of a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.decode.contract import DecodeKernel, DecodeProblem, check_inputs, problem_of
from kernels.decode.online_softmax import LOG2_E
from kernels.decode.planner import head_rows, head_tiles, padded_dim
from kernels.paged_cache import rows_and_lengths
from kernels.triton_support import MAX_GRID_ROWS, dot_dtype, on_device, triton_unavailable

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Call:
    """The tensors of one call, checked; scale_log2: the scores' scale times log2(e); problem: from shapes alone."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    out: Tensor
    workspace: Tensor | None
    scale_log2: float
    problem: DecodeProblem

    @property
    def cache_strides(self) -> tuple[int, ...]:
        """Block, token and head of K, then of V."""
        return (*self.k_cache.stride()[:3], *self.v_cache.stride()[:3])


class TritonDecodeKernel(DecodeKernel):
    """A decode kernel made of Triton launches.

    Subclasses write `launch(call, **options) -> None`, which fills call.out and names its own options.
    """

    launch: Callable[..., None]

    def unavailable(self, device: torch.device) -> str | None:
        return triton_unavailable(device)

    def supports(self, problem: DecodeProblem) -> str | None:
        reason = super().supports(problem)
        if reason is not None:
            return reason
        if problem.dtype not in SUPPORTED_DTYPES:
            return f"dtype is {problem.dtype}, supported: {', '.join(map(str, SUPPORTED_DTYPES))}"
        if problem.head_dim > MAX_HEAD_DIM:
            return f"head_dim is {problem.head_dim}, the most is {MAX_HEAD_DIM}"
        if problem.batch_size > MAX_GRID_ROWS:
            return f"batch_size is {problem.batch_size}, the most is {MAX_GRID_ROWS}"
        return None

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
        """See DecodeKernel.__call__; the options are those of the kernel's `launch`."""
        check_inputs(q, k_cache, v_cache, block_table, context_lens, out, self.kv_dtypes)
        problem = problem_of(q, k_cache, block_table)
        reason = self.supports(problem)
        if reason is not None:
            raise ValueError(f"{self.name}: {reason}")
        out = torch.empty_like(q) if out is None else out
        if q.shape[0] == 0:
            return out
        scale_log2 = (q.shape[2] ** -0.5 if scale is None else scale) * LOG2_E
        tables = rows_and_lengths(block_table, context_lens)
        call = Call(q, k_cache, v_cache, *tables, out, workspace, scale_log2, problem)
        with on_device(q):
            self.launch(call, **options)
        return out


def group_constexprs(problem: DecodeProblem, tile: int) -> dict[str, Any]:
    """The constexprs of a kernel that packs the query heads of a group and takes `tile` keys a step."""
    return {
        "NUM_KV_HEADS": problem.num_kv_heads,
        "GROUP": problem.group_size,
        "HEADS": head_rows(problem),
        "HEAD_TILES": head_tiles(problem),
        "HEAD_DIM": problem.head_dim,
        "DIM": padded_dim(problem.head_dim),
        "BLOCK_SIZE": problem.block_size,
        "TILE": tile,
        "DOT_DTYPE": dot_dtype(problem.dtype),
    }
