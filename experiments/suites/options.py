"""Checks that the suites' options share. Each returns the value in its final form or raises ValueError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEVELS = ("kernel", "step")
CACHE_STATES = ("cold", "hot")
DTYPES = ("float32", "float16", "bfloat16")


def positive(name: str, value: Any) -> int:
    """An integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"bench.{name} must be an integer >= 1, got {value!r}")
    return value


def positives(name: str, value: Any) -> tuple[int, ...]:
    """One or several integers of at least 1; repeats are dropped."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise ValueError(f"bench.{name} is empty")
    return tuple(dict.fromkeys(positive(name, each) for each in values))


def choices(name: str, value: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    """One or several of the known names; repeats are dropped."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    for each in values:
        if each not in known:
            raise ValueError(f"bench.{name} must be among {', '.join(known)}, got {each!r}")
    if not values:
        raise ValueError(f"bench.{name} is empty")
    return tuple(dict.fromkeys(values))


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"bench.{name} must be true or false, got {value!r}")
    return value


def fraction(name: str, value: Any) -> float:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"bench.{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def rate(name: str, value: Any) -> float:
    """A number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"bench.{name} must be a number above 0, got {value!r}")
    return float(value)


def rates(name: str, value: Any) -> tuple[float, ...]:
    """One or several numbers above 0; repeats are dropped."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise ValueError(f"bench.{name} is empty")
    return tuple(dict.fromkeys(rate(name, each) for each in values))


def sampling(name: str, value: Any) -> dict[str, Any]:
    """temperature, top_k and top_p of every request of a workload; what is left out is greedy and uncut."""
    from engine import SamplingParams

    known = {"temperature": 0.0, "top_k": -1, "top_p": 1.0}
    if not isinstance(value, Mapping):
        raise ValueError(f"bench.{name} must be a mapping of {', '.join(known)}, got {value!r}")
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise ValueError(f"unknown option bench.{name}.{unknown[0]}; known: {', '.join(known)}")
    try:
        params = SamplingParams(**(known | dict(value)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"bench.{name}.{error}") from error
    return {each: getattr(params, each) for each in known}


def heads(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    """Pairs [query heads, KV heads], the former a multiple of the latter."""
    pairs = [value] if value and isinstance(value, list | tuple) and isinstance(value[0], int) else value
    if not isinstance(pairs, list | tuple) or not pairs:
        raise ValueError(f"bench.{name} must be pairs [query heads, KV heads], got {value!r}")
    checked = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"bench.{name} must be pairs [query heads, KV heads], got {pair!r}")
        q_heads, kv_heads = (positive(name, each) for each in pair)
        if q_heads % kv_heads:
            raise ValueError(f"bench.{name}: {q_heads} query heads are not a multiple of {kv_heads} KV heads")
        checked.append((q_heads, kv_heads))
    return tuple(dict.fromkeys(checked))
