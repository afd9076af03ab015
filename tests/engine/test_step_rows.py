"""The rows of a step: each token in its place, and padding that can neither write nor count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.batch_state import BatchState
from engine.execution.input_batch import ChunkRows
from engine.execution.step_rows import EMPTY_STEP, StepRows, StepSize, lay_out
from engine.scheduling.step import Chunk, StepInput

PADDING = 99


@st.composite
def steps(draw: st.DrawFn) -> StepInput:
    slots = draw(st.permutations(range(12)))
    num_decodes, num_chunks = draw(st.integers(0, 6)), draw(st.integers(1, 6))
    chunks = []
    for slot in slots[num_decodes : num_decodes + num_chunks]:
        token_ids = tuple(draw(st.lists(st.integers(0, 1000), min_size=1, max_size=9)))
        chunks.append(Chunk(slot, draw(st.integers(0, 50)), token_ids, draw(st.booleans())))
    return StepInput((), (), tuple(slots[:num_decodes]), 60, 30, tuple(chunks))


@st.composite
def sizes(draw: st.DrawFn, step: StepInput) -> StepSize:
    exact, more = StepSize.of(step), st.integers(0, 5)
    return StepSize(*(number + draw(more) for number in (exact.decodes, exact.tokens, exact.chunks)), 20, 60)


@given(data=st.data(), step=steps())
def test_rows_are_those_of_the_step_and_then_padding(data: st.DataObject, step: StepInput) -> None:
    size = data.draw(sizes(step))
    rows = StepRows.view(torch.from_numpy(lay_out(step, size, PADDING)), size)
    chunks = rows.chunks
    assert chunks is not None
    num_decodes = len(step.decode_slots)
    assert rows.decode_slots.tolist() == [*step.decode_slots, *[PADDING] * (size.decodes - num_decodes)]

    written = {}  # what each token of a real sequence is
    for row in range(size.tokens):
        position = int(chunks.positions[row])
        if position >= 0:
            chunk = int(chunks.chunk_of_token[row])
            assert chunks.query_start_loc[chunk] <= row < chunks.query_start_loc[chunk + 1]
            written[int(chunks.slots[chunk]), position] = int(chunks.token_ids[row])
    expected = {
        (chunk.slot, chunk.start + i): token
        for chunk in step.chunks
        for i, token in enumerate(chunk.token_ids)
    }
    assert written == expected
    is_padding = chunks.positions < 0
    assert size.tokens - int(is_padding.sum()) == len(expected)
    assert set(chunks.token_ids[is_padding].tolist()) <= {0}  # each has a row of the embedding

    ends = dict(zip(chunks.slots.tolist(), chunks.ends.tolist()))
    assert ends.pop(PADDING, -1) == -1
    assert ends == {chunk.slot: chunk.start + len(chunk.token_ids) for chunk in step.chunks}
    lens = chunks.query_start_loc.diff().tolist()
    assert lens == [len(chunk.token_ids) for chunk in step.chunks] + [0] * (size.chunks - len(step.chunks))

    num_sampled = len(step.sampled_slots)
    assert rows.sampled_rows is not None
    assert rows.sampled_slots.tolist() == [*step.sampled_slots, *[PADDING] * (size.samples - num_sampled)]
    assert rows.sampled_rows[:num_decodes].tolist() == list(range(num_decodes))
    samplers = [chunk for chunk in step.chunks if chunk.samples]
    for row, chunk in zip(rows.sampled_rows[num_decodes:num_sampled].tolist(), samplers, strict=True):
        token = row - size.decodes
        assert chunks.positions[token] == ends[chunk.slot] - 1
        assert chunks.slots[chunks.chunk_of_token[token]] == chunk.slot
    assert rows.sampled_rows[num_sampled:].lt(size.decodes + size.tokens).all()


@pytest.mark.parametrize("decodes", [1, 5])
def test_decode_rows_alone_are_their_slots(decodes: int) -> None:
    step = StepInput((), (), (3, 1, 2), 9, 9, ())
    size = StepSize(decodes + 3, samples=decodes + 3)
    rows = StepRows.view(torch.from_numpy(lay_out(step, size, PADDING)), size)
    assert rows.decode_slots.tolist() == rows.sampled_slots.tolist() == [3, 1, 2, *[PADDING] * decodes]
    assert rows.sampled_rows is rows.chunks is None


def test_an_empty_step_is_all_padding() -> None:
    size = StepSize(2, 8, 4, samples=6, max_query_len=8)
    rows = StepRows.view(torch.from_numpy(lay_out(EMPTY_STEP, size, PADDING)), size)
    assert rows.chunks is not None
    assert set(rows.sampled_slots.tolist()) == {PADDING}
    assert set(rows.chunks.positions.tolist()) == {-1}
    assert not rows.chunks.query_start_loc.any()


def test_chunks_become_rows_whose_padding_writes_no_kv_and_has_no_context() -> None:
    state = BatchState(4, 3, 100, torch.device("cpu"))
    state.block_table[1] = torch.tensor([7, 5, 6])
    step = StepInput((), (), (0,), 9, 9, (Chunk(1, 3, (11, 12), True),))
    size = StepSize(2, 4, 3, samples=5, max_query_len=4)
    tokens = StepRows.view(torch.from_numpy(lay_out(step, size, state.padding_slot)), size).chunks
    assert tokens is not None
    rows = ChunkRows.build(state, tokens, 4)
    assert rows.input_ids.tolist() == [11, 12, 0, 0]
    assert rows.positions.tolist() == [3, 4, 0, 0]
    assert rows.slot_mapping.tolist() == [7 * 4 + 3, 5 * 4, -1, -1]
    assert rows.context_lens.tolist() == [5, 0, 0]
    assert rows.query_start_loc.tolist() == [0, 2, 2, 2]
    assert rows.block_table[0].tolist() == [7, 5, 6]
    assert rows.max_query_len == 4
