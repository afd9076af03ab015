"""What one engine step runs: plain data, so that it can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from engine.scheduling.request import Request


@dataclass(frozen=True)
class SamplingRow:
    """How to choose the next token of one sequence. uniform is its random number, in [0, 1)."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float
    num_logprobs: int | None


@dataclass(frozen=True)
class SequenceRow:
    """One sequence's share of a step: token_ids at positions start, start + 1, ...; sampling is None before the end."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    sampling: SamplingRow | None


@dataclass(frozen=True)
class StepInput:
    """The rows of a step: decodes (one token each, all sampled) come before prefill chunks."""

    decodes: tuple[SequenceRow, ...]
    prefills: tuple[SequenceRow, ...]

    @property
    def rows(self) -> tuple[SequenceRow, ...]:
        return self.decodes + self.prefills


@dataclass(frozen=True)
class SampledToken:
    """A row's next token; token_id is None where the logits were not finite."""

    token_id: int | None
    logprobs: dict[int, float] | None = None


def uniform_draw(seed: int, index: int) -> float:
    """The index-th number of the random stream `seed`, in [0, 1) with 53 bits.

    A keyed counter (as in Salmon et al. 2011, with xxh3 as the mixing function) rather than a generator with state:
    a preempted request neither replays nor skips a draw, and batchmates cannot touch the stream.
    """
    key = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def sequence_row(request: Request, num_tokens: int) -> SequenceRow:
    """The row that runs the next num_tokens tokens of request, sampling if they reach its end."""
    start = request.num_computed_tokens
    end = start + num_tokens
    params = request.params
    sampling = None
    if end == request.num_tokens:
        uniform = uniform_draw(request.seed, request.num_output_tokens) if params.temperature > 0 else 0.0
        sampling = SamplingRow(params.temperature, params.top_k, params.top_p, uniform, params.logprobs)
    return SequenceRow(
        request.request_id, start, tuple(request.token_ids[start:end]), tuple(request.block_table), sampling
    )
