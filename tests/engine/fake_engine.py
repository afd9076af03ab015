"""An EngineCore over the fake executor: the whole host side of the engine, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduling.block_manager import BlockManager, HashFunction
from tests.engine.fake_executor import PagedHashExecutor


def make_engine(
    *,
    num_kv_blocks: int = 64,
    max_model_len: int = 128,
    eos_token_ids: Sequence[int] = (),
    hash_function: HashFunction = xxhash.xxh3_64_intdigest,
    executor: Any = None,
    tokenizer: Any = None,
    clock: Callable[[], float] | None = None,
    overlap: bool = False,
    **options: Any,
) -> EngineCore:
    config = EngineConfig(num_kv_blocks=num_kv_blocks, max_model_len=max_model_len, **options)
    core = EngineCore(
        config,
        executor or PagedHashExecutor(num_kv_blocks, config.block_size),
        num_kv_blocks=num_kv_blocks,
        vocab_size=50,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
        overlap=overlap,
        **({"clock": clock} if clock else {}),
    )
    blocks = BlockManager(num_kv_blocks, config.block_size, config.enable_prefix_caching, hash_function)
    core.block_manager = core.scheduler.block_manager = blocks
    return core


def run(core: EngineCore, max_steps: int = 10_000) -> dict[str, RequestOutput]:
    """Step to the end, checking the books after every step; the finished outputs by request id."""
    finished = {}
    for _ in range(max_steps):
        if not core.has_unfinished_requests():
            break
        for output in core.step():
            if output.finished:
                finished[output.request_id] = output
        core.block_manager.check_invariants()
    assert not core.has_unfinished_requests(), f"not finished after {max_steps} steps"
    return finished


def alone(prompt: Sequence[int], params: SamplingParams, **options: Any) -> RequestOutput:
    """The output of one request in an engine of its own with room for everything and no prefix cache."""
    blocks = options.get("max_model_len", 128)  # one a token is enough, whatever their size
    core = make_engine(num_kv_blocks=blocks, enable_prefix_caching=False, **options)
    core.add_request(prompt, params, "alone")
    return run(core)["alone"]
