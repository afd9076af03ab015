"""Decode attention kernels alone, over head counts, block sizes, dtypes, batches and contexts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.records import Row
from experiments.settings import Settings
from experiments.suites import options
from experiments.suites.protocol import Point, PointContext, Suite

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


KV_DTYPES = ("auto", "float8_e4m3fn")


@dataclass(frozen=True)
class DecodeKernelOptions:
    """See conf/suite/decode_kernel.yaml."""

    heads: Any
    head_dims: Any
    block_sizes: Any
    dtypes: Any
    batch_sizes: Any
    context_lens: Any
    ragged: bool
    contiguous: bool
    shared_prefix: float
    kv_dtype: str
    cache_states: Any
    max_interpreted_tokens: int

    def __post_init__(self) -> None:
        for name in ("head_dims", "block_sizes", "batch_sizes", "context_lens"):
            object.__setattr__(self, name, options.positives(name, getattr(self, name)))
        object.__setattr__(self, "heads", options.heads("heads", self.heads))
        object.__setattr__(self, "dtypes", options.choices("dtypes", self.dtypes, options.DTYPES))
        states = options.choices("cache_states", self.cache_states, options.CACHE_STATES)
        object.__setattr__(self, "cache_states", states)
        options.flag("ragged", self.ragged)
        options.flag("contiguous", self.contiguous)
        options.fraction("shared_prefix", self.shared_prefix)
        if not isinstance(self.kv_dtype, str):
            raise ValueError(f"bench.kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}")
        options.choices("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.contiguous and (self.ragged or self.shared_prefix):
            raise ValueError("bench.contiguous excludes bench.ragged and bench.shared_prefix")
        options.positive("max_interpreted_tokens", self.max_interpreted_tokens)


class DecodeKernel(Suite):
    name = "decode_kernel"
    options = DecodeKernelOptions
    columns: Mapping[str, str] = {"kv_dtype": "string"}  # of the caches, where it is not dtype

    def points(self, settings: Settings) -> list[Point]:
        chosen = self.parse_options(settings)
        axes = (chosen.dtypes, chosen.heads, chosen.head_dims, chosen.block_sizes, chosen.batch_sizes)
        return [
            kernel_point(
                settings,
                suite=self.name,
                tp=1,
                dtype=dtype,
                num_q_heads=q_heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                batch_size=batch_size,
                context_len=context_len,
                ragged=chosen.ragged,
                contiguous=chosen.contiguous,
                shared_prefix=chosen.shared_prefix,
                kv_dtype=None if chosen.kv_dtype == "auto" else chosen.kv_dtype,
            )
            for dtype, (
                q_heads,
                kv_heads,
            ), head_dim, block_size, batch_size, context_len in itertools.product(*axes, chosen.context_lens)
        ]

    def run(self, point: Point, context: PointContext) -> list[Row]:
        chosen = self.parse_options(context.settings)
        return measure_decode(point, context, chosen.cache_states, chosen.max_interpreted_tokens)

    def blank_rows(self, point: Point) -> list[dict[str, Any]]:
        return variant_columns(point)

    def dtypes(self, settings: Settings) -> tuple[str, ...]:
        return self.parse_options(settings).dtypes

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.decode_figures import kernel_figures

        return kernel_figures(rows)


def kernel_point(
    settings: Settings,
    *,
    suite: str,
    ragged: bool = False,
    contiguous: bool = False,
    shared_prefix: float = 0.0,
    kv_dtype: str | None = None,
    unsupported: str | None = None,
    **columns: Any,
) -> Point:
    """A comparison of decode kernels at one shape; its identity holds all that its rows depend on."""
    if any(variant.decode == "auto" for variant in settings.variants):
        raise ValueError("attention=engine_auto names no kernel; kernel-level comparisons need one each")
    params = columns | {
        "level": "kernel",
        "ragged": ragged,
        "contiguous": contiguous,
        "shared_prefix": shared_prefix,
        "variants": [[v.name, v.decode, dict(v.options)] for v in settings.variants],
        "rounds": settings.size.rounds,
        "samples": settings.size.samples,
        "seed": settings.seed,
    }
    if kv_dtype is not None:
        params["kv_dtype"] = kv_dtype
    return Point(suite, params, unsupported=unsupported)


def rank_kernel_point(settings: Settings, *, suite: str, tp: int, batch_size: int, context_len: int) -> Point:
    """A kernel_point with the heads that one of `tp` ranks has of the run's model."""
    from experiments.backends.engine import EngineSetup, division_refusal, model_columns

    setup = EngineSetup(settings, settings.variants[0], tp)
    return kernel_point(
        settings,
        suite=suite,
        batch_size=batch_size,
        context_len=context_len,
        unsupported=division_refusal(setup.model_config, tp),
        **model_columns(settings, setup.model_config, setup.dtype_name, tp),
    )


def variant_columns(point: Point) -> list[dict[str, Any]]:
    """The columns of each variant that a kernel point compares."""
    return [{"variant": name, "decode_attention": decode} for name, decode, _ in point.params["variants"]]


def measure_decode(
    point: Point, context: PointContext, cache_states: tuple[str, ...], max_interpreted_tokens: int
) -> list[Row]:
    """Check and time the decode kernels of a kernel point."""
    from experiments.decode_bench import DecodeBench
    from experiments.kernel_bench import measure

    params = point.params
    lens = [params["context_len"]] * params["batch_size"]
    if params["ragged"]:
        rng = random.Random(context.seed(point))
        lens = [rng.randint((length + 1) // 2, length) for length in lens]
    # In whole blocks, and none of it in the last block of any row, which the row writes to.
    shared_blocks = int(params["shared_prefix"] * (min(lens) - 1)) // params["block_size"]
    bench = DecodeBench(
        contiguous=params["contiguous"],
        shared_prefix_len=shared_blocks * params["block_size"],
        context_lens=tuple(lens),
        num_q_heads=params["num_q_heads"],
        num_kv_heads=params["num_kv_heads"],
        head_dim=params["head_dim"],
        block_size=params["block_size"],
        dtype=params["dtype"],
        kv_dtype=params.get("kv_dtype"),
        device=context.device,
        variants=context.settings.variants,
    )
    return measure(
        bench, point, context, cache_states=cache_states, max_interpreted_size=max_interpreted_tokens
    )


SUITE = DecodeKernel()
