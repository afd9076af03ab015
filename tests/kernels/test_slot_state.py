"""The kernels of a step's beginning and end give the torch path's rows, settings and state, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels import sampling_triton, slot_state
from kernels.sampling import sample
from kernels.slot_state import draw_settings, keep_newest, start_decodes
from tests.kernels.slot_case import (
    SEEDS,
    assert_same_rows,
    assert_same_settings,
    assert_same_slots,
    make_slots,
)

# A NaN among the logits is on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
PADDING = 6
CONTEXTS = [0, 1, 15, 16, 17, 63]
"""Tokens of slots 0 to 5: before, at and after the edge of a block of 16, and the last place of 4 blocks."""


UNWRITTEN = -777


@pytest.fixture(autouse=True)
def unwritten_shows(monkeypatch):
    """New memory is full of a value that nothing writes."""
    original = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kw: original(*args, **kw).fill_(UNWRITTEN))


def splitmix64(seed: int, counter: int) -> float:
    """The number's definition, in integers that do not wrap by themselves."""
    last = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & last
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & last
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    return (mix((mix((seed + golden) & last) + counter * golden) & last) >> 11) / 2**53


def both(slots, index, block_size=16, *, drawn=True):
    """(rows, settings, state afterwards) of the Triton path, which are those of the torch path."""
    results = []
    for use_triton in (True, False):
        state = slots.clone()
        rows, settings = start_decodes(state, index, block_size, drawn=drawn, use_triton=use_triton)
        results.append((rows, settings, state))
    (rows, settings, state), (expected_rows, expected_settings, expected_state) = results
    assert_same_rows(rows, expected_rows, block_size)
    assert_same_settings(settings, expected_settings)
    assert_same_slots(state, expected_state)
    return rows, settings, state


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
def test_rows_of_every_kind(block_size, drawn, device):
    slots = make_slots(CONTEXTS, 64, device)
    index = torch.tensor([3, PADDING, 0, 5, PADDING, 2, 1, 4, PADDING], device=device)
    rows, settings, state = both(slots, index, block_size, drawn=drawn)
    assert rows.context_lens.tolist() == [17, 0, 1, 64, 0, 16, 2, 18, 0]
    assert rows.positions.tolist() == [16, 0, 0, 63, 0, 15, 1, 17, 0]
    for row, slot in enumerate(index.tolist()):
        position = -1 if slot == PADDING else CONTEXTS[slot]
        place = int(slots.block_table[slot, position // block_size]) * block_size + position % block_size
        assert rows.slot_mapping[row] == (-1 if slot == PADDING else place)
        assert rows.input_ids[row] == slots.newest[slot]
    # What is not named is not counted, and padding never.
    assert state.num_computed.tolist() == [context + 1 for context in CONTEXTS] + [-1]
    assert (settings is not None) is drawn


def test_the_numbers_are_splitmix64s_at_the_count_that_includes_the_new_token(device):
    counts = [0, 1, 2, 40_959, 2**31, 2**40, 7, 8]
    assert len(counts) == len(SEEDS)
    slots = make_slots(counts, 4, device)
    index = torch.arange(len(counts) + 1, device=device)
    drawn = draw_settings(slots, index, use_triton=True)
    assert_same_settings(drawn, draw_settings(slots, index, use_triton=False))
    seeds = slots.seed.tolist()
    counted = [*counts, -1]
    assert drawn.uniform.tolist() == [splitmix64(seed, count) for seed, count in zip(seeds, counted)]
    assert drawn.uniform.min() >= 0
    assert drawn.uniform.max() < 1
    few = torch.tensor([0, 1, 2, 6, 7, 8], device=device)
    slots.num_computed[torch.tensor([3, 4, 5], device=device)] = 0
    _, settings, _ = both(slots, few)
    after = [1, 2, 3, 8, 9, -1]
    assert settings.uniform.tolist() == [
        splitmix64(seeds[slot], count) for slot, count in zip(few.tolist(), after)
    ]


@pytest.mark.parametrize("max_blocks", [1, 3, 8, 20])
def test_the_table_is_copied_in_turns(max_blocks, monkeypatch, device):
    """Tiles of 8 columns: fewer columns than one, one, and several with a part."""
    monkeypatch.setattr(slot_state, "MAX_TILE", 8)
    contexts = sorted({c for c in (0, 3, 31, 32, 33, 63, 64, 79) if c < 4 * max_blocks})
    slots = make_slots(contexts, max_blocks, device)
    both(slots, torch.arange(len(contexts) + 1, device=device), 4)


def test_entries_past_the_context_are_not_written(device):
    slots = make_slots([0, 20, 47], 5, device)
    index = torch.tensor([1, 3, 2, 0], device=device)
    rows, _ = start_decodes(slots, index, 16, drawn=False, use_triton=True)
    for row, (slot, count) in enumerate(zip(index.tolist(), [2, 0, 3, 1])):
        assert torch.equal(rows.block_table[row, :count], slots.block_table[slot, :count])
        assert (rows.block_table[row, count:] == UNWRITTEN).all()


def test_a_place_past_the_table_is_none(device):
    """The torch path ends with an error; a kernel must not write another sequence's KV instead."""
    slots = make_slots([47, 48, 100], 3, device)
    rows, _ = start_decodes(slots, torch.arange(3, device=device), 16, drawn=False, use_triton=True)
    assert rows.slot_mapping.tolist() == [int(slots.block_table[0, 2]) * 16 + 15, -1, -1]
    assert torch.equal(rows.block_table, slots.block_table[:3])


def test_steps_in_a_row_count_once_each(device):
    """Through three blocks, with the sampling kernels' newest tokens, against torch alone."""
    slots = [make_slots([0, 7, 30], 16, device) for _ in range(2)]
    for state in slots:
        state.top_k[:], state.top_p[:], state.temperature[0] = 0, 1.0, 0.0
    index = torch.tensor([2, 3, 0, 3, 1], device=device)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        logits = torch.randn(5, 40, generator=generator).to(device)
        logits[2, 3] = float("nan") if step == 5 else 0.0
        outcomes = []
        for state, use_triton in zip(slots, (True, False)):
            rows, settings = start_decodes(state, index, 8, drawn=True, use_triton=use_triton)
            chosen = (logits, settings.temperature, settings.top_k, settings.top_p, settings.uniform)
            if use_triton:
                keep_in = (state.newest, index)
                ids = sampling_triton.sample(*chosen, any_top_k=False, any_top_p=False, keep_in=keep_in)
            else:
                ids = sample(*chosen)
                keep_newest(state, index, ids, use_triton=False)
            outcomes.append((rows, settings, ids))
            state.newest[3] = 0  # padding rows write it in any order
        assert_same_rows(outcomes[0][0], outcomes[1][0], 8)
        assert_same_settings(outcomes[0][1], outcomes[1][1])
        assert torch.equal(outcomes[0][2], outcomes[1][2])
        assert_same_slots(*slots)
    assert slots[0].num_computed.tolist() == [20, 27, 50, -1]


@pytest.mark.parametrize("use_triton", [False, True])
def test_tokens_of_another_rank_become_the_newest(use_triton, device):
    slots = make_slots([1, 2, 3, 4], 4, device)
    before = slots.newest.tolist()
    tokens = torch.tensor([7, -1, 5, 5], device=device)
    keep_newest(slots, torch.tensor([2, 0, 4, 4], device=device), tokens, use_triton=use_triton)
    assert slots.newest.tolist() == [0, before[1], 7, before[3], 5]


@pytest.mark.parametrize("use_triton", [False, True])
def test_no_rows(use_triton, device):
    slots, none = make_slots([3], 4, device), torch.empty(0, dtype=torch.int64, device=device)
    rows, settings = start_decodes(slots, none, 16, drawn=True, use_triton=use_triton)
    assert rows.block_table.shape == (0, 4)
    assert settings.uniform.shape == draw_settings(slots, none, use_triton=use_triton).uniform.shape == (0,)
    keep_newest(slots, none, none, use_triton=use_triton)
    assert slots.num_computed.tolist() == [3, -1]


@pytest.mark.parametrize("use_triton", [False, True])
@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), r"slots must be \[rows\] int64, .*int32"),
        (torch.zeros(2, 1, dtype=torch.int64), r"slots must be .* got shape \(2, 1\)"),
        (torch.zeros(4, dtype=torch.int64)[::2], r"slots must be .* strides \(2,\)"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "slots are on meta, the state is on cpu"),
    ],
)
def test_bad_slots_are_named(index, message, use_triton):
    slots = make_slots([3], 4)
    with pytest.raises(ValueError, match=message):
        start_decodes(slots, index, 16, drawn=False, use_triton=use_triton)
    with pytest.raises(ValueError, match=message):
        draw_settings(slots, index, use_triton=use_triton)
    good = torch.zeros(2, dtype=torch.int64)
    for tokens in (good[:1], good.int()):
        with pytest.raises(ValueError, match=r"token_ids must be \[2\] int64"):
            keep_newest(slots, good, tokens, use_triton=use_triton)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 512])
def test_replays_count_what_they_read(num_rows):
    """500 steps of one graph, whose slots change, against torch: every thread reads a count before one writes it."""
    block_size, max_blocks = 16, 64
    expected = make_slots([(37 * i) % 300 for i in range(600)], max_blocks, "cuda")
    state, padding = expected.clone(), 600
    index = torch.full((num_rows,), padding, device="cuda")
    logits = torch.zeros(num_rows, 5000, device="cuda")

    def step():
        rows, settings = start_decodes(state, index, block_size, drawn=True, use_triton=True)
        chosen = (settings.temperature, settings.top_k, settings.top_p, settings.uniform)
        keep_in = (state.newest, index)
        ids = sampling_triton.sample(logits, *chosen, any_top_k=False, any_top_p=False, keep_in=keep_in)
        return rows, settings, ids

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, settings, ids = step()
    assert state.num_computed[padding] == -1
    state.newest[padding] = expected.newest[padding] = 0  # padding rows write it in any order
    generator = torch.Generator().manual_seed(0)
    for number in range(500):
        real = torch.randperm(600, generator=generator)[: num_rows - number % 3 if num_rows > 2 else 1]
        wanted = torch.full((num_rows,), padding)
        wanted[torch.randperm(num_rows, generator=generator)[: len(real)]] = real
        index.copy_(wanted)
        logits.normal_()
        logits[0, number] = float("nan") if number % 5 == 0 else 0.0
        graph.replay()
        wanted_rows, wanted_settings = start_decodes(
            expected, index, block_size, drawn=True, use_triton=False
        )
        assert_same_rows(rows, wanted_rows, block_size)
        assert_same_settings(settings, wanted_settings)
        assert bool((ids[0] == -1) == (number % 5 == 0))
        keep_newest(expected, index, ids, use_triton=False)
        state.newest[padding] = expected.newest[padding] = 0
        assert_same_slots(state, expected)


@pytest.mark.gpu
def test_further_batches_compile_nothing():
    """Case K12: any number of rows, and slots at odd offsets of an upload."""
    slots = make_slots([3] * 40, 8, "cuda")
    index = torch.arange(41, device="cuda")
    kernels = (
        slot_state._start_decodes_kernel,
        slot_state._draw_settings_kernel,
        slot_state._keep_newest_kernel,
    )

    def run(first: int, last: int) -> None:
        start_decodes(slots, index[first:last], 16, drawn=True, use_triton=True)
        draw_settings(slots, index[first:last], use_triton=True)
        keep_newest(slots, index[first:last], index[first:last], use_triton=True)

    def compiled() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    run(0, 5)
    before = compiled()
    for first, last in ((0, 1), (1, 2), (3, 40), (0, 16), (1, 17), (7, 39)):
        run(first, last)
    assert compiled() == before
