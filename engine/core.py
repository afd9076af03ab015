"""The engine's one loop: schedule, execute, collect."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from engine.config import EngineConfig
from engine.detokenizer import IncrementalDetokenizer
from engine.outputs import EngineTotals, RequestOutput, StepStats
from engine.sampling_params import SamplingParams
from engine.scalars import as_integer
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Schedule, ScheduledRequest, Scheduler
from engine.scheduling.step import SampledToken, StepInput, build_step
from engine.tracked_request import TrackedRequest

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


class PendingTokens(Protocol):
    """A launched step's result: result() waits for it, one token for each row that samples, in the step's order.

    Where the device has a clock of its own, an attribute `device_times` then holds two times, in seconds or None: see
    StepStats.device_s and device_idle_s.
    """

    def result(self) -> list[SampledToken]: ...


class Executor(Protocol):
    """What runs steps, in the order they are launched; launch returns as soon as the work is under way.

    An executor that can be lost (processes that may die) or closed has an attribute `failure`: None, or why it runs
    nothing more.
    """

    def launch(self, step: StepInput) -> PendingTokens: ...


@dataclass(frozen=True)
class _Launched:
    """A step under way, and what is to be told of it when its result is collected."""

    schedule: Schedule
    pending: PendingTokens
    launch_s: float
    num_waiting: int
    num_free_kv_blocks: int
    num_preempted: int
    after_rest: bool
    """No request was there for a while before it."""


class EngineCore:
    """Requests in, tokens out, one step at a time.

    With overlap, a step is launched before the result of the one before it is collected: the host schedules and
    collects while the device computes. A decode row's token then never visits the host on its way to the next step,
    and a request that ends by a stop id or string has run one token too many, which is dropped.

    vocab_size, max_model_len, eos_token_ids: the model's; overlap: see above; clock: seconds, replaceable in tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        num_kv_blocks: int,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        overlap: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.executor = executor
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.overlap = overlap
        self.clock = clock
        self.block_manager = BlockManager(num_kv_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy=config.scheduling,
        )
        self.last_step = StepStats()
        self.totals = EngineTotals()
        self._tracked: dict[str, TrackedRequest] = {}
        self._ended: list[RequestOutput] = []
        """Outputs of requests that ended between steps, for the next step to report."""
        self._in_flight: _Launched | None = None
        self._num_arrivals = 0
        self._num_preempted = 0
        """By schedules since the last launch: one may preempt and find nothing to launch."""
        self._rested = False

    @property
    def failure(self) -> BaseException | None:
        """Why nothing can run any more, or None. The engine then has no requests and takes none."""
        failure: BaseException | None = getattr(self.executor, "failure", None)
        return failure

    def refuse_after_failure(self) -> None:
        """Raise RuntimeError if nothing can run any more."""
        if self.failure is not None:
            raise RuntimeError(f"the engine has ended and takes no more requests: {self.failure}")

    # --- requests -------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt (text or token ids) and return its id.

        Raises ValueError, naming the field and the limit, for what can never run; every other request is untouched.
        Raises RuntimeError once the engine has failed.
        """
        self.refuse_after_failure()
        params = SamplingParams() if params is None else params
        arrival = self._num_arrivals
        if request_id is None:
            request_id = self._new_request_id()
        elif not isinstance(request_id, str):
            raise ValueError(f"request_id must be text, got {request_id!r}")
        if request_id in self._tracked:
            raise ValueError(f"request_id {request_id!r} is already in use by an unfinished request")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        params.check_vocabulary(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop is {params.stop!r}, but the engine has no tokenizer (skip_tokenizer_init)"
            )
        prompt_token_ids = self.check_token_ids("prompt", self._prompt_token_ids(prompt))
        if len(prompt_token_ids) >= self.max_model_len:
            raise ValueError(
                f"prompt has {len(prompt_token_ids)} tokens; max_model_len is {self.max_model_len} and must leave "
                "room for at least one new token"
            )
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            arrival=arrival,
            max_total_tokens=min(len(prompt_token_ids) + params.max_tokens, self.max_model_len),
            stop_token_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self.eos_token_ids),
            seed=self._stream_seed(arrival) if params.seed is None else params.seed,
        )
        self.scheduler.check_feasible(request)
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer.decode, tuple(params.stop))
        token_times: list[float] | None = [] if self.config.record_token_times else None
        self._tracked[request_id] = TrackedRequest(request, self.clock(), detokenizer, token_times)
        self._num_arrivals += 1
        self.totals.num_prompt_tokens += request.num_prompt_tokens
        self._rested |= not self.scheduler.has_requests
        self.scheduler.add(request)
        return request_id

    def _new_request_id(self) -> str:
        """The next "request-N" that neither a live request nor an unreported end has: users may choose such names."""
        number, ended = self._num_arrivals, {output.request_id for output in self._ended}
        while f"request-{number}" in self._tracked or f"request-{number}" in ended:
            number += 1
        return f"request-{number}"

    def _prompt_token_ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError("prompt is text, but the engine has no tokenizer (skip_tokenizer_init)")
        return self.tokenizer.encode(prompt)

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        """token_ids (a sequence, numpy array or tensor) as Python's integers; ValueError if they are not ids."""
        if hasattr(token_ids, "tolist"):
            token_ids = token_ids.tolist()
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes | bytearray):
            raise ValueError(f"{field} must be text or a sequence of token ids, got {token_ids!r:.100}")
        if not token_ids:
            raise ValueError(f"{field} is empty; it needs at least one token")
        if set(map(type, token_ids)) == {int}:  # the usual case, in a tenth of the time
            checked = tuple(token_ids)
        else:
            checked = tuple([as_integer(f"each token id of {field}", token) for token in token_ids])
        try:
            most = np.frombuffer(array("I", checked), np.uint32).max()  # a third of the time of min and max
        except OverflowError:
            most = self.vocab_size
        if most >= self.vocab_size:
            outside = next(token for token in checked if not 0 <= token < self.vocab_size)
            raise ValueError(f"{field} holds token id {outside}, outside the vocabulary of {self.vocab_size}")
        return checked

    def _stream_seed(self, arrival: int) -> int:
        """A stream of its own for a request without a seed: the engine's seed and the order of arrival."""
        return xxhash.xxh3_64_intdigest(f"{self.config.seed}/{arrival}".encode())

    def abort(self, request_id: str, *, report: bool = True) -> None:
        """End a request with finish_reason "abort"; the next step() reports it, with what it had (unless report=False).

        An id that is unknown or already finished is ignored: the request may have ended a moment ago.
        """
        if (tracked := self._tracked.get(request_id)) is not None:
            tracked.request.finish_reason = "abort"
            self._finish(tracked)
            if report:
                self._ended.append(tracked.output())

    def postpone(self, outputs: Sequence[RequestOutput]) -> None:
        """Let a later step() report these ends: their owner is not the one who is stepping now."""
        self._ended.extend(outputs)

    def has_unfinished_requests(self) -> bool:
        """Whether any request still has tokens to come."""
        return self.scheduler.has_requests

    # --- the loop -------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step and return every request that changed, as it now stands.

        Raises what the executor raises. If that has lost it, every unfinished request has ended with finish_reason
        "error", and the next step() reports them with what they had; else the failed step is done again.
        """
        changed = self._advance()
        ended, self._ended = self._ended, []
        return ended + [tracked.output() for tracked in changed]

    def step_finished(self) -> list[RequestOutput]:
        """As step(), but only the requests that ended: no cost for those that merely grew."""
        changed = self._advance()
        ended, self._ended = self._ended, []
        return ended + [tracked.output() for tracked in changed if tracked.request.finish_reason]

    def _advance(self) -> list[TrackedRequest]:
        """Launch a step, collect one, and return the requests that got a token or ended."""
        start = self.clock()
        try:
            launched = self._launch() if self.scheduler.has_requests else None
            if self.overlap:
                launched, self._in_flight = self._in_flight, launched
            collected = self._collect(launched) if launched is not None else None
        except BaseException:
            # Out of memory, Ctrl-C, ...: what was under way is lost, so whoever steps on starts from what is known.
            self._in_flight = None
            self.totals.num_preemptions += self.scheduler.restart_running()
            self.end_all_if_failed()
            raise
        if not self.scheduler.has_requests:
            self._in_flight = None  # at most rows of requests that have ended
        if launched is None or collected is None:
            return []
        changed, wait_s, collect_s = collected
        self._count(launched, wait_s, collect_s, duration_s=self.clock() - start)
        return changed

    def end_all_if_failed(self) -> None:
        """If the executor is lost or closed, end every request with finish_reason "error": the next step() says so."""
        if self.failure is None:
            return
        self._in_flight = None
        for tracked in list(self._tracked.values()):
            tracked.request.finish_reason, tracked.request.error = "error", str(self.failure)
            self._finish(tracked)
            self._ended.append(tracked.output())

    def _launch(self) -> _Launched | None:
        start = self.clock()
        schedule = self.scheduler.schedule()
        self.totals.num_preemptions += len(schedule.preempted)
        self._num_preempted += len(schedule.preempted)
        if not schedule.requests:
            return None
        for request in schedule.admitted:
            tracked = self._tracked[request.request_id]
            if tracked.first_scheduled_time is None:
                tracked.first_scheduled_time = start
        pending = self.executor.launch(build_step(schedule))
        after_rest, self._rested = self._rested, False
        num_preempted, self._num_preempted = self._num_preempted, 0
        return _Launched(
            schedule,
            pending,
            launch_s=self.clock() - start,
            num_waiting=len(self.scheduler.waiting),
            num_free_kv_blocks=self.block_manager.num_free_blocks,
            num_preempted=num_preempted,
            after_rest=after_rest,
        )

    def _collect(self, launched: _Launched) -> tuple[list[TrackedRequest], float, float]:
        """The requests that changed, and the seconds of waiting for the device and of the rest."""
        start = self.clock()
        tokens = iter(launched.pending.result())
        now = self.clock()
        changed = []
        for scheduled in launched.schedule.requests:
            token = next(tokens) if scheduled.samples else None
            if scheduled.request.finish_reason is not None:
                continue  # it ended while this step was under way
            self.scheduler.publish(scheduled)
            if token is not None:
                changed.append(self._take(scheduled, token, now))
        return changed, now - start, self.clock() - now

    def _take(self, scheduled: ScheduledRequest, token: SampledToken, now: float) -> TrackedRequest:
        """Give a request its sampled token, and end it if that was the last."""
        request = scheduled.request
        tracked = self._tracked[request.request_id]
        if token.token_id is None:
            request.finish_reason, request.error = "error", "the model's logits held NaN or +inf"
            self.block_manager.withdraw(request)
            self._finish(tracked)
            return tracked
        request.append_token(token.token_id)
        self.totals.num_output_tokens += 1
        gap_s = tracked.note_token(now)
        if gap_s is not None:
            self.totals.inter_token_s += gap_s
        else:
            self._count_first_token(tracked, now)
        if token.logprobs is not None:
            tracked.logprobs.append(token.logprobs)
        if tracked.detokenizer is not None:
            tracked.detokenizer.append(token.token_id)
            if tracked.detokenizer.stopped:
                request.finish_reason = "stop"
        if request.finish_reason is not None:
            self._finish(tracked)
        return tracked

    def _finish(self, tracked: TrackedRequest) -> None:
        request = tracked.request
        self.scheduler.finish(request)
        del self._tracked[request.request_id]
        if tracked.detokenizer is not None:
            tracked.detokenizer.finish()
        reason = request.finish_reason
        assert reason is not None
        self.totals.num_finished[reason] = self.totals.num_finished.get(reason, 0) + 1
        self.totals.num_cached_tokens += request.num_cached_tokens

    def _count_first_token(self, tracked: TrackedRequest, now: float) -> None:
        self.totals.num_first_tokens += 1
        self.totals.ttft_s += now - tracked.arrival_time
        assert tracked.first_scheduled_time is not None
        self.totals.queue_s += tracked.first_scheduled_time - tracked.arrival_time

    def _count(self, launched: _Launched, wait_s: float, collect_s: float, duration_s: float) -> None:
        schedule = launched.schedule
        device_s, device_idle_s = getattr(launched.pending, "device_times", (None, None))
        self.last_step = step = StepStats(
            num_prefill_tokens=sum(s.end - s.start for s in schedule.prefills),
            num_decode_tokens=len(schedule.decodes),
            num_requests=len(schedule.requests),
            num_preempted=launched.num_preempted,
            duration_s=duration_s,
            num_admitted=len(schedule.admitted),
            num_cached_tokens=schedule.num_cached_tokens,
            num_waiting=launched.num_waiting,
            num_free_kv_blocks=launched.num_free_kv_blocks,
            host_s=launched.launch_s + collect_s,
            wait_s=wait_s,
            device_s=device_s,
            device_idle_s=None if launched.after_rest else device_idle_s,
        )
        totals = self.totals
        totals.num_steps += 1
        totals.num_prefill_tokens += step.num_prefill_tokens
        totals.num_decode_tokens += step.num_decode_tokens
        totals.num_hit_tokens += step.num_cached_tokens
        totals.host_s += step.host_s
        totals.wait_s += step.wait_s
        totals.device_s += step.device_s or 0.0
        totals.device_idle_s += step.device_idle_s or 0.0

    # --- state ----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """Counters since the start, and the pool as it is now."""
        return {
            **asdict(self.totals),
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_kv_blocks": self.block_manager.num_blocks,
            "num_free_kv_blocks": self.block_manager.num_free_blocks,
        }
