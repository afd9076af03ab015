"""In what order engines that are compared run: memory holds one at a time, so they take turns.

Whatever drifts meanwhile (clocks, heat, neighbours) looks like a difference between them. A second pass goes through
them backwards, A B B A: an even drift then adds as much to each of them, and cancels in their ratio. It costs each
engine a second start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.settings import Variant


@dataclass(frozen=True)
class EnginePass:
    """The rounds that an engine measures before the next one has its turn: first_round, first_round + 1, ..."""

    number: int
    first_round: int
    rounds: int

    def __post_init__(self) -> None:
        if self.number < 0 or self.first_round < 0 or self.rounds < 1:
            raise ValueError(f"a pass needs number and first_round >= 0 and rounds >= 1, got {self}")

    @property
    def params(self) -> dict[str, Any]:
        """What a point's params say of its pass."""
        return {
            "engine_pass": self.number,
            "first_round": self.first_round,
            "rounds": self.rounds,
        }


def split_rounds(rounds: int, num_passes: int) -> list[EnginePass]:
    """So many passes of as equal numbers of rounds as can be, the longer ones first; never an empty pass."""
    share, over = divmod(rounds, num_passes)
    passes: list[EnginePass] = []
    for number in range(min(num_passes, rounds)):
        passes.append(EnginePass(number, sum(each.rounds for each in passes), share + (number < over)))
    return passes


def in_turn(
    variants: Sequence[Variant], rounds: int, num_passes: int
) -> Iterator[tuple[EnginePass, Variant]]:
    """The variants forwards, then backwards, and so on; one alone has nobody to take turns with and runs once."""
    for each in split_rounds(rounds, num_passes if len(variants) > 1 else 1):
        for variant in reversed(variants) if each.number % 2 else variants:
            yield each, variant
