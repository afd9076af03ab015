"""Measure the products of small decode batches on this GPU: `python -m experiments.tune_products`.

For each matrix of a layer of each model on so many ranks, and 1 to 16 rows: torch's product (cuBLAS), the Triton
kernels of kernels/linear.py and kernels/dot_linear.py in several tiles, each checked against an fp32 product before
it is timed (cold, interleaved). The fastest goes into the table that kernels/product_choice.py reads, torch's where no
other is at least GAIN faster. Raw rows stay beside it, so that --from can choose again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments import provenance
from experiments.devices import device_name
from experiments.kernel_bench import TOLERANCES, relative_error
from kernels import timing
from kernels.dot_linear import DotTile, dot_linear
from kernels.linear import MAX_ROWS as MAX_FEW_ROWS
from kernels.linear import RowTile, few_rows_linear
from kernels.tuned_tables import table_name

ROWS = (1, 2, 4, 8, 16)
GAIN = 0.01
FEW_TILES = (RowTile(2, 1024, 4), RowTile(4, 512, 4), RowTile(4, 1024, 4), RowTile(8, 512, 4))
DOT_TILES = (DotTile(16, 256, 2, 6), DotTile(16, 512, 2, 4), DotTile(32, 256, 4, 4), DotTile(32, 128, 4, 6))
NARROW = 2048
"""Outputs up to which the plain cores are tried with more than one row."""

Product = Callable[..., Tensor]


@dataclass(frozen=True)
class Sample:
    """One product measured. tile: of "few_rows" and "dot". time_us: median of samples_us (a list a round)."""

    out_features: int
    in_features: int
    rows: int
    kind: str
    tile: tuple[int, ...]
    time_us: float
    samples_us: tuple[tuple[float, ...], ...]


def layer_shapes(model: str, tp: int) -> list[tuple[int, int]]:
    """(out_features, in_features) of one rank's four products in a layer of a model of conf/model."""
    from omegaconf import OmegaConf

    from engine.models.checkpoint import resolve_model
    from experiments.arguments import CONF

    loaded: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{model}.yaml"))
    config = resolve_model(loaded["config"], "dummy").config
    heads = config.heads_per_rank(tp)
    intermediate, hidden, width = config.intermediate_size // tp, config.hidden_size, config.head_dim
    return [
        ((heads.num_q_heads + 2 * heads.num_kv_heads) * width, hidden),
        (hidden, heads.num_q_heads * width),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    ]


def candidates(out_features: int, rows: int) -> Iterator[tuple[str, tuple[int, ...], Product]]:
    """Kind, tile and a function of (x, weight)."""
    yield "torch", (), functional.linear
    if rows == 1 or (rows <= MAX_FEW_ROWS and out_features <= NARROW):
        for few in FEW_TILES if rows == 1 else FEW_TILES[1:2]:
            yield "few_rows", astuple(few), partial(few_rows_linear, bias=None, tile=few)
    for dot in DOT_TILES:
        yield "dot", astuple(dot), partial(dot_linear, tile=dot)


def measure(
    shape: tuple[int, int], rows: Sequence[int], device: torch.device, rounds: int, samples: int
) -> Iterator[Sample]:
    """Every candidate for every number of rows, in bf16, weights from memory."""
    out_features, in_features = shape
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    num_sets = timing.num_input_sets(2 * out_features * in_features, device, "cold")
    weights = [normal(*shape) for _ in range(num_sets)]
    for count in rows:
        inputs = [normal(count, in_features) for _ in weights]
        expected = functional.linear(inputs[0].float(), weights[0].float())
        tiles: dict[str, tuple[str, tuple[int, ...]]] = {}
        calls: dict[str, list[Callable[[], Any]]] = {}
        for kind, tile, product in candidates(out_features, count):
            error = relative_error((product(inputs[0], weights[0]),), (expected,))
            if error > TOLERANCES["bfloat16"]:
                raise RuntimeError(f"{kind} {tile} at {count} x {shape}: relative error {error}")
            name = f"{kind} {tile}"
            tiles[name] = kind, tile
            calls[name] = [partial(product, x, w) for x, w in zip(inputs, weights)]
        found = timing.time_interleaved(
            calls, device=device, cache_state="cold", rounds=rounds, samples=samples
        )
        for name, timings in found.items():
            median = statistics.median(each.median for each in timings)
            raw = tuple(tuple(each.samples_us) for each in timings)
            yield Sample(out_features, in_features, count, *tiles[name], median, raw)


def choose(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The table's entries: the fastest for each shape and number of rows."""
    groups: dict[tuple[int, int, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.out_features, sample.in_features, sample.rows), []).append(sample)
    entries = []
    for (out_features, in_features, rows), group in groups.items():
        torch_us = next(sample.time_us for sample in group if sample.kind == "torch")
        best = min(group, key=lambda sample: sample.time_us)
        kept = best if best.time_us <= (1 - GAIN) * torch_us else None
        entries.append(
            {
                "out_features": out_features,
                "in_features": in_features,
                "rows": rows,
                "kind": kept.kind if kept else "torch",
                "tile": list(kept.tile) if kept else [],
                "time_us": round(kept.time_us if kept else torch_us, 3),
                "torch_us": round(torch_us, 3),
            }
        )
    return entries


def write_table(folder: Path, gpu: str, entries: Sequence[dict[str, Any]], record: dict[str, Any]) -> Path:
    """The file that kernels/product_choice.py reads, an entry a line."""
    lines = ",\n  ".join(json.dumps(entry) for entry in entries)
    file = folder / table_name(gpu)
    file.write_text(
        f'{{"gpu": {json.dumps(gpu)},\n "provenance": {json.dumps(record)},\n "products": [\n  {lines}\n]}}\n'
    )
    return file


def main() -> int:
    """0, or 1 if there is nothing to measure with."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tune_products", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3_0_6b", "qwen3_8b", "qwen3_32b"])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "kernels" / "tuned")
    parser.add_argument(
        "--raw", type=Path, default=Path("outputs/tune_products.jsonl"), help="where raw rows go"
    )
    parser.add_argument("--from", dest="source", type=Path, help="choose from the raw rows of an earlier run")
    parser.add_argument("--gpu", help="with --from: the name of the GPU that they come from")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0, help="no shape is begun after that")
    given = parser.parse_args()
    start = time.monotonic()
    samples: list[Sample] = []
    if given.source:
        if not given.gpu:
            parser.error("--from needs --gpu")
        gpu, record = given.gpu, {"source": str(given.source)}
        for line in given.source.read_text().splitlines():
            row = json.loads(line)
            raw = tuple(map(tuple, row["samples_us"]))
            samples.append(Sample(**row | {"tile": tuple(row["tile"]), "samples_us": raw}))
    else:
        if not torch.cuda.is_available():
            print("tune_products measures on a CUDA device, and there is none", file=sys.stderr)
            return 1
        device = torch.device("cuda", 0)
        gpu = device_name(device)
        record = provenance.capture(device, seed=0, overrides=sys.argv[1:], device_name=gpu, cwd=Path.cwd())
        given.raw.parent.mkdir(parents=True, exist_ok=True)
        shapes = [shape for tp in given.tp for model in given.models for shape in layer_shapes(model, tp)]
        with given.raw.open("w") as file:
            for shape in dict.fromkeys(shapes):
                if time.monotonic() - start > given.seconds:
                    print(f"no time for {shape}")
                    continue
                for sample in measure(shape, given.rows, device, given.rounds, given.samples):
                    samples.append(sample)
                    file.write(json.dumps(asdict(sample)) + "\n")
                torch.cuda.empty_cache()
    entries = choose(samples)
    for entry in entries:
        print(
            f"{entry['rows']:3} x {entry['in_features']:6} -> {entry['out_features']:6}: {entry['kind']:8} "
            f"{entry['tile']!s:18} {entry['time_us']:8.2f} us, torch {entry['torch_us']:8.2f}"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"wrote {write_table(given.out, gpu, entries, record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
