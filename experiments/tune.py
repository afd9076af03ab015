"""Measure decode in splits on this GPU and write the constants that the planner uses: `python -m experiments.tune`.

First every shape of the grid in many numbers of splits, each checked against the reference before it is timed (cold,
interleaved); then the constants of kernels/decode/cost_model.py that fit the times best; last, what the planner chooses
by them against the best that was found: its regret. Raw rows stay beside the table, so that --from can fit again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from experiments import provenance
from experiments.decode_bench import DecodeBench
from experiments.devices import device_name
from experiments.kernel_bench import TOLERANCES, relative_error
from experiments.settings import Variant
from kernels import decode, timing
from kernels.decode import planner, split_kv, split_kv_tma, stream_k_tma
from kernels.decode.cost_model import CostModel, Gpu, SharesModel, Work
from kernels.decode.planned import CLOSE
from kernels.decode.planner import TileShape, device_sm_count, gpu_of, max_partials, work_of
from kernels.tuned_tables import table_name

NUM_KV_HEADS, HEAD_DIM, DTYPE = 8, 128, "bfloat16"
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 49, 57, 64, 80, 99)

RAGGED = tuple(int(128 * 256 ** ((0.5 + 37 * row % 64) / 64)) for row in range(64))
"""Contexts log-uniform from 128 to 32,768, in no order."""

# Batches and contexts by query heads.
_UNIFORM = {
    64: (
        *((1, 4096), (8, 4096), (1, 32768), (16, 4352), (64, 4096), (256, 1024), (1, 131072), (32, 4096)),
        *((2, 1050), (3, 2048), (4, 1024)),
    ),
    16: ((1, 1050), (16, 1050), (64, 1100), (4, 4096), (1, 32768)),
    32: ((2, 8192), (8, 1050), (24, 700), (16, 4096)),
}
# Query heads and contexts, a shape each.
GRID: tuple[tuple[int, tuple[int, ...]], ...] = (
    *((heads, (context,) * batch) for heads, shapes in _UNIFORM.items() for batch, context in shapes),
    *((64, RAGGED), (16, RAGGED[:16])),
)


@dataclass(frozen=True)
class Sample:
    """One measured choice. context_lens: of the rows; unit: keys that its splits are multiples of; time_us: median.

    samples_us: by round. num_stages: where they are not the kernel's own.
    """

    kernel: str
    tile: int
    unit: int
    num_splits: int
    num_q_heads: int
    block_size: int
    context_lens: tuple[int, ...]
    time_us: float
    samples_us: tuple[tuple[float, ...], ...] = ()
    num_stages: int | None = None

    @property
    def shape(self) -> tuple[int, int, tuple[int, ...]]:
        """What is to be computed, whoever does it."""
        return self.num_q_heads, self.block_size, self.context_lens

    @property
    def name(self) -> str:
        """For people."""
        stages = f" of {self.num_stages} stages" if self.num_stages else ""
        return self.kernel if self.kernel in OF_SHARES else f"{self.kernel} x{self.num_splits}{stages}"

    def work(self) -> Work:
        """As the planner sees it."""
        return work_of(self.problem(), self.unit)

    def gpu(self, sm_count: int) -> Gpu:
        """As this kernel finds it."""
        problem = self.problem()
        shape = next(each.shape_of(problem) for each in CONTENDERS if each.kernel == self.kernel)
        if self.num_stages is not None:
            shape = replace(shape, num_stages=self.num_stages)
        return gpu_of(problem, shape, sm_count)

    def problem(self) -> decode.DecodeProblem:
        """For the planner: on no GPU."""
        return _bench(*self.shape, torch.device("cpu")).problem


def _bench(
    num_q_heads: int,
    block_size: int,
    context_lens: tuple[int, ...],
    device: torch.device,
    variants: Sequence[Variant] = (),
) -> DecodeBench:
    return DecodeBench(
        context_lens, num_q_heads, NUM_KV_HEADS, HEAD_DIM, block_size, DTYPE, device, tuple(variants)
    )


# --- measuring --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A kernel in the shape it takes for a problem; unit as in Sample. lighter: with a stage less, in whole rows."""

    kernel: str
    shape_of: Callable[[decode.DecodeProblem], TileShape]
    unit: int | None
    lighter: bool = False

    def num_stages(self, problem: decode.DecodeProblem) -> int | None:
        """As in Sample."""
        return self.shape_of(problem).num_stages - 1 if self.lighter else None

    def splits(self, problem: decode.DecodeProblem) -> list[int]:
        """The numbers to measure: as many splits as a plan may have, a unit each at least."""
        shape = self.shape_of(problem)
        if self.kernel in OF_SHARES:
            return [1]
        if self.lighter:
            return [1] if shape.num_stages > split_kv_tma.LEAST_STAGES else []
        units = -(-problem.max_context_len // (self.unit or shape.tile))
        most = max_partials(problem, shape) // problem.batch_size
        return [n for n in SPLITS if n == 1 or n <= min(units, most)]


# Their time is a SharesModel's.
OF_SHARES = ("stream_k_tma",)

CONTENDERS = (
    Contender("split_kv", split_kv.shape_of, None),
    Contender("split_kv_tma", split_kv_tma.shape_of, split_kv_tma.CHUNK_KEYS),
    Contender("split_kv_tma", split_kv_tma.shape_of, split_kv_tma.CHUNK_KEYS, lighter=True),
    Contender("stream_k_tma", stream_k_tma.shape_of, None),
)


def measure(
    num_q_heads: int, block_size: int, context_lens: tuple[int, ...], device: torch.device
) -> list[Sample]:
    """Every contender in every number of splits, those that are right; raises if one is wrong."""
    problem = _bench(num_q_heads, block_size, context_lens, device).problem
    named: dict[str, tuple[Contender, int]] = {}
    variants = []
    for contender in CONTENDERS:
        if decode.get(contender.kernel).supports(problem) is not None:
            continue
        stages = contender.num_stages(problem)
        for n in contender.splits(problem):
            name = f"{contender.kernel}:{n}" + (f" of {stages} stages" if stages else "")
            named[name] = contender, n
            options = {} if contender.kernel in OF_SHARES else {"num_splits": n}
            options |= {"num_stages": stages} if stages else {}
            variants.append(Variant(name, contender.kernel, options=options))
    times = _time(_bench(num_q_heads, block_size, context_lens, device, variants))
    samples = []
    for name, (contender, n) in named.items():
        tile = contender.shape_of(problem).tile
        samples.append(
            Sample(
                contender.kernel,
                tile,
                contender.unit or tile,
                n,
                num_q_heads,
                block_size,
                context_lens,
                statistics.median(t for taken in times[name] for t in taken),
                times[name],
                contender.num_stages(problem),
            )
        )
    return samples


def _time(bench: DecodeBench) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Cold calls, microseconds, by variant and round."""
    generator = torch.Generator(device=bench.device).manual_seed(0)
    count = timing.num_input_sets(bench.input_bytes, bench.device, "cold")
    inputs = [bench.make_inputs(generator) for _ in range(count)]
    expected = bench.reference(inputs[0])
    calls = {}
    for candidate in bench.candidates():
        bound = [candidate.bind(each).call for each in inputs]
        error = relative_error(bound[0](), expected)
        if not error <= TOLERANCES[DTYPE]:
            raise RuntimeError(f"{candidate.name}: relative error {error:.3g} at {bench.context_lens[:4]}")
        calls[candidate.name] = bound
    found = timing.time_interleaved(calls, device=bench.device, cache_state="cold", rounds=3, samples=4)
    return {name: tuple(t.samples_us for t in rounds) for name, rounds in found.items()}


# --- fitting ----------------------------------------------------------------------------------------------------


Model = CostModel | SharesModel


def fit(samples: Sequence[Sample], sm_count: int, *, steps: int = 6000, seed: int = 0) -> Model:
    """The constants that come nearest to the samples, of one kernel and tile.

    Minimises the mean square of the logarithm of modelled over measured time, plus half the mean regret of choosing
    by the model among what was measured, by a random search whose steps shrink.
    """
    works = [sample.work() for sample in samples]
    gpus = [sample.gpu(sm_count) for sample in samples]
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[sample.shape].append(index)

    def loss(model: Model) -> float:
        modelled = [model.time_us(w, s.num_splits, gpu) for w, gpu, s in zip(works, gpus, samples)]
        errors = statistics.fmean(math.log(m / s.time_us) ** 2 for m, s in zip(modelled, samples))
        regrets = (
            samples[min(group, key=lambda i: modelled[i])].time_us / min(samples[i].time_us for i in group)
            for group in groups.values()
        )
        return errors + 0.5 * (statistics.fmean(regrets) - 1)

    rng = random.Random(seed)
    of_shares = samples[0].kernel in OF_SHARES
    best: Model = SharesModel(3.0, 4.4e6 / sm_count)
    if not of_shares:
        best = CostModel(3.0, 0.03, 30.0, 4.0, 4.4e6 / sm_count, 3.0, 0.01)
    least, width = loss(best), 0.3
    for step in range(1, steps + 1):
        moved = [v * math.exp(rng.gauss(0, width)) if rng.random() < 0.4 else v for v in astuple(best)]
        candidate = SharesModel(*moved) if of_shares else CostModel(*moved)
        found = loss(candidate)
        if found < least:
            best, least = candidate, found
        if step % max(1, steps // 10) == 0:
            width *= 0.75
    rounded = [float(f"{value:.4g}") for value in astuple(best)]
    return SharesModel(*rounded) if of_shares else CostModel(*rounded)


def fit_all(
    samples: Sequence[Sample], sm_count: int, *, steps: int = 6000, tries: int = 4
) -> dict[str, dict[str, Model]]:
    """kernel -> tile -> constants: of several searches those by which the choice among all kernels regrets least."""
    groups: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.kernel, sample.tile].append(sample)
    found = []
    for seed in range(tries):
        models: dict[str, dict[str, Model]] = defaultdict(dict)
        for (kernel, tile), group in sorted(groups.items()):
            models[kernel][str(tile)] = fit(group, sm_count, steps=steps, seed=seed)
        found.append(dict(models))
    return min(
        found, key=lambda each: statistics.fmean(r["regret"] for r in regrets(samples, each, sm_count))
    )


def regrets(
    samples: Sequence[Sample], models: Mapping[str, Mapping[str, Model]], sm_count: int
) -> list[dict[str, Any]]:
    """By shape: what the models choose among everything that was measured there, and how much longer it takes than the
    best."""
    groups: dict[Any, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.shape].append(sample)

    def cost(sample: Sample) -> tuple[float, int]:
        """As kernels/decode/planned.py and split_kv_tma.py choose: of equal times the fewer turns."""
        work, gpu = sample.work(), sample.gpu(sm_count)
        modelled = models[sample.kernel][str(sample.tile)].time_us(work, sample.num_splits, gpu)
        if sample.kernel == "split_kv":
            modelled *= CLOSE
        return modelled, -(-work.programs * sample.num_splits // gpu.slots)

    rows = []
    for (heads, block_size, lens), group in groups.items():
        ragged = planner.is_ragged(group[0].problem())
        chosen = min(
            (s for s in group if ragged or s.kernel not in OF_SHARES),  # as PlannedDecode chooses
            key=cost,
        )
        best = min(group, key=lambda s: s.time_us)
        rows.append(
            {
                "num_q_heads": heads,
                "block_size": block_size,
                "batch_size": len(lens),
                "max_context_len": max(lens),
                "mean_context_len": sum(lens) // len(lens),
                "chosen": chosen.name,
                "best": best.name,
                "chosen_us": chosen.time_us,
                "best_us": best.time_us,
                "regret": chosen.time_us / best.time_us - 1,
            }
        )
    return rows


# --- the command ------------------------------------------------------------------------------------------------


def write_table(
    folder: Path,
    gpu: str,
    models: Mapping[str, Mapping[str, Model]],
    found: Sequence[Mapping[str, Any]],
    record: Mapping[str, Any],
) -> Path:
    """The table that kernels/decode/cost_model.py reads."""
    values = [row["regret"] for row in found]
    table = {
        "gpu": gpu,
        "regret": {"shapes": len(values), "median": statistics.median(values), "worst": max(values)},
        "models": {k: {t: asdict(m) for t, m in tiles.items()} for k, tiles in models.items()},
        "provenance": record,
    }
    file = folder / table_name(gpu)
    file.write_text(json.dumps(table, indent=2) + "\n")
    return file


def read_samples(file: Path) -> list[Sample]:
    """Raw rows of an earlier run."""
    samples = []
    for line in file.read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        row["context_lens"] = tuple(row["context_lens"])
        row["samples_us"] = tuple(map(tuple, row.get("samples_us", ())))
        samples.append(
            Sample(**{field.name: row[field.name] for field in fields(Sample) if field.name in row})
        )
    return samples


def main() -> int:
    """0, or 1 if there is nothing to measure with."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tune", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "kernels" / "decode" / "tuned"
    )
    parser.add_argument("--raw", type=Path, default=Path("outputs/tune.jsonl"), help="where raw rows go")
    parser.add_argument("--from", dest="source", type=Path, help="fit the raw rows of an earlier run")
    parser.add_argument("--gpu", help="with --from: the name of the GPU that they come from")
    parser.add_argument("--sm-count", type=int, help="with --from: its multiprocessors")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--steps", type=int, default=6000, help="of each search for constants")
    parser.add_argument("--seconds", type=float, default=600.0, help="no shape is begun after that")
    given = parser.parse_args()
    start = time.monotonic()
    if given.source:
        if not given.gpu or not given.sm_count:
            parser.error("--from needs --gpu and --sm-count")
        samples, gpu, sm_count = read_samples(given.source), given.gpu, given.sm_count
        record: dict[str, Any] = {"source": str(given.source)}
    else:
        if not torch.cuda.is_available():
            print("tune measures on a CUDA device, and there is none", file=sys.stderr)
            return 1
        device = torch.device("cuda", 0)
        gpu, sm_count = device_name(device), device_sm_count(device)
        record = provenance.capture(device, seed=0, overrides=sys.argv[1:], device_name=gpu, cwd=Path.cwd())
        samples = []
        given.raw.parent.mkdir(parents=True, exist_ok=True)
        with given.raw.open("w") as raw:
            for block_size in given.block_sizes:
                for num_q_heads, lens in GRID:
                    if time.monotonic() - start > given.seconds:
                        print(f"no time for block size {block_size}, {num_q_heads} heads, {lens[:2]}...")
                        continue
                    for sample in measure(num_q_heads, block_size, lens, device):
                        samples.append(sample)
                        raw.write(json.dumps(asdict(sample)) + "\n")
                    raw.flush()
    models = fit_all(samples, sm_count, steps=given.steps)
    found = regrets(samples, models, sm_count)
    for row in found:
        print(
            f"{row['num_q_heads']:3} heads, blocks of {row['block_size']:3}, {row['batch_size']:3} x "
            f"{row['max_context_len']:6}: {row['chosen']:18} {row['chosen_us']:8.1f} us, best {row['best']:18} "
            f"{row['best_us']:8.1f} us, regret {100 * row['regret']:.1f}%"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"wrote {write_table(given.out, gpu, models, found, record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
