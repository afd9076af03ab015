"""A state of slots for tests: every value that a slot may hold, its padding slot last."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kernels.slot_state import DecodeRows, DrawSettings

# Seeds and counters at which 64-bit arithmetic wraps and shifts meet the sign.
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64, 1234567890123456789, -42]


@dataclass
class Slots:
    """kernels.slot_state.SlotState."""

    num_computed: Tensor
    newest: Tensor
    block_table: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor

    def clone(self) -> Slots:
        return replace(self, **{field.name: getattr(self, field.name).clone() for field in fields(self)})


def make_slots(
    num_computed: list[int], max_blocks: int, device: torch.device | str = "cpu", seed: int = 0
) -> Slots:
    """Slots of so many tokens and one more, of padding. Blocks are distinct, so that each place is."""
    generator = torch.Generator().manual_seed(seed)
    count = len(num_computed) + 1
    blocks = torch.randperm(count * max_blocks, generator=generator).int().view(count, max_blocks)
    slots = Slots(
        num_computed=torch.tensor([*num_computed, -1]),
        newest=torch.randint(0, 50_000, (count,), generator=generator),
        block_table=blocks,
        temperature=torch.rand(count, generator=generator, dtype=torch.float64) * 2,
        top_k=torch.randint(-1, 100, (count,), generator=generator),
        top_p=torch.rand(count, generator=generator, dtype=torch.float64),
        seed=torch.tensor((SEEDS * (count // len(SEEDS) + 1))[:count]),
    )
    return replace(slots, **{f.name: getattr(slots, f.name).to(device) for f in fields(slots)})


def assert_same_rows(actual: DecodeRows, expected: DecodeRows, block_size: int) -> None:
    """Bit for bit, but for table entries past a row's context."""
    for name in ("input_ids", "positions", "slot_mapping", "context_lens"):
        assert_same(getattr(actual, name), getattr(expected, name), name)
    assert actual.block_table.shape == expected.block_table.shape
    assert actual.block_table.dtype == expected.block_table.dtype
    columns = torch.arange(expected.block_table.shape[1], device=expected.context_lens.device)
    used = columns * block_size < expected.context_lens[:, None]
    assert_same(actual.block_table[used], expected.block_table[used], "block_table")


def assert_same_settings(actual: DrawSettings | None, expected: DrawSettings | None) -> None:
    if expected is None:
        assert actual is None
        return
    for field in fields(expected):
        assert_same(getattr(actual, field.name), getattr(expected, field.name), field.name)


def assert_same_slots(actual: Slots, expected: Slots) -> None:
    for field in fields(expected):
        assert_same(getattr(actual, field.name), getattr(expected, field.name), field.name)


def assert_same(actual: Tensor, expected: Tensor, name: str) -> None:
    assert actual.dtype == expected.dtype, name
    assert torch.equal(actual, expected), f"{name}: {actual} is not {expected}"
