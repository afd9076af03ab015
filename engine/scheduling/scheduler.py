"""Which requests run in a step, and how many tokens of each."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.request import Request

Policy = Literal["mixed", "prefill_first"]


@dataclass(frozen=True)
class ScheduledRequest:
    """Tokens start .. end - 1 of a request; samples: they reach its end, so a new token follows."""

    request: Request
    start: int
    end: int
    samples: bool


@dataclass
class Schedule:
    """The requests of one step; decodes run one token each, prefills a chunk of a prompt or a resumed sequence."""

    decodes: list[ScheduledRequest] = field(default_factory=list)
    prefills: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Of the admitted: tokens that the prefix cache saves them."""

    @property
    def requests(self) -> list[ScheduledRequest]:
        return self.decodes + self.prefills


class Scheduler:
    """Request-level continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi, Agrawal et al. 2023).

    Priority is the order of arrival. A request is admitted only when its whole sequence fits in free blocks, and
    then holds them all; a decoding request takes blocks as it grows, and when none is free the latest arrival among
    the running is preempted: it loses its blocks and starts over later (its published blocks usually serve it again).
    The earliest request is thus never preempted for another, always moves on, and no two can evict each other in turns.

    policy "mixed": every step holds all decodes, then as much prefill as the token budget allows.
    policy "prefill_first": a step is all prefill while any is possible, else all decode.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool,
        policy: Policy,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = policy
        # Both in order of arrival, and all of running before all of waiting: requests are admitted from the head of
        # waiting, and preempted from the tail of running back to it. Keys of dicts, so that a request leaves from
        # anywhere at the same cost however many there are.
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.running: dict[Request, None] = {}
        self._free_slots = list(reversed(range(max_num_seqs)))

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def check_feasible(self, request: Request) -> None:
        """Raise ValueError if request could never run, however long it waited."""
        needed = self.block_manager.blocks_for(request.max_kv_tokens)
        if needed > self.block_manager.num_blocks:
            raise ValueError(
                f"request {request.request_id}: a prompt of {request.num_prompt_tokens} tokens growing to "
                f"{request.max_total_tokens} needs {needed} KV blocks of {self.block_manager.block_size}, "
                f"the pool has {self.block_manager.num_blocks} (num_kv_blocks)"
            )
        if not self.enable_chunked_prefill and request.num_prompt_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"request {request.request_id}: the prompt has {request.num_prompt_tokens} tokens, more than "
                f"max_num_batched_tokens={self.max_num_batched_tokens}, and enable_chunked_prefill is False"
            )

    def add(self, request: Request) -> None:
        self.waiting[request] = None

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks."""
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.pop(request, None)

    def restart_running(self) -> int:
        """Forget the steps under way: every running request goes back to waiting, and no token is pending.

        Returns how many have been preempted by that.
        """
        restarted = Schedule()
        for request in reversed(list(self.running)):
            self._preempt(request, restarted)
        for request in self.waiting:
            request.num_pending_tokens = 0
        return len(restarted.preempted)

    def schedule(self) -> Schedule:
        """Choose the next step's work, give it its blocks, and count its tokens as computed: the step must be run.

        The schedule may be empty while every running request only waits for its pending token. Raises RuntimeError if
        nothing can move and nothing is pending: that would be a fault of the scheduler, and waiting for ever is no
        answer.
        """
        schedule = Schedule()
        if self.policy == "prefill_first":
            self._schedule_prefills(schedule)
            if not schedule.prefills:
                self._schedule_decodes(schedule)
        else:
            self._schedule_decodes(schedule)
            self._schedule_prefills(schedule)
        stuck = self.has_requests and not schedule.requests
        if stuck and not any(request.num_pending_tokens for request in self.running):
            raise RuntimeError(
                f"nothing can be scheduled: {len(self.running)} running, {len(self.waiting)} waiting, "
                f"{self.block_manager.num_free_blocks} of {self.block_manager.num_blocks} blocks free"
            )
        return schedule

    def publish(self, scheduled: ScheduledRequest) -> None:
        """Make what a finished step wrote findable; nothing if the request has lost its blocks meanwhile."""
        if scheduled.request.block_table:
            self.block_manager.publish(scheduled.request, scheduled.end)

    # --- the two kinds of work ------------------------------------------------------------------------------

    def _schedule_decodes(self, schedule: Schedule) -> None:
        ready = [request for request in self.running if request.is_decoding and not request.is_complete]
        for request in ready[: self.max_num_batched_tokens]:
            if request.is_decoding and self._grow_or_preempt(request, schedule):
                schedule.decodes.append(self._run(request, 1))

    def _run(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        samples = request.num_uncomputed_tokens == 0
        if samples:
            request.num_pending_tokens += 1
            request.is_decoding = True
        return ScheduledRequest(request, start, start + num_tokens, samples)

    def _grow_or_preempt(self, request: Request, schedule: Schedule) -> bool:
        """Make room for one more token, preempting the latest arrivals; False if that took request itself.

        Decodes are scheduled in order of arrival, so a victim is never one that this step already runs.
        """
        while not self.block_manager.grow(request, request.num_computed_tokens + 1):
            victim = next(reversed(self.running))
            self._preempt(victim, schedule)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, schedule: Schedule) -> None:
        self._leave(request)
        request.num_preemptions += 1
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)  # latest first: the queue stays in order of arrival
        schedule.preempted.append(request)

    def _leave(self, request: Request) -> None:
        """Take a request out of running: its slot and blocks are free, and none of its KV counts as written."""
        del self.running[request]
        self.block_manager.free(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.num_computed_tokens = request.num_blocks_sent = 0
        request.is_decoding = False

    def _schedule_prefills(self, schedule: Schedule) -> None:
        budget = self.max_num_batched_tokens - len(schedule.decodes)
        for request in self.running:
            if budget and not request.is_decoding:
                budget -= self._schedule_chunk(request, budget, schedule)
        if schedule.preempted:
            # Its last step may still be under way: until that is collected its newest token is unknown, and what
            # that step wrote went to the blocks that it has lost.
            return
        while self.waiting and budget and self._free_slots:
            request = next(iter(self.waiting))
            prefix = self.block_manager.find_prefix(request)
            # One spare block for each running request, or the newcomer would soon be preempted by their growth.
            if not self.block_manager.can_admit(request, prefix, spare=len(self.running)):
                break
            num_uncached = request.num_tokens - len(prefix) * self.block_manager.block_size
            if num_uncached > budget and not self._may_chunk(request):
                break
            del self.waiting[request]
            self.block_manager.admit(request, prefix)
            request.slot = self._free_slots.pop()
            if request.num_preemptions == 0:
                request.num_cached_tokens = request.num_computed_tokens
            self.running[request] = None
            schedule.admitted.append(request)
            schedule.num_cached_tokens += request.num_computed_tokens
            budget -= self._schedule_chunk(request, budget, schedule)

    def _may_chunk(self, request: Request) -> bool:
        # A resumed sequence may have outgrown the budget, so it is chunked even where prompts are not.
        return self.enable_chunked_prefill or request.num_tokens > self.max_num_batched_tokens

    def _schedule_chunk(self, request: Request, budget: int, schedule: Schedule) -> int:
        num_tokens = min(request.num_uncomputed_tokens, budget)
        schedule.prefills.append(self._run(request, num_tokens))
        return num_tokens
