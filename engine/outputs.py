"""What the engine hands back: one RequestOutput a request, and the numbers of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds of the engine's clock (monotonic; only differences mean anything).

    token_times holds the time of every output token, and only when the engine was made with
    record_token_times=True. A token that is computed again after a preemption is not a new token.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    token_times: tuple[float, ...] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request as it stands: partial while finish_reason is None, final afterwards.

    token_ids: the new tokens, an ending EOS or stop id included.
    text: their text, complete characters only, special tokens left out, cut before a stop string.
    logprobs: None, or one dict {token id: natural-log probability} for each new token.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache when the request was first admitted.
    error: what went wrong where finish_reason is "error".
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, float], ...] | None
    finish_reason: FinishReason | None
    num_cached_tokens: int
    num_preemptions: int
    metrics: RequestMetrics
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class StepStats:
    """What one engine step did. duration_s is the whole step: scheduling, the device's work, collecting."""

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_requests: int = 0
    num_preempted: int = 0
    duration_s: float = 0.0


@dataclass
class EngineTotals:
    """Counters since the engine started, the source of LLM.stats()."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
