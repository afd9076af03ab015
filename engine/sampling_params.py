"""What a user may ask of the sampling of one request."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.scalars import as_integer, as_number


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    temperature: 0 takes the most likely token (the lowest id on a tie); otherwise logits are divided by it.
    top_k: keep the k most likely tokens, by rank (the lower id first on a tie); -1, 0 or >= the vocabulary: all.
    top_p: after top-k and renormalising, keep the fewest most likely tokens whose probability reaches top_p; the
        token that crosses it stays (nucleus sampling, Holtzman et al. 2019). 1.0: all.
    max_tokens: new tokens at most (cut so that the sequence stays within max_model_len).
    ignore_eos: go on past the model's end-of-sequence ids. The request's own stop_token_ids and stop still end it.
    stop: strings that end the request; the text is cut before the first of them.
    stop_token_ids: ids that end the request; like an end-of-sequence id they stay in token_ids.
    seed: the request's own random stream; the same seed gives the same tokens alone and in any batch. None: a
        stream drawn from the engine's seed and the request's order of arrival.
    logprobs: None, or how many of the most likely tokens to report at each position (0: the chosen one only);
        natural logarithms of the model's own distribution, before temperature, top-k and top-p.

    Numbers may be numpy's; they are kept as Python's. Raises ValueError, naming the field, the value and the limit, for
    anything out of range.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        temperature = as_number("temperature", self.temperature)
        if temperature < 0 or math.isinf(temperature):
            raise ValueError(f"temperature must be >= 0 and finite, got {self.temperature}")
        top_k = as_integer("top_k", self.top_k)
        if top_k < -1:
            raise ValueError(f"top_k must be >= -1 (-1 or 0: off), got {top_k}")
        top_p = as_number("top_p", self.top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        max_tokens = as_integer("max_tokens", self.max_tokens)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        seed = None if self.seed is None else as_integer("seed", self.seed)
        logprobs = None if self.logprobs is None else as_integer("logprobs", self.logprobs)
        if logprobs is not None and logprobs < 0:
            raise ValueError(f"logprobs must be None or >= 0, got {logprobs}")
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must hold non-empty strings, got {stop!r}")
        stop_token_ids = tuple(
            as_integer("stop_token_ids", token) for token in _items("stop_token_ids", self.stop_token_ids)
        )
        numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_tokens": max_tokens}
        others = {"stop": stop, "stop_token_ids": stop_token_ids, "seed": seed, "logprobs": logprobs}
        for name, value in (*numbers.items(), *others.items()):
            object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if an id or a count lies outside a vocabulary of vocab_size tokens."""
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"stop_token_ids holds {token}, outside the vocabulary of {vocab_size}")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise ValueError(f"logprobs is {self.logprobs}, more than the vocabulary of {vocab_size}")


def _items(field: str, value: Iterable[object]) -> tuple[object, ...]:
    if not isinstance(value, Iterable):
        raise ValueError(f"{field} must be a sequence, got {value!r}")
    return tuple(value)
