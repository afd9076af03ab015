"""Tokens chosen from each rank's candidates are those chosen from all logits: ties, padding, NaN, -inf and all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.sharded_sampling import greedy_tokens, likeliest_logits
from engine.layers.embedding import VocabParallelHead
from engine.parallel.group import ParallelGroup
from kernels import sampling


class ThreadGroup(ParallelGroup):
    """Ranks that are threads of this process."""

    def join_in(self, barrier: threading.Barrier, board: list[torch.Tensor | None]) -> None:
        object.__setattr__(self, "_shared", (barrier, board))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        barrier, board = self._shared  # type: ignore[attr-defined]
        board[self.rank] = tensor
        barrier.wait()
        gathered = torch.cat(board, dim=dim)
        barrier.wait()
        return gathered


def on_ranks(
    logits: torch.Tensor, size: int, work: Callable[[torch.Tensor, VocabParallelHead], torch.Tensor]
) -> torch.Tensor:
    """work(this rank's logits, its head) on `size` ranks, which must all give the same."""
    rows, vocab_size = logits.shape
    barrier, board = threading.Barrier(size, timeout=120), [None] * size
    results: list[torch.Tensor | None] = [None] * size

    def run(rank: int) -> None:
        group = ThreadGroup(rank, size)
        group.join_in(barrier, board)
        head = VocabParallelHead(vocab_size, 1, group=group, dtype=logits.dtype, device=torch.device("cpu"))
        local = torch.full((rows, head.ids.num_rows), -torch.inf, dtype=logits.dtype)
        local[:, : head.ids.num_ids] = logits[:, head.ids.start : head.ids.start + head.ids.num_ids]
        results[rank] = work(local, head)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = results[0]
    assert first is not None
    for other in results:
        assert other is not None
        assert torch.equal(first, other)
    return first


def expected_greedy(logits: torch.Tensor) -> torch.Tensor:
    return sampling.greedy(logits).masked_fill(~sampling.finite_rows(logits), -1)


FEW = [-2.0, -0.0, 0.0, 0.5, 3.0, -torch.inf]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.sampled_from(FEW), min_size=13, max_size=13), min_size=1, max_size=4),
    size=st.sampled_from([2, 3, 4, 8]),
    odd=st.sampled_from([None, torch.nan, -torch.nan, torch.inf]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_every_choice_equals_that_from_all_logits(rows, size, odd, dtype, seed):
    """Few distinct values, so nearly all is ties; 13 ids on 8 ranks leave one rank without any."""
    logits = torch.tensor(rows, dtype=dtype)
    if odd is not None:
        logits[0, seed % 13] = odd
    greedy = on_ranks(logits.clone(), size, lambda local, head: greedy_tokens(local, head, use_triton=False))
    assert torch.equal(greedy, expected_greedy(logits))
    generator = torch.Generator().manual_seed(seed)
    count = len(rows)
    temperature = torch.tensor([0.0, 0.7, 1.5, 1.0])[torch.randint(4, (count,), generator=generator)]
    top_k = torch.randint(1, 5, (count,), generator=generator)
    top_p = torch.tensor([1.0, 0.6, 0.95])[torch.randint(3, (count,), generator=generator)]
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "PIECE_ELEMENTS", 20)  # a row or a few at a time
        likely = on_ranks(logits.clone(), size, lambda local, head: likeliest_logits(local, head, 4))
    assert likely.shape == logits.shape
    finite = sampling.finite_rows(logits)
    assert torch.equal(sampling.finite_rows(likely), finite)
    drawn = [sampling.sample(each, temperature, top_k, top_p, uniform) for each in (likely, logits)]
    assert torch.equal(drawn[0][finite], drawn[1][finite])


@pytest.mark.parametrize("size", [2, 4])
def test_only_candidates_are_sent(size):
    """A rank sends one key a row, or num_candidates, never its share of the vocabulary."""
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    widths = []

    def work(local: torch.Tensor, head: VocabParallelHead) -> torch.Tensor:
        gather = head.group.all_gather
        object.__setattr__(
            head.group, "all_gather", lambda t, dim: (widths.append(t.shape[1]), gather(t, dim))[1]
        )
        greedy = greedy_tokens(local, head, use_triton=False)
        kept = likeliest_logits(local, head, 8)
        assert (kept.isfinite().sum(-1) == 8 * size).all()
        return greedy

    assert torch.equal(on_ranks(logits, size, work), logits.argmax(-1))
    assert sorted(widths) == [1] * size + [8] * size
