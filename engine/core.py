"""The engine's one loop: schedule, execute, collect."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol

import xxhash

from engine.config import EngineConfig
from engine.detokenizer import IncrementalDetokenizer
from engine.outputs import EngineTotals, RequestMetrics, RequestOutput, StepStats
from engine.sampling_params import SamplingParams
from engine.scalars import as_integer
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Schedule, ScheduledRequest, Scheduler
from engine.scheduling.step import SampledToken, StepInput, build_step

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


class PendingTokens(Protocol):
    """A launched step's result: result() waits for it, one token for each row that samples, in the step's order."""

    def result(self) -> list[SampledToken]: ...


class Executor(Protocol):
    """What runs steps, in the order they are launched; launch returns as soon as the work is under way.

    An executor that can be lost (processes that may die) has an attribute `failure`: None, or why it runs nothing more.
    """

    def launch(self, step: StepInput) -> PendingTokens: ...


@dataclass(frozen=True)
class _Launched:
    schedule: Schedule
    pending: PendingTokens


@dataclass
class _Tracked:
    """A live request with what only its user sees: text, log-probabilities, times."""

    request: Request
    arrival_time: float
    detokenizer: IncrementalDetokenizer | None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    first_token_time: float | None = None
    last_token_time: float | None = None
    token_times: list[float] = field(default_factory=list)


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
        self._tracked: dict[str, _Tracked] = {}
        self._ended: list[RequestOutput] = []
        """Outputs of requests that ended between steps, for the next step to report."""
        self._in_flight: _Launched | None = None
        self._num_arrivals = 0

    @property
    def failure(self) -> BaseException | None:
        """Why nothing can run any more, or None. The engine then has no requests and takes none."""
        failure: BaseException | None = getattr(self.executor, "failure", None)
        return failure

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
        if self.failure is not None:
            raise RuntimeError(f"the engine has ended and takes no more requests: {self.failure}")
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
        self._tracked[request_id] = _Tracked(request, self.clock(), detokenizer)
        self._num_arrivals += 1
        self.totals.num_prompt_tokens += request.num_prompt_tokens
        self.scheduler.add(request)
        return request_id

    def _new_request_id(self) -> str:
        """The next "request-N" that no live request has: users may have chosen such a name themselves."""
        number = self._num_arrivals
        while f"request-{number}" in self._tracked:
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
        for token in (min(checked), max(checked)):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{field} holds token id {token}, outside the vocabulary of {self.vocab_size}"
                )
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
                self._ended.append(self._output(tracked))

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
        return ended + [self._output(tracked) for tracked in changed]

    def step_finished(self) -> list[RequestOutput]:
        """As step(), but only the requests that ended: no cost for those that merely grew."""
        changed = self._advance()
        ended, self._ended = self._ended, []
        return ended + [self._output(tracked) for tracked in changed if tracked.request.finish_reason]

    def _advance(self) -> list[_Tracked]:
        """Launch a step, collect one, and return the requests that got a token or ended."""
        start = self.clock()
        try:
            launched = self._launch() if self.scheduler.has_requests else None
            if self.overlap:
                launched, self._in_flight = self._in_flight, launched
            changed = self._collect(launched) if launched is not None else []
        except BaseException:
            # Out of memory, Ctrl-C, ...: what was under way is lost, so whoever steps on starts from what is known.
            self._in_flight = None
            self.scheduler.restart_running()
            self._end_all_if_failed()
            raise
        if not self.scheduler.has_requests:
            self._in_flight = None  # at most rows of requests that have ended
        if launched is not None:
            self._count(launched.schedule, self.clock() - start)
        return changed

    def _end_all_if_failed(self) -> None:
        if self.failure is None:
            return
        for tracked in list(self._tracked.values()):
            tracked.request.finish_reason, tracked.request.error = "error", str(self.failure)
            self._finish(tracked)
            self._ended.append(self._output(tracked))

    def _launch(self) -> _Launched | None:
        schedule = self.scheduler.schedule()
        if not schedule.requests:
            return None
        return _Launched(schedule, self.executor.launch(build_step(schedule)))

    def _collect(self, launched: _Launched) -> list[_Tracked]:
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
        return changed

    def _take(self, scheduled: ScheduledRequest, token: SampledToken, now: float) -> _Tracked:
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
        if tracked.first_token_time is None:
            tracked.first_token_time = now
        tracked.last_token_time = now
        if self.config.record_token_times:
            tracked.token_times.append(now)
        if token.logprobs is not None:
            tracked.logprobs.append(token.logprobs)
        if tracked.detokenizer is not None:
            tracked.detokenizer.append(token.token_id)
            if tracked.detokenizer.stopped:
                request.finish_reason = "stop"
        if request.finish_reason is not None:
            self._finish(tracked)
        return tracked

    def _finish(self, tracked: _Tracked) -> None:
        request = tracked.request
        self.scheduler.finish(request)
        del self._tracked[request.request_id]
        if tracked.detokenizer is not None:
            tracked.detokenizer.finish()
        reason = request.finish_reason
        assert reason is not None
        self.totals.num_finished[reason] = self.totals.num_finished.get(reason, 0) + 1
        self.totals.num_cached_tokens += request.num_cached_tokens

    def _count(self, schedule: Schedule, duration_s: float) -> None:
        self.last_step = StepStats(
            num_prefill_tokens=sum(s.end - s.start for s in schedule.prefills),
            num_decode_tokens=len(schedule.decodes),
            num_requests=len(schedule.requests),
            num_preempted=len(schedule.preempted),
            duration_s=duration_s,
        )
        self.totals.num_steps += 1
        self.totals.num_prefill_tokens += self.last_step.num_prefill_tokens
        self.totals.num_decode_tokens += self.last_step.num_decode_tokens
        self.totals.num_preemptions += self.last_step.num_preempted

    def _output(self, tracked: _Tracked) -> RequestOutput:
        request = tracked.request
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(request.token_ids[request.num_prompt_tokens :]),
            text=tracked.detokenizer.text if tracked.detokenizer else "",
            logprobs=tuple(tracked.logprobs) if request.params.logprobs is not None else None,
            finish_reason=request.finish_reason,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            metrics=RequestMetrics(
                arrival_time=tracked.arrival_time,
                first_token_time=tracked.first_token_time,
                last_token_time=tracked.last_token_time,
                token_times=tuple(tracked.token_times) if self.config.record_token_times else None,
            ),
            error=request.error,
        )

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
