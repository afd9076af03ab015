"""What a capture of a step with prompts takes, and where: engine of dummy weights, one graph after another, under cProfile.

    python results/adhoc-h200/capture_time.py --model qwen3_0_6b --out capture_time.json
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import shlex
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import yaml

from engine import LLM, SamplingParams
from experiments import provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3_0_6b")
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    device = torch.device(options.device)
    record = provenance.capture(device, seed=0, overrides=[], device_name=torch.cuda.get_device_name(), cwd=Path.cwd())
    record["command"] = shlex.join(["python", *sys.argv])
    model = yaml.safe_load((ROOT / "conf" / "model" / f"{options.model}.yaml").read_text())["config"]
    rows = []
    with LLM(model, load_format="dummy", skip_tokenizer_init=True, device=options.device, max_model_len=4096) as llm:
        graphs, capture = llm.runner.graphs, llm.runner.graphs._capture

        def timed(size, kind, plan):
            torch.cuda.synchronize()
            start = time.perf_counter()
            found = capture(size, kind, plan)
            torch.cuda.synchronize()
            rows.append([str(size), 1e3 * (time.perf_counter() - start)])
            print(*rows[-1], flush=True)
            return found

        graphs._capture = timed
        llm.runner.capture_at_once(True)
        rng = torch.Generator().manual_seed(0)

        def prompt(n: int) -> list[int]:
            return torch.randint(0, llm.engine.vocab_size, (n,), generator=rng).tolist()

        def mixed(tokens: int) -> None:
            llm.engine.add_request(prompt(tokens), SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True))
            llm.engine.step_finished()

        for _ in range(6):
            llm.engine.add_request(prompt(50), SamplingParams(temperature=0.6, max_tokens=200, ignore_eos=True))
        for n in (30, 100, 400):
            mixed(n)
        profiler = cProfile.Profile()
        profiler.enable()
        for n in (60, 90, 120, 180, 500, 700, 1000, 1200, 1500, 1700):
            mixed(n)
        profiler.disable()
    text = io.StringIO()
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler, stream=text).sort_stats(order).print_stats(45)
    Path(options.out).write_text(json.dumps({"rows": rows, "profile": text.getvalue(), "provenance": record}, indent=1) + "\n")
    print(text.getvalue())


if __name__ == "__main__":
    main()
