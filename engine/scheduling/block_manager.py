"""Blocks of the paged KV cache: who holds them, and which full ones can serve a later request."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

import xxhash

from engine.scheduling.prefix import CacheEntry, Prefix
from engine.scheduling.request import Request

HashFunction = Callable[[bytes, int], int]
"""A block's tokens and its parent's hash (0: none) to its own hash."""

TOKEN_BYTES = array("I").itemsize


class BlockManager:
    """Paged KV bookkeeping with reference counts and a cross-request prefix cache.

    Paging follows PagedAttention (Kwon et al. 2023). A prompt's full blocks are found again through a chain of
    64-bit xxHash values, h_i = xxh3(tokens of block i) seeded with h_{i-1}. A block is published only once its KV
    is written, and its entry is removed exactly when the block is reused. Blocks are freed tail first, blocks without
    an entry are reused before blocks with one, and among those the least recently used goes first: so a chain loses
    its tail before its head.

    num_blocks, block_size: the pool. hash_function: see HashFunction; tests pass one that collides.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = xxhash.xxh3_64_intdigest,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be >= 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hash = hash_function
        self._ref_counts = [0] * num_blocks
        self._entries: list[CacheEntry | None] = [None] * num_blocks
        self._index: dict[int, list[CacheEntry]] = {}
        self._free_plain: deque[int] = deque(range(num_blocks))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._holders: dict[str, Request] = {}
        self._search = Prefix()
        """What find_prefix found last, kept true by whatever changes it: who waits asks again in every step."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; cached ones among them count, since they can be reused."""
        return len(self._free_plain) + len(self._free_cached)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    # --- prefix cache ---------------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> Prefix:
        """The longest chain of published blocks that starts request.token_ids. It holds until the next change.

        At least one token is always left to compute, since sampling needs its logits: a sequence that is cached
        to its very end gives up its last block. Asking again for the same request costs what has changed since.
        """
        if self._search.request is not request:
            self._search = Prefix(request)
        if self.enable_prefix_caching:
            self._extend(self._search, request)
        return self._search

    def _extend(self, prefix: Prefix, request: Request) -> None:
        """Go on with a walk along request's blocks as far as they are published."""
        most = (request.num_tokens - 1) // self.block_size
        if len(prefix) == most:
            return
        self._hash_blocks(request, most)
        entry, found, start = prefix.chain[-1] if prefix.chain else None, [], len(prefix)
        for chain_hash, tokens in zip(request.block_hashes[start:most], request.block_tokens[start:most]):
            entry = self._lookup(chain_hash, entry, tokens)
            if entry is None:
                break
            found.append(entry)
        prefix.extend(found, self._ref_counts)

    def publish(self, request: Request, num_written: int) -> None:
        """Make every full block among request's first num_written tokens findable. Call once their KV is written.

        Where an equal block is already published, it stays the findable one, and this request's own copy is an
        ordinary block.
        """
        if not self.enable_prefix_caching:
            return
        chain, num_full = request.cached_chain, num_written // self.block_size
        if len(chain) == num_full:
            return
        self._hash_blocks(request, num_full)
        for i in range(len(chain), num_full):
            parent = chain[-1] if chain else None
            if parent is not None and self._entries[parent.block_id] is not parent:
                return  # the parent's block was reused, so nothing below it could be found
            chain_hash, tokens = request.block_hashes[i], request.block_tokens[i]
            entry = self._lookup(chain_hash, parent, tokens)
            if entry is None:
                entry = CacheEntry(chain_hash, parent, tokens, request.block_table[i])
                self._entries[entry.block_id] = entry
                self._index.setdefault(chain_hash, []).append(entry)
            chain.append(entry)

    def reset_prefix_cache(self) -> None:
        """Forget every published block. Running requests keep their blocks."""
        self._index.clear()
        self._search = Prefix()
        self._entries = [None] * self.num_blocks
        self._free_plain.extend(self._free_cached)
        self._free_cached.clear()

    def withdraw(self, request: Request) -> None:
        """Make nothing findable that a request of the same tokens would be given.

        For KV in doubt, such as what led to logits that are not finite. Requests that share the blocks keep them.
        """
        if not self.enable_prefix_caching:
            return
        found = Prefix()
        self._extend(found, request)
        for entry in found:
            self._unpublish(entry.block_id)
            if self._ref_counts[entry.block_id] == 0:
                del self._free_cached[entry.block_id]
                self._free_plain.append(entry.block_id)

    def _lookup(self, chain_hash: int, parent: CacheEntry | None, tokens: bytes) -> CacheEntry | None:
        for entry in self._index.get(chain_hash, ()):
            if entry.parent is parent and entry.tokens == tokens:
                return entry
        return None

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Let the request know the content and the chain hash of its first num_blocks blocks, which must be full."""
        hashes, width = request.block_hashes, TOKEN_BYTES * self.block_size
        if len(hashes) >= num_blocks:
            return
        packed = _pack(request.token_ids[len(hashes) * self.block_size : num_blocks * self.block_size])
        blocks = [packed[start : start + width] for start in range(0, len(packed), width)]
        chain_hash = hashes[-1] if hashes else 0
        for tokens in blocks:
            chain_hash = self._hash(tokens, chain_hash)
            hashes.append(chain_hash)
        request.block_tokens += blocks

    # --- allocation -----------------------------------------------------------------------------------------

    def can_admit(self, request: Request, prefix: Prefix, spare: int = 0) -> bool:
        """Whether all of request's tokens fit and leave `spare` blocks free. Hits that are free now are taken too.

        prefix: what find_prefix has just said, or an empty one.
        """
        new_blocks = self.blocks_for(request.num_tokens) - len(prefix)
        return new_blocks + len(prefix.free) + spare <= self.num_free_blocks

    def admit(self, request: Request, prefix: Prefix) -> None:
        """Give a request without blocks its prefix hits and new blocks for the rest of its tokens.

        Sets num_computed_tokens to the tokens that the hits cover. can_admit must have said yes.
        """
        if request.block_table:
            raise RuntimeError(f"request {request.request_id} already holds blocks")
        if prefix.chain and prefix is not self._search:
            raise RuntimeError(f"request {request.request_id}: its prefix was found before another's")
        self._search = Prefix()
        for entry in prefix:  # taken first, so that the allocation below cannot evict them
            if self._ref_counts[entry.block_id] == 0:
                del self._free_cached[entry.block_id]
            self._ref_counts[entry.block_id] += 1
            request.block_table.append(entry.block_id)
        request.cached_chain.extend(prefix)
        request.num_computed_tokens = len(prefix) * self.block_size
        self._holders[request.request_id] = request
        if not self.grow(request, request.num_tokens):
            raise RuntimeError(f"admitted request {request.request_id} beyond the free blocks")

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the block table to hold num_tokens tokens; False, and nothing taken, if too few blocks are free."""
        missing = self.blocks_for(num_tokens) - len(request.block_table)
        if missing > self.num_free_blocks:
            return False
        for _ in range(missing):
            request.block_table.append(self._take_free_block())
        return True

    def free(self, request: Request) -> None:
        """Give back the request's blocks, tail first. Published ones stay findable until they are reused."""
        for block_id in reversed(request.block_table):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._entries[block_id] is None:
                    self._free_plain.append(block_id)
                else:
                    self._free_cached[block_id] = None
                    if block_id in self._search.places:
                        self._search.free.add(block_id)
        request.block_table.clear()
        request.cached_chain.clear()
        self._holders.pop(request.request_id, None)

    def _take_free_block(self) -> int:
        if self._free_plain:
            block_id = self._free_plain.popleft()
        else:
            block_id, _ = self._free_cached.popitem(last=False)
            self._unpublish(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _unpublish(self, block_id: int) -> None:
        entry = self._entries[block_id]
        assert entry is not None
        self._entries[block_id] = None
        self._search.cut_before(block_id)
        bucket = self._index[entry.chain_hash]
        bucket.remove(entry)
        if not bucket:
            del self._index[entry.chain_hash]

    # --- checking -------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError, saying what is wrong, unless the books balance. O(blocks); meant for tests."""
        held = Counter(block for request in self._holders.values() for block in request.block_table)
        free = [*self._free_plain, *self._free_cached]
        _check(len(free) == len(set(free)), "a block is free twice")
        _check(not held.keys() & set(free), "a block is both free and in a live block table")
        _check(len(free) + len(held) == self.num_blocks, "free and used blocks do not add up to the pool")
        _check(
            all(self._ref_counts[b] == held[b] for b in range(self.num_blocks)), "a reference count is wrong"
        )
        _check(
            all(self._entries[b] is None for b in self._free_plain),
            "a published block is in the plain free list",
        )
        _check(
            all(self._entries[b] is not None for b in self._free_cached), "a cached free block has no entry"
        )

        indexed = [entry for bucket in self._index.values() for entry in bucket]
        _check(
            len(indexed) == sum(e is not None for e in self._entries), "index and entries differ in number"
        )
        identities = {(id(entry.parent), entry.tokens) for entry in indexed}
        _check(len(identities) == len(indexed), "two blocks are published for the same prefix")
        _check(all(self._index.values()), "the index keeps a hash that no entry has")
        for chain_hash, bucket in self._index.items():
            for entry in bucket:
                _check(self._entries[entry.block_id] is entry, "an index entry outlived its block")
                anew = self._hash(entry.tokens, entry.parent.chain_hash if entry.parent else 0)
                _check(chain_hash == anew == entry.chain_hash, "an entry has the wrong hash")
        for request in self._holders.values():
            for i, block_id in enumerate(request.block_table):
                published = self._entries[block_id]
                if published is None:
                    continue
                written = (i + 1) * self.block_size <= request.num_computed_tokens
                _check(written, "a block was published before its KV was written")
                own = _pack(request.token_ids[i * self.block_size : (i + 1) * self.block_size])
                _check(published.tokens == own, "a published block holds other tokens")
        self._check_search()

    def _check_search(self) -> None:
        """What is kept of the last search is the beginning of what a new one finds."""
        kept, anew = self._search, Prefix()
        if kept.request is not None and self.enable_prefix_caching:
            self._extend(anew, kept.request)
        _check(kept.chain == anew.chain[: len(kept)], "a kept prefix names blocks that are not published")
        _check(kept.places == {e.block_id: i for i, e in enumerate(kept)}, "a kept prefix is out of place")
        free = {e.block_id for e in kept if self._ref_counts[e.block_id] == 0}
        _check(kept.free == free, "a kept prefix is wrong about what is free")


def _pack(token_ids: list[int]) -> bytes:
    return array("I", token_ids).tobytes()


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
