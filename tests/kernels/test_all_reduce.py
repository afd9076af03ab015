"""The one-shot all-reduce: sums and bits of one rank, processes that wait for each other, graphs on a GPU."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from kernels import all_reduce
from kernels.all_reduce import (
    MAX_TILE,
    NUM_PROGRAMS,
    SIGNALS,
    PeerBuffers,
    buffer_bytes,
    one_shot_all_reduce,
)
from kernels.triton_support import INTERPRETING, triton_unavailable
from tests.kernels.all_reduce_case import MAX_BYTES, PlayedPeers, rank_order_sum

pytestmark = pytest.mark.skipif(
    triton_unavailable(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is not None,
    reason="needs Triton",
)

SHAPES = [(1, 8), (3, 1000), (1, 256 * NUM_PROGRAMS), (5, 17)]


def assert_sum(actual: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    if actual.dtype == torch.bfloat16 and INTERPRETING:  # whose cast to bf16 cuts instead of rounding
        torch.testing.assert_close(actual, rank_order_sum(tensors), rtol=2**-7, atol=0)
    else:
        assert torch.equal(actual, rank_order_sum(tensors))


@pytest.mark.parametrize(
    ("rank", "size", "dtype"),
    [
        (0, 1, torch.bfloat16),
        (0, 2, torch.bfloat16),
        (1, 2, torch.float32),
        (2, 3, torch.float16),
        (7, 8, torch.bfloat16),
    ],
)
def test_the_sum_in_place_in_rank_order(
    rank: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    peers = PlayedPeers(rank, size, device)
    torch.manual_seed(0)
    for call, shape in enumerate(SHAPES, start=1):
        tensors = [torch.randn(shape, device=device).to(dtype) for _ in range(size)]
        peers.publish(tensors)
        x = tensors[rank].clone()
        assert one_shot_all_reduce(x, peers.buffers) is x
        assert_sum(x, tensors)
        assert torch.equal(peers.half(rank, call)[: x.nbytes].view(dtype).view(shape), tensors[rank])
        for peer in range(size):
            told = peers.signals(peer)[:, rank]
            assert (told == (call if peer != rank else 0)).all(), f"rank {peer} was told {told}"
            assert not peers.signals(peer)[:, size:].any()


def test_a_tensor_of_more_than_one_tile_a_program(device: torch.device) -> None:
    numel = MAX_TILE * (NUM_PROGRAMS + 3) - 5
    peers = PlayedPeers(1, 2, device, max_bytes=2 * numel)
    tensors = [torch.randn(numel, device=device).half() for _ in range(2)]
    peers.publish(tensors)
    assert_sum(one_shot_all_reduce(tensors[1].clone(), peers.buffers), tensors)


def test_the_number_of_the_call_may_overflow(device: torch.device) -> None:
    peers = PlayedPeers(0, 2, device)
    peers.buffers.calls.fill_(2**31 - 2)
    for call in (2**31 - 1, -(2**31), -(2**31) + 1):
        tensors = [torch.randn(7, device=device) for _ in range(2)]
        peers.publish(tensors)
        # publish counts from 1: odd calls are odd, and the signals are what the peer would write.
        assert peers.call % 2 == call % 2
        peers.signals(0)[:, 1] = call
        assert_sum(one_shot_all_reduce(tensors[0].clone(), peers.buffers), tensors)
        assert (peers.buffers.calls == call).all()


def test_what_it_does_not_sum_is_refused_by_name(device: torch.device) -> None:
    buffers = PlayedPeers(0, 1, device).buffers
    for x, message in (
        (torch.zeros(4, dtype=torch.float64), "x must be one of torch.float32, .*, got torch.float64"),
        (torch.zeros(4, 4).T[:2], "x must be contiguous, got strides"),
        (torch.zeros(0), f"x must have 1 to {MAX_BYTES} bytes, got 0"),
        (torch.zeros(MAX_BYTES // 4 + 1), f"x must have 1 to {MAX_BYTES} bytes, got {MAX_BYTES + 4}"),
    ):
        with pytest.raises(ValueError, match=message):
            one_shot_all_reduce(x.to(device), buffers)
    with pytest.raises(ValueError, match="multiples of 16, got \\[8\\]"):
        PeerBuffers.at((0, 8), 0, 64, device, None)
    with pytest.raises(ValueError, match="rank must be below size"):
        PeerBuffers.at((0, 16), 2, 64, device, None)
    with pytest.raises(ValueError, match=f"size at most {SIGNALS}"):
        PeerBuffers.at((0,) * (SIGNALS + 1), 0, 64, device, None)


# --- ranks that wait for each other -----------------------------------------------------------------------------

NUM_CALLS = 10


def numbers(rank: int, call: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(1 + 997 * call % 5000, generator=generator)


def one_of_the_ranks(rank: int, size: int, directory: str) -> None:
    """Sums with the others through files mapped by all, and is late at every call that another may be early at."""
    torch.set_num_threads(1)
    all_reduce.NUM_PROGRAMS = 3  # the interpreter runs them one after another
    mapped = [
        torch.from_file(f"{directory}/{peer}", shared=True, size=buffer_bytes(MAX_BYTES), dtype=torch.uint8)
        for peer in range(size)
    ]
    addresses = tuple(t.data_ptr() for t in mapped)
    buffers = PeerBuffers.at(addresses, rank, MAX_BYTES, torch.device("cpu"), mapped)
    results = []
    rng = random.Random(rank)
    for call in range(NUM_CALLS):
        time.sleep(0.1 * rng.random())
        results.append(one_shot_all_reduce(numbers(rank, call), buffers))
    torch.save(results, f"{directory}/result-{rank}")


@pytest.mark.skipif(not INTERPRETING, reason="the ranks share memory of the host")
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_that_come_late_are_waited_for_and_nothing_is_written_over(
    size: int, tmp_path: Path
) -> None:
    for rank in range(size):
        (tmp_path / str(rank)).write_bytes(bytes(buffer_bytes(MAX_BYTES)))
    mp.spawn(one_of_the_ranks, (size, str(tmp_path)), nprocs=size)
    for rank in range(size):
        results = torch.load(tmp_path / f"result-{rank}")
        for call, result in enumerate(results):
            expected = rank_order_sum([numbers(peer, call) for peer in range(size)])
            assert torch.equal(result, expected), f"rank {rank}, call {call}"


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_two_streams_of_one_gpu_as_two_ranks(graphs: bool) -> None:
    """Each waits for the other on the device. Calls of many sizes, in bf16, replayed with new numbers."""
    device = torch.device("cuda")
    shapes = [(1, 1024), (1, 5120), (16, 4096), (3, 1000), (64, 5120), (1, 8)]
    max_bytes = 2 * 64 * 5120
    memory = [torch.zeros(buffer_bytes(max_bytes), dtype=torch.uint8, device=device) for _ in range(2)]
    addresses = tuple(t.data_ptr() for t in memory)
    ranks = [PeerBuffers.at(addresses, rank, max_bytes, device, memory) for rank in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = [[torch.zeros(shape, device=device, dtype=torch.bfloat16) for shape in shapes] for _ in range(2)]

    def run(rank: int) -> None:
        for x in xs[rank]:
            one_shot_all_reduce(x, ranks[rank])

    def run_all(work) -> None:
        for rank, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work(rank)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    for x in xs[0]:  # loads every kernel before one waits: loading may wait for the device
        alone = PlayedPeers(0, 2, device, max_bytes)
        alone.publish([x, x])
        one_shot_all_reduce(x, alone.buffers)
    torch.cuda.synchronize()
    run_all(run)
    torch.cuda.synchronize()
    captured = [torch.cuda.CUDAGraph() for _ in range(2)]
    for rank, graph in enumerate(captured):
        with torch.cuda.graph(graph):
            run(rank)
    for turn in range(50):
        given = [[torch.randn(shape, device=device).bfloat16() for shape in shapes] for _ in range(2)]
        for rank in range(2):
            for x, value in zip(xs[rank], given[rank]):
                x.copy_(value)
        run_all((lambda rank: captured[rank].replay()) if graphs else run)
        torch.cuda.synchronize()
        for a, b, first, second in zip(*given, *xs):
            assert torch.equal(first, rank_order_sum([a, b])), f"turn {turn}, shape {tuple(a.shape)}"
            assert torch.equal(first, second)
