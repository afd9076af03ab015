"""The list of "Qwen3-32B, tensor parallel 2, on two GPUs", part by part: `python -m experiments.two_gpus PART ...`.

Each part ends within ten minutes on two H200s. Suites leave their run folders in --out; the other parts one JSON file
each, with the provenance of a run. On a machine without GPUs: --model tiny_qwen3 --device cpu.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.arguments import CONF
from experiments.columns import FAILURES

_MANY = "+suite=high_concurrency bench.rounds=2 bench.num_seqs=[{}] bench.input_len={} bench.output_len={}"
_LONG = "+suite=max_output bench.num_seqs={} bench.input_len={} bench.output_len={}"

# Files of a checkpoint that are written at a time: one alone does not keep a disk busy.
WRITERS = 4

SUITES = {
    # The mission's four, on all ranks.
    "shared_prefix": "+suite=prefix_cache bench.num_seqs=8 bench.input_lens=[16384] bench.unique_lens=[256] "
    "bench.output_len=256 bench.rounds=2 bench.tensor_parallel=[TP]",
    "many": _MANY.format(16, 4096, 256) + " bench.tensor_parallel=[TP]",
    "long_pair": _LONG.format(2, 8192, 4096) + " bench.tensor_parallel=[TP]",
    "longest": _LONG.format(1, 8192, 32768) + " bench.tensor_parallel=[TP]",
    # One rank against all, on the workloads of the marks to beat, and step by step with the share of collectives.
    "one_request": _MANY.format(1, 1024, 512) + " bench.tensor_parallel=[1,TP]",
    "sixteen": _MANY.format(16, 4096, 256) + " bench.tensor_parallel=[1,TP]",
    "pair": _MANY.format(2, 8192, 1024) + " bench.tensor_parallel=[1,TP]",
    "scaling": "+suite=tp_scaling bench.batch_sizes=[1,16] bench.context_lens=[4096] "
    "bench.tensor_parallel=[1,TP] size.rounds=5",
}


@dataclass(frozen=True)
class Setup:
    """What every part works on. out: where results go. scratch: where a checkpoint as large as the model has room."""

    model: str
    device: str
    tp: int
    out: Path
    scratch: Path | None
    num_tokens: int
    all_reduce: str = "auto"

    def label(self, name: str) -> str:
        """Of the folder or file of a suite or part."""
        ending = "" if self.all_reduce == "auto" else f"-{self.all_reduce}"
        return f"{name}-{self.model}-tp{self.tp}{ending}"

    @property
    def config(self) -> dict[str, Any]:
        """The model's fields of config.json."""
        chosen: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{self.model}.yaml"))
        return dict(chosen["config"])

    @contextmanager
    def engine(self, model: Any = None, **options: Any) -> Iterator[Any]:
        """An engine of `tp` ranks with dummy weights, unless told otherwise."""
        from engine import LLM

        arguments: dict[str, Any] = {
            "load_format": "dummy",
            "device": self.device,
            "tensor_parallel_size": self.tp,
            "all_reduce": self.all_reduce,
        }
        arguments |= {"max_model_len": 2048, "max_num_seqs": 16, "skip_tokenizer_init": True}
        with LLM(self.config if model is None else model, **(arguments | options)) as llm:
            yield llm
        gc.collect()

    def prompts(self, count: int = 8, length: int = 100) -> list[list[int]]:
        import random

        rng = random.Random(0)
        return [[rng.randrange(self.config["vocab_size"]) for _ in range(length)] for _ in range(count)]

    def generate(self, llm: Any) -> list[list[int]]:
        """Greedy tokens of the prompts."""
        from engine import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True)
        return [list(output.token_ids) for output in llm.generate(self.prompts(), params, use_tqdm=False)]


# --- a real checkpoint ------------------------------------------------------------------------------------------


def checkpoint(setup: Setup) -> dict[str, Any]:
    """Write the dummy weights as sharded safetensors, load them on all ranks, and compare with the dummy engine."""
    directory = Path(tempfile.mkdtemp(prefix="two-gpus-", dir=setup.scratch))
    try:
        start = time.perf_counter()
        num_bytes = write_dummy_checkpoint(setup, directory)
        written_s = time.perf_counter() - start
        start = time.perf_counter()
        with MemoryWatch() as memory, setup.engine(directory, load_format="auto") as llm:
            started_s = time.perf_counter() - start
            reports = llm.runner.report()
            from_files = setup.generate(llm)
    finally:
        shutil.rmtree(directory)
    with setup.engine() as llm:
        from_dummy = setup.generate(llm)
    return {
        "checkpoint_bytes": num_bytes,
        "write_s": written_s,
        "start_s": started_s,
        "load_s": [report["load_s"] for report in reports],
        "host_peak_bytes": [report["host_peak_bytes"] for report in reports],
        "host_peak_anonymous_bytes": memory.peaks(),
        "one_ranks_share_in_fp32_bytes": num_bytes * 4 // _itemsize(setup) // setup.tp,
        "device_peak_bytes": [report["device_peak_bytes"] for report in reports],
        "tokens_equal_dummy": from_files == from_dummy,
    }


def write_dummy_checkpoint(setup: Setup, directory: Path, file_bytes: int = 4 << 30) -> int:
    """What load_format="dummy" draws on that device, as files of about file_bytes; returns the bytes of all weights."""
    import torch
    from safetensors.torch import save_file

    from engine.config import EngineConfig
    from engine.execution.kernel_choice import choose_kernels
    from engine.execution.loader import draw_weights
    from engine.layers.weight_shard import WeightShard
    from engine.models.checkpoint import resolve_model
    from engine.models.decoder import Decoder
    from engine.parallel.group import ParallelGroup

    device = EngineConfig(device=setup.device).resolve_device()
    config = resolve_model(setup.config, "dummy").config
    kernels = choose_kernels(
        EngineConfig(device="cpu", use_triton=False),
        torch.device("cpu"),
        hidden_size=config.hidden_size,
        dtype=config.dtype,
    )
    shape_only = Decoder(
        config,
        group=ParallelGroup.single(),
        kernels=kernels,
        dtype=config.dtype,
        device=torch.device("meta"),
    )
    pending: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    total = held = 0
    writing: deque[Future[None]] = deque()

    def flush(writers: ThreadPoolExecutor) -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        weight_map.update(dict.fromkeys(pending, name))
        if len(writing) == WRITERS:  # no more files in memory than are being written
            writing.popleft().result()
        writing.append(writers.submit(save_file, dict(pending), directory / name, metadata={"format": "pt"}))
        pending.clear()

    with ThreadPoolExecutor(WRITERS) as writers:
        for shard in shape_only.weight_shards():
            target = torch.empty(shard.full_shape, dtype=config.dtype, device=device)
            draw_weights([WeightShard(shard.name, shard.full_shape, target)], seed=0)
            pending[shard.name] = target.cpu()
            held += target.nbytes
            total += target.nbytes
            if held >= file_bytes:
                flush(writers)
                held = 0
        flush(writers)
        for future in writing:
            future.result()
    (directory / "config.json").write_text(json.dumps(setup.config))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


class MemoryWatch:
    """The most anonymous memory (not backed by files, so not to be dropped) of each child process, sampled."""

    def __init__(self, interval_s: float = 0.1) -> None:
        self._interval_s = interval_s
        self._peaks: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def peaks(self) -> list[int]:
        """Bytes, of each process that was seen."""
        return list(self._peaks.values())

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            for pid in _children():
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue
                fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                now = 1024 * int(fields.get("RssAnon", "0 kB").split()[0])
                self._peaks[pid] = max(now, self._peaks.get(pid, 0))


def _children() -> list[int]:
    found: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        found += map(int, file.read_text().split())
    return found


def _itemsize(setup: Setup) -> int:
    from engine.models.config import DTYPES

    return DTYPES[setup.config["dtype"]].itemsize


# --- the same answers -------------------------------------------------------------------------------------------


def agreement(setup: Setup) -> dict[str, Any]:
    """Graphs against eager on all ranks, and all ranks against one, on the tokens that the graphs chose."""
    from engine.config import EngineConfig
    from engine.models.config import DTYPES
    from experiments.agreement import TOLERANCES, compare_forced, matching_prefix

    def answers(tokens: list[list[int]] | None, **options: Any) -> tuple[list[list[int]], list[Any]]:
        with setup.engine(**options) as llm:
            chosen = setup.generate(llm)
            given = tokens or chosen
            return chosen, [llm.forced_logits(p, t).cpu() for p, t in zip(setup.prompts(), given)]

    device = EngineConfig(device=setup.device).resolve_device()
    tokens, logits = answers(None)
    tolerance = TOLERANCES[DTYPES[setup.config["dtype"]]]
    result: dict[str, Any] = {"dtype": setup.config["dtype"], "tolerance": asdict(tolerance)}
    others: dict[str, dict[str, Any]] = {
        "eager": {"enforce_eager": True},
        "one_rank": {"tensor_parallel_size": 1},
    }
    for name, options in others.items():
        chosen, their_logits = answers(tokens, **options)
        compared = [
            compare_forced(a.to(device), b.to(device), t, tolerance)  # minutes on one thread of a CPU
            for a, b, t in zip(their_logits, logits, tokens)
        ]
        result[name] = {
            "agrees": all(each.agrees for each in compared),
            "matching_prefixes": [matching_prefix(a, b) for a, b in zip(chosen, tokens)],
            "num_tokens": sum(each.num_tokens for each in compared),
            "num_mismatched": sum(each.num_mismatched for each in compared),
            "num_excused": sum(each.num_excused for each in compared),
            "max_logprob_diff": max(each.max_logprob_diff for each in compared),
            "max_logprob_share": max(each.max_logprob_share for each in compared),
            "mean_logprob_diff": sum(each.mean_logprob_diff for each in compared) / len(compared),
            "max_kl": max(each.max_kl for each in compared),
        }
    return result


# --- a lost rank ------------------------------------------------------------------------------------------------


def kill(setup: Setup) -> dict[str, Any]:
    """Kill rank 1 while all decode: the error, how long it took, and what is left."""
    from engine import SamplingParams

    with setup.engine() as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
        for prompt in setup.prompts():
            llm.engine.add_request(prompt, params)
        for _ in range(20):
            llm.engine.step()
        pids = [process.pid for process in llm.runner.ranks]
        os.kill(pids[1], signal.SIGKILL)
        start, error = time.perf_counter(), ""
        try:
            while llm.engine.has_unfinished_requests():
                llm.engine.step()
        except RuntimeError as raised:
            error = str(raised)
        seconds = time.perf_counter() - start
        ended = llm.engine.step()
    return {
        "error": error,
        "seconds": seconds,
        "finish_reasons": sorted({str(output.finish_reason) for output in ended}),
        "tokens_kept": [len(output.token_ids) for output in ended],
        "processes_left": [pid for pid in pids if Path(f"/proc/{pid}").exists()],
    }


# --- the sums of a step -----------------------------------------------------------------------------------------


def all_reduce(setup: Setup) -> dict[str, Any]:
    """NCCL's all-reduces against those over peer memory, whatever the model and --all-reduce."""
    from experiments.all_reduce_bench import measure

    return measure(setup.device, setup.tp)


# --- the command ------------------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[Setup], dict[str, Any]]] = {
    "checkpoint": checkpoint,
    "agreement": agreement,
    "kill": kill,
    "all_reduce": all_reduce,
}


def suite_overrides(setup: Setup, name: str) -> list[str]:
    """What experiments.run is to be told for one of SUITES; the run's folder is OUT/LABEL."""
    overrides = SUITES[name].replace("TP", str(setup.tp)).split()
    overrides += [f"model={setup.model}", f"device={setup.device}", "size=full", "run.isolate=false"]
    if setup.all_reduce != "auto":
        overrides.append(f"engine.all_reduce={setup.all_reduce}")
    return [*overrides, f"run.folder={setup.out / setup.label(name)}"]


def run_suite(setup: Setup, name: str) -> int:
    """One of SUITES in a process of its own."""
    command = [sys.executable, "-m", "experiments.run", *suite_overrides(setup, name)]
    return subprocess.run(command, check=False).returncode


def run_part(setup: Setup, name: str) -> int:
    """One of PARTS; its file is OUT/LABEL.json. 1 if it ended early or has a row that failed."""
    from engine.config import EngineConfig
    from experiments import provenance
    from experiments.devices import device_name

    device = EngineConfig(device=setup.device).resolve_device()
    record = provenance.capture(
        device, seed=0, overrides=sys.argv[1:], device_name=device_name(device), cwd=Path.cwd()
    )
    record["command"] = "python -m experiments.two_gpus " + " ".join(sys.argv[1:])
    setting = {"part": name, "model": setup.model, "tp": setup.tp, "all_reduce": setup.all_reduce}
    result: dict[str, Any] = setting | PARTS[name](setup)
    file = setup.out / f"{setup.label(name)}.json"
    file.write_text(json.dumps({"result": result, "provenance": record}, indent=2))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=2), flush=True)
    failed = any(row["status"] in FAILURES for row in result.get("rows", ()))
    return int(failed or bool(result.get("ended_early")))


def main() -> int:
    """The exit code: that of the worst part."""
    parser = argparse.ArgumentParser(prog="python -m experiments.two_gpus", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, *SUITES])
    parser.add_argument("--model", default="qwen3_32b", help="a name in conf/model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/two_gpus"))
    parser.add_argument(
        "--scratch", type=Path, help="where the checkpoint is written (default: the temporary folder)"
    )
    parser.add_argument("--num-tokens", type=int, default=64, help="of the parts that compare tokens")
    parser.add_argument("--all-reduce", default="auto", help="how ranks sum, as LLM(all_reduce=...)")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    setup = Setup(given.model, given.device, given.tp, out, given.scratch, given.num_tokens, given.all_reduce)
    return max(run_part(setup, name) if name in PARTS else run_suite(setup, name) for name in given.parts)


if __name__ == "__main__":
    sys.exit(main())
