"""A live request with what only its user sees of it: text, log-probabilities, times."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.detokenizer import IncrementalDetokenizer
from engine.outputs import RequestMetrics, RequestOutput
from engine.scheduling.request import Request


@dataclass(eq=False)
class TrackedRequest:
    """Kept from a request's arrival to its end. token_times: None, or a list to keep them in."""

    request: Request
    arrival_time: float
    detokenizer: IncrementalDetokenizer | None
    token_times: list[float] | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    max_inter_token_s: float | None = None

    def note_token(self, now: float) -> float | None:
        """A token has come. Returns the seconds since the one before, None for the first."""
        gap = None
        if self.last_token_time is None:
            self.first_token_time = now
        else:
            gap = now - self.last_token_time
            if self.max_inter_token_s is None or gap > self.max_inter_token_s:
                self.max_inter_token_s = gap
        self.last_token_time = now
        if self.token_times is not None:
            self.token_times.append(now)
        return gap

    def output(self) -> RequestOutput:
        """The request as it now stands."""
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(request.token_ids[request.num_prompt_tokens :]),
            text=self.detokenizer.text if self.detokenizer else "",
            logprobs=tuple(self.logprobs) if request.params.logprobs is not None else None,
            finish_reason=request.finish_reason,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            metrics=self._metrics(),
            error=request.error,
        )

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            last_token_time=self.last_token_time,
            token_times=None if self.token_times is None else tuple(self.token_times),
            max_inter_token_s=self.max_inter_token_s,
            num_output_tokens=self.request.num_output_tokens,
            num_cached_tokens=self.request.num_cached_tokens,
            num_preemptions=self.request.num_preemptions,
        )
