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
    kernels = choose_kernels(EngineConfig(device="cpu", use_triton=False), torch.device("cpu"))
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
            draw_weights([WeightShard(shard.name, shard.full_shape, target)], 0, config.dtype)
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


REFERENCE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "use_triton": False,
    "tensor_parallel_size": 1,
}
"""The engine to trust most: one rank in fp32, PyTorch's own operations step by step."""

FEW_BLOCKS = 256
"""KV blocks of the fp32 engines: enough for the prompts; a model may leave no room for more."""


def agreement(setup: Setup) -> dict[str, Any]:
    """One rank against all, on tokens that REFERENCE chooses: teacher-forced logits, everything with the same weights.

    Three things are asked, and "agrees" says whether all hold:
    rounding: in the model's own half precision (bf16 for a model in fp32), all ranks are no farther from REFERENCE than
        one rank is, and the other way round: see RoundingAgreement.
    shards: in fp32, all ranks with the kernels and graphs of every day are nearer to REFERENCE by far: see FP32_SHARE.
        A fault that rounding would hide, such as a norm's weight that is 1% off on one rank, shows here.
    eager: in half precision, all ranks without graphs answer as with them, within TOLERANCES of that dtype.
    one_rank holds the half-precision logits of all ranks against one rank's by the same TOLERANCES, for the record
    alone: two correct models of 64 random layers are farther apart. matching_prefixes are of texts generated freely.

    fp32 weights have to fit one GPU. ValueError where PyTorch has been told to multiply fp32 in TF32.
    """
    import torch

    from engine.config import DTYPES, EngineConfig

    if torch.get_float32_matmul_precision() != "highest":
        raise ValueError(
            "agreement needs fp32 products in fp32, but torch.get_float32_matmul_precision() is "
            f"{torch.get_float32_matmul_precision()!r}; unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
        )
    half = setup.config["dtype"] if setup.config["dtype"] != "float32" else "bfloat16"
    # In that dtype for a checkpoint, so that it is what all weights are rounded to.
    model = setup.config | {"dtype": half}
    device = EngineConfig(device=setup.device).resolve_device()
    reference = forced_answers(setup, model, None, num_kv_blocks=FEW_BLOCKS, **REFERENCE)
    text = reference.tokens
    exact = forced_answers(setup, model, text, num_kv_blocks=FEW_BLOCKS, dtype="float32")
    one = forced_answers(setup, model, text, tensor_parallel_size=1)
    ranks = forced_answers(setup, model, text, and_eagerly=True)
    # To where the device can compare them: on one thread of a CPU that takes minutes.
    return {"dtype": half} | compare_ranks(
        reference.to(device), exact.to(device), one.to(device), ranks.to(device), DTYPES[half]
    )


@dataclass(frozen=True)
class Answers:
    """What an engine makes of the prompts. tokens: chosen greedily, a list a prompt. logits: those before each token of
    the text that was given, [tokens of all prompts, vocab_size] fp32, and eager ones, without graphs, if asked for."""

    tokens: list[list[int]]
    logits: Any
    eager: Any = None

    def to(self, device: Any) -> Answers:
        eager = None if self.eager is None else self.eager.to(device)
        return Answers(self.tokens, self.logits.to(device), eager)


def forced_answers(
    setup: Setup, model: Any, text: list[list[int]] | None, and_eagerly: bool = False, **options: Any
) -> Answers:
    """Of an engine with these options. text: None for what it chooses itself."""
    import torch

    with setup.engine(model, **options) as llm:
        chosen = setup.generate(llm)
        pairs = list(zip(setup.prompts(), text or chosen))
        logits, eager = (
            torch.cat([llm.forced_logits(*pair, eager=eager).cpu() for pair in pairs]) if wanted else None
            for eager, wanted in ((False, True), (True, and_eagerly))
        )
    return Answers(chosen, logits, eager)


def compare_ranks(
    reference: Answers, exact: Answers, one: Answers, ranks: Answers, dtype: Any
) -> dict[str, Any]:
    """The verdicts of `agreement` on all ranks in fp32 (exact), and on one rank and all in half precision."""
    import torch

    from experiments.agreement import (
        TOLERANCES,
        Distance,
        compare_forced,
        compare_rounding,
        fp32_limit,
        matching_prefix,
    )

    text = [token for tokens in reference.tokens for token in tokens]

    def fixed(theirs: Any, ours: Any, dtype: Any) -> dict[str, Any]:
        compared = compare_forced(theirs, ours, text, TOLERANCES[dtype])
        return {"within_tolerance": compared.agrees, "tolerance": asdict(TOLERANCES[dtype])} | asdict(
            compared
        )

    def prefixes(these: Answers, those: Answers) -> dict[str, Any]:
        return {"matching_prefixes": [matching_prefix(a, b) for a, b in zip(these.tokens, those.tokens)]}

    rounding = compare_rounding(reference.logits, one.logits, ranks.logits)
    apart = Distance.between(reference.logits, exact.logits)
    limit = fp32_limit(rounding.one, dtype)
    eager = fixed(ranks.logits, ranks.eager, dtype)
    agrees = {
        "rounding": rounding.agrees,
        "shards": apart.is_within(limit),
        "eager": eager["within_tolerance"],
    }
    return {
        "agrees": all(agrees.values()),
        "agrees_in": agrees,
        "rounding": rounding.as_json(),
        "shards": {"distance": asdict(apart), "limit": asdict(limit)}
        | fixed(reference.logits, exact.logits, torch.float32)
        | prefixes(reference, exact),
        "eager": eager,
        "one_rank": fixed(one.logits, ranks.logits, dtype) | prefixes(one, ranks),
    }


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
    """One of PARTS; its file is OUT/LABEL.json. 1 if it ended early, does not agree or has a row that failed."""
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
    return int(failed or bool(result.get("ended_early")) or result.get("agrees") is False)


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
