"""What the engine hands back: one RequestOutput a request, and the numbers of one step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class RequestMetrics:
    """What a request went through. Times in seconds of the engine's clock (monotonic; only differences mean anything).

    first_scheduled_time: when it first left the queue. token_times holds the time of every output token, and only when
    the engine was made with record_token_times=True. max_inter_token_s: the longest wait for a token after the first.
    A token that is computed again after a preemption is not a new token. num_cached_tokens, num_preemptions: as in
    RequestOutput. What has not happened yet is None.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    token_times: tuple[float, ...] | None = None
    max_inter_token_s: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_s(self) -> float | None:
        """From arrival until the first step that ran some of it was chosen."""
        return _difference(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return _difference(self.arrival_time, self.first_token_time)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: the mean inter-token latency."""
        total = _difference(self.first_token_time, self.last_token_time)
        return None if total is None or self.num_output_tokens < 2 else total / (self.num_output_tokens - 1)

    @property
    def inter_token_s(self) -> tuple[float, ...] | None:
        """The waits between neighbouring tokens, where token_times are kept."""
        if self.token_times is None:
            return None
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.token_times))

    @property
    def latency_s(self) -> float | None:
        """From arrival to the newest token: of a finished request, all it took."""
        return _difference(self.arrival_time, self.last_token_time)


def _difference(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


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
    """What one engine step did, and where its time went.

    num_cached_tokens: found in the prefix cache by the num_admitted requests that entered in this step.
    num_preempted: since the step before was launched.
    num_waiting, num_free_kv_blocks: left when the step was launched. duration_s: of the call that collected it:
    without overlap that is the whole step, with overlap launching the next one is in it instead of launching this one.
    host_s: choosing, launching and collecting this step; wait_s: waiting for its result, with the host idle.
    device_s: from its first work on the device to its last, and device_idle_s: from the end of the step before to its
    start; by events on the stream that nobody waits for, None where there are none (CPU). The second is also None for
    the first step and after a time without requests.
    """

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_requests: int = 0
    num_preempted: int = 0
    duration_s: float = 0.0
    num_admitted: int = 0
    num_cached_tokens: int = 0
    num_waiting: int = 0
    num_free_kv_blocks: int = 0
    host_s: float = 0.0
    wait_s: float = 0.0
    device_s: float | None = None
    device_idle_s: float | None = None


@dataclass
class EngineTotals:
    """Counters since the engine started, the source of LLM.stats().

    Seconds are sums: host_s, wait_s, device_s, device_idle_s over steps as in StepStats; queue_s and ttft_s over the
    num_first_tokens requests that got so far, as in RequestMetrics; inter_token_s over the num_output_tokens -
    num_first_tokens tokens that followed. num_hit_tokens: found in the prefix cache, at every admission of a request;
    num_cached_tokens: the same of requests that have ended, at their first admission.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
    num_first_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    inter_token_s: float = 0.0
    host_s: float = 0.0
    wait_s: float = 0.0
    device_s: float = 0.0
    device_idle_s: float = 0.0
