"""What steps may launch, launched once before the first of them, so that no request waits for a compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.execution.batch_state import MAX_CANDIDATES, SamplingKind
from engine.execution.graph_sizes import decode_sizes
from engine.scheduling.step import Chunk, NewBlocks, SlotSetting, StepInput
from kernels.slot_state import start_decodes

if TYPE_CHECKING:
    from engine.execution.model_runner import ModelRunner

HARDEST_SAMPLING = SlotSetting(0, 1.0, MAX_CANDIDATES + 1, 0.9, 0, 1)
"""With top-p, log-probabilities, and a top-k of which ranks cannot decide from a few candidates: they gather all."""

PROMPTS, PROMPT_ROWS = (128, 16, 1), 64
"""Tokens, and tokens times query heads of a group. Kernels for prefill differ between long chunks, short ones, and what
a cached prefix leaves of a prompt; those of attention go by rows of its tiles."""


def rehearse(runner: ModelRunner) -> None:
    """Run one of the layers, which are alike: some prompts, steps of rows in powers of two, for which most kernels are
    compiled, and attention of as many rows as any graph has, since its kernels change in between too.

    For a block of compile_ahead: no result of a Triton kernel is used as an index. Leaves slot 0 used, and no KV cache.
    """
    shape = runner.shape
    most = max(1, min(runner.config.max_num_batched_tokens, runner.max_model_len - 1))
    few = max(1, PROMPT_ROWS // (shape.num_q_heads // shape.num_kv_heads))
    num_tokens = sorted({min(n, most) for n in (*PROMPTS, few)}, reverse=True)
    num_blocks = -(-max(num_tokens) // shape.block_size)
    runner.kv_cache = runner.new_kv_cache(num_blocks)[:1]
    settings, new_blocks = (HARDEST_SAMPLING,), (NewBlocks(0, 0, tuple(range(num_blocks))),)
    runner.state.apply(StepInput(settings, new_blocks, (), 0, 0, ()))
    hardest, greedy = runner.state.sampling_kind((0,)), runner.state.sampling_kind(())
    for n in num_tokens:
        runner.run_eagerly(StepInput((), (), (), 0, 0, (Chunk(0, 0, (0,) * n, True),)), hardest)
    sizes = decode_sizes(runner.config.max_num_seqs)
    steps = [(n, greedy) for n in sizes if n == sizes[-1] or n.bit_count() == 1]
    for num_rows, kind in (*steps, (1, SamplingKind(any_drawn=True)), (sizes[-1], hardest)):
        _rehearse_step(runner, num_rows, kind)
    for num_rows in sizes:
        _rehearse_attention(runner, num_rows)
    runner.kv_cache = runner.new_kv_cache(0)


def _rehearse_step(runner: ModelRunner, num_rows: int, kind: SamplingKind) -> None:
    slots = _padding(runner, num_rows)
    for use_triton in (True, False):  # the latter's results are real
        rows, draw = start_decodes(
            runner.state, slots, runner.shape.block_size, drawn=kind.any_drawn, use_triton=use_triton
        )
    plan = runner.planner.every_plan(num_rows, runner.max_model_len)[0]
    runner.sample(runner.forward(rows, None, plan), slots, kind, draw)


def _rehearse_attention(runner: ModelRunner, num_rows: int) -> None:
    """By every plan that so many rows may have."""
    shape = runner.shape
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    qkv = torch.empty(num_rows, heads, shape.head_dim, dtype=shape.dtype, device=runner.device)
    k_cache, v_cache = runner.kv_cache[0].unbind(0)
    block_table = runner.state.block_table[_padding(runner, num_rows)]
    context_lens = torch.zeros(num_rows, dtype=torch.int32, device=runner.device)
    for plan in runner.planner.every_plan(num_rows, runner.max_model_len):
        runner.kernels.decode(
            qkv[:, : shape.num_q_heads],
            k_cache,
            v_cache,
            block_table,
            context_lens,
            workspace=plan.workspace(),
            **plan.options,
        )


def _padding(runner: ModelRunner, num_rows: int) -> torch.Tensor:
    return torch.full((num_rows,), runner.state.padding_slot, dtype=torch.int64, device=runner.device)
