"""What the prefix cache knows of a block, and the blocks that start a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.scheduling.request import Request


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """A full block whose KV is written, findable by content.

    A block's identity is its parent and its tokens. chain_hash only finds candidates; parent (compared by object
    identity) and tokens (32-bit ids) decide, so a hash collision can never hand out another prompt's KV.
    """

    chain_hash: int
    parent: CacheEntry | None
    tokens: bytes
    block_id: int


@dataclass
class Prefix:
    """The published blocks that start a request's tokens.

    places: by block id, where in the chain. free: ids of those that no request holds.
    """

    request: Request | None = None
    chain: list[CacheEntry] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.chain)

    def __iter__(self) -> Iterator[CacheEntry]:
        return iter(self.chain)

    def extend(self, entries: Sequence[CacheEntry], ref_counts: Sequence[int]) -> None:
        """Add the chain's next entries. ref_counts: by block id, how many requests hold it."""
        block_ids = [entry.block_id for entry in entries]
        self.places.update(zip(block_ids, count(len(self.chain))))
        self.chain += entries
        self.free.update([block_id for block_id in block_ids if ref_counts[block_id] == 0])

    def cut_before(self, block_id: int) -> None:
        """Drop this block, which is no longer published, and those below it; nothing if it is not in the chain."""
        if block_id in self.places:
            place = self.places[block_id]
            for entry in self.chain[place:]:
                del self.places[entry.block_id]
                self.free.discard(entry.block_id)
            del self.chain[place:]
