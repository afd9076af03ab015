"""Rotary embedding settings: where config.json keeps them, and the frequencies they mean.

Follows Transformers' formulas, in fp32 throughout as it does: default (Su et al., 2021), linear position
interpolation, llama3 (Llama 3.1's wavelength-dependent scaling) and yarn (Peng et al., 2023). Other types are
refused by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What each type needs besides rope_theta."""

_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


@dataclass(frozen=True)
class RopeConfig:
    """One model's rotary embedding. Fields beyond rope_type and rope_theta are those of the type, else None.

    factor: how many times the original context is stretched. original_max_position_embeddings: positions of the
    original context. low_freq_factor, high_freq_factor (llama3): original context over the wavelength above which
    frequencies are scaled in full, and below which not at all. beta_fast, beta_slow (yarn): the same bounds in
    rotations over the original context. attention_factor (yarn): multiplies cos and sin.
    """

    rope_type: str
    rope_theta: float
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rope_type, str) or self.rope_type not in _REQUIRED:
            raise ValueError(f"rope_type {self.rope_type!r} is not supported; known: {', '.join(_REQUIRED)}")
        required = _REQUIRED[self.rope_type]
        allowed = {"rope_type", "rope_theta", *required, *_OPTIONAL.get(self.rope_type, ())}
        for name, value in vars(self).items():
            if value is None:
                if name in required:
                    raise ValueError(f"rope_type {self.rope_type!r} needs {name}, which is missing")
                continue
            if name not in allowed:
                raise ValueError(f"{name} is {value!r}, but rope_type {self.rope_type!r} does not use it")
            if name == "truncate":
                if not isinstance(value, bool):
                    raise ValueError(f"truncate must be true or false, got {value!r}")
            elif name != "rope_type" and not (_is_number(value) and 0 < value <= sys.float_info.max):
                raise ValueError(f"{name} must be a number > 0, got {value!r}")
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta must be > 1, got {self.rope_theta}")
        if self.rope_type != "default" and self.factor is not None and self.factor < 1:
            raise ValueError(f"factor must be >= 1, got {self.factor}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low_freq_factor is {low}, it must be below high_freq_factor {high}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read config.json's fields, in the old place (rope_theta, rope_scaling) and the new (rope_parameters).

        A setting found in more than one place must have one value. rope_theta is never guessed.
        """
        places: list[tuple[str, Mapping[str, Any]]] = []
        for name in ("rope_parameters", "rope_scaling"):
            settings = config.get(name)
            if settings is None:
                continue
            if not isinstance(settings, Mapping):
                raise ValueError(f"{name} must be a mapping, got {settings!r}")
            places.append((name, settings))
        top_level = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        found: dict[str, tuple[str, Any]] = {}
        for place, settings in [*places, ("config.json", {k: config[k] for k in top_level if k in config})]:
            for key, value in settings.items():
                name = "rope_type" if key == "type" else key
                if value is None:
                    continue
                if name in found and found[name][1] != value:
                    raise ValueError(
                        f"{name} is {found[name][1]!r} in {found[name][0]} but {value!r} in {place}"
                    )
                found[name] = (place, value)
        values = {name: value for name, (_, value) in found.items()}
        if values.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"partial_rotary_factor is {found['partial_rotary_factor'][1]!r}; only 1.0 is supported"
            )
        if "rope_theta" not in values:
            raise ValueError("rope_theta is missing: neither in config.json nor in its rope_parameters")
        rope_type = values.setdefault("rope_type", "default")
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"unknown rotary settings for rope_type {rope_type!r}: {sorted(unknown)}")
        if rope_type in ("llama3", "yarn"):  # as Transformers does
            values.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        return cls(**values)

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """[head_dim / 2] fp32 on the CPU: radians a position, from the fastest pair of dimensions to the slowest."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        inv_freq = 1.0 / (self.rope_theta**exponents)
        if self.rope_type == "linear":
            return inv_freq / self._given("factor")
        if self.rope_type == "llama3":
            return self._llama3(inv_freq)
        if self.rope_type == "yarn":
            return self._yarn(exponents, head_dim)
        return inv_freq

    @property
    def cos_sin_scale(self) -> float:
        """What cos and sin are multiplied by: yarn's attention factor, else 1."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        factor = self._given("factor")
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def _given(self, name: str) -> float:
        """A setting that __post_init__ has made sure of."""
        value = getattr(self, name)
        assert value is not None, name
        return value

    def _llama3(self, inv_freq: Tensor) -> Tensor:
        """Slow pairs are divided by factor, fast ones kept, those between blended."""
        context, factor = self._given("original_max_position_embeddings"), self._given("factor")
        low, high = self._given("low_freq_factor"), self._given("high_freq_factor")
        wavelength = 2 * math.pi / inv_freq
        smooth = (context / wavelength - low) / (high - low)
        blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
        scaled = torch.where(wavelength > context / low, inv_freq / factor, blended)
        return torch.where(wavelength < context / high, inv_freq, scaled)

    def _yarn(self, exponents: Tensor, head_dim: int) -> Tensor:
        """Pairs that turn often over the original context keep their frequency, slow ones are divided by factor."""
        context, factor = self._given("original_max_position_embeddings"), self._given("factor")

        def pair_with_rotations(rotations: float) -> float:
            turns = context / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.rope_theta))

        low = pair_with_rotations(self.beta_fast or 32)
        high = pair_with_rotations(self.beta_slow or 1)
        if self.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(
            0, 1
        )
        keep = 1 - ramp
        period = self.rope_theta**exponents
        return (1.0 / (factor * period)) * (1 - keep) + (1.0 / period) * keep


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
