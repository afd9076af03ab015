"""One-shot sums of two GPUs against NCCL's: eagerly, in graphs that are replayed, and between collectives of NCCL."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp

from engine.config import EngineConfig
from engine.execution.all_reduce_choice import choose_all_reduce
from engine.parallel.group import ParallelGroup
from engine.parallel.peer_memory import NO_MULTICAST
from engine.parallel.rendezvous import join_store, open_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SHAPES = [(1, 1024), (1, 5120), (2, 4096), (16, 5120), (64, 5120), (256, 5120), (3, 307), (1, 1)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZE = 2


def own_part(device: torch.device, rank: int, turn: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1000 * turn + rank)
    return [
        torch.randn(shape, generator=generator, device=device).to(dtype)
        for shape in SHAPES
        for dtype in DTYPES
    ]


def compare(group: ParallelGroup, device: torch.device) -> None:
    """Raises where a sum differs from NCCL's, or has other bits on the other rank."""
    over_nccl = replace(group, small_all_reduce=None)
    assert group.small_all_reduce is not None
    taken = [group.small_all_reduce.takes(x) for x in own_part(device, group.rank, 0)]
    assert any(taken)
    assert not all(taken)
    tensors = own_part(device, group.rank, 0)

    def run() -> None:
        for number, x in enumerate(tensors):
            group.all_reduce(x)
            if number % 5 == 0:
                over_nccl.all_gather(x, dim=0)

    graph = torch.cuda.CUDAGraph()
    for turn in range(300):
        for x, value in zip(tensors, own_part(device, group.rank, turn)):
            x.copy_(value)
        expected = [over_nccl.all_reduce(x.clone()) for x in tensors]
        if turn < 20:
            run()
        else:
            if turn == 20:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    run()
            graph.replay()
        for x, sum_of_nccl in zip(tensors, expected):
            assert torch.equal(x, sum_of_nccl), f"turn {turn}, {tuple(x.shape)} {x.dtype}"
            assert torch.equal(*over_nccl.all_gather(x[None], dim=0))


def one_of_the_ranks(rank: int, port: int) -> None:
    os.environ.update(NO_MULTICAST)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = join_store(port, rank, SIZE, device, shared=False)
    config = EngineConfig(tensor_parallel_size=SIZE, all_reduce="one_shot")
    compare(choose_all_reduce(config, group, device, use_triton=True, largest=2 * 64 * 5120), device)
    torch.distributed.destroy_process_group()


def test_the_bits_of_nccl() -> None:
    store = open_store()
    mp.spawn(one_of_the_ranks, (store.port,), nprocs=SIZE)
