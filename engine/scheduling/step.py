"""What one engine step runs: plain data that says only what changed, so that it is cheap to send to another process.

Whoever executes steps keeps, for every slot (a place for one running sequence): its block table, how many of its tokens
have their KV written, its newest token, and how it is sampled. A decode row is then named by its slot alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.scheduler import Schedule


@dataclass(frozen=True)
class SlotSetting:
    """A new sequence takes over a slot: how its tokens are chosen. seed: its random stream, any 64-bit integer."""

    slot: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    num_logprobs: int | None


@dataclass(frozen=True)
class NewBlocks:
    """Entries first_block, first_block + 1, ... of a slot's block table."""

    slot: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens at positions start, start + 1, ... of a slot's sequence; samples: a new token follows them."""

    slot: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool


@dataclass(frozen=True)
class StepInput:
    """The changes to apply, then the work: one token of each decode slot, and the chunks.

    decode_slots run their newest token and sample the next. max_decode_context, mean_decode_context: the longest
    context among them and their mean, in tokens, the new one included. The step's result holds one token for each
    decode slot, then one for each chunk that samples.
    """

    settings: tuple[SlotSetting, ...]
    new_blocks: tuple[NewBlocks, ...]
    decode_slots: tuple[int, ...]
    max_decode_context: int
    mean_decode_context: int
    chunks: tuple[Chunk, ...]

    @property
    def sampled_slots(self) -> tuple[int, ...]:
        """The slots that get a token, in the order of the result."""
        return (*self.decode_slots, *(chunk.slot for chunk in self.chunks if chunk.samples))


@dataclass(frozen=True)
class SampledToken:
    """A row's next token; token_id is None where the logits were not finite. logprobs: natural logarithms by id."""

    token_id: int | None
    logprobs: dict[int, float] | None = None


def build_step(schedule: Schedule) -> StepInput:
    """Put a schedule into what an executor needs to be told, given what earlier steps told it."""
    settings = []
    for request in schedule.admitted:
        params = request.params
        settings.append(
            SlotSetting(
                request.slot, params.temperature, params.top_k, params.top_p, request.seed, params.logprobs
            )
        )
    new_blocks = []
    for scheduled in schedule.requests:
        request = scheduled.request
        if len(request.block_table) > request.num_blocks_sent:
            block_ids = tuple(request.block_table[request.num_blocks_sent :])
            new_blocks.append(NewBlocks(request.slot, request.num_blocks_sent, block_ids))
            request.num_blocks_sent = len(request.block_table)
    contexts = [scheduled.end for scheduled in schedule.decodes]
    return StepInput(
        settings=tuple(settings),
        new_blocks=tuple(new_blocks),
        decode_slots=tuple([scheduled.request.slot for scheduled in schedule.decodes]),
        max_decode_context=max(contexts, default=0),
        mean_decode_context=sum(contexts) // len(contexts) if contexts else 0,
        chunks=tuple(
            Chunk(s.request.slot, s.start, tuple(s.request.token_ids[s.start : s.end]), s.samples)
            for s in schedule.prefills
        ),
    )
