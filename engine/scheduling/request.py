"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.scheduling.prefix import CacheEntry


@dataclass(eq=False)
class Request:
    """Host-side state of a request. Only the scheduler and the block manager change it.

    num_computed_tokens, the number of tokens whose KV is written by the steps launched so far, is the only progress
    counter: blocks, chunks, slots and resuming after a preemption all derive from it. A token that a launched step
    samples is pending until the step's result is collected.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int
    """Order of arrival: the priority. Earlier requests are never preempted for later ones."""
    max_total_tokens: int
    """Prompt and new tokens at most: min(prompt + max_tokens, max_model_len)."""
    stop_token_ids: frozenset[int]
    """Ids that end the request: its own, and the model's unless ignore_eos."""
    seed: int
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    is_decoding: bool = False
    """Its newest token was sampled into its slot, so that the next step needs only the slot's name."""
    slot: int = -1
    num_blocks_sent: int = 0
    """Entries of block_table that whoever executes the steps knows of."""
    block_table: list[int] = field(default_factory=list)
    cached_chain: list[CacheEntry] = field(default_factory=list)
    """The cache entries of the leading full blocks of this request (its own, or equal ones of other requests)."""
    block_hashes: list[int] = field(default_factory=list)
    block_tokens: list[bytes] = field(default_factory=list)
    """Chain hashes and contents of the leading full blocks: functions of token_ids alone, kept to hash a block once."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def is_complete(self) -> bool:
        """All the tokens it may have are known or pending: there is nothing more to run."""
        return len(self.token_ids) + self.num_pending_tokens >= self.max_total_tokens

    @property
    def max_kv_tokens(self) -> int:
        """KV slots this request can ever need: the last token's KV is never read, so never written."""
        return self.max_total_tokens - 1

    def append_token(self, token: int) -> None:
        """Take a pending token, and finish when it is a stop id ("stop") or the last one allowed ("length")."""
        self.num_pending_tokens -= 1
        self.token_ids.append(token)
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_tokens >= self.max_total_tokens:
            self.finish_reason = "length"
