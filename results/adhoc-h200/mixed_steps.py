"""What a step with prompts in it takes when a CUDA graph holds it, and when its kernels are launched one by one.

    python results/adhoc-h200/mixed_steps.py --model qwen3_0_6b --out mixed_steps-0.6b.json

Two engines of the same dummy weights, one with graph_chunk_tokens 0, in turns: `decodes` requests decode, and with every
step comes a prompt of `tokens`, which asks for one token. A row is the wall time of --steps such steps, a step. One
prompt alone, from add_request to its token, is measured too (decodes 0, "alone": true).
"""

from __future__ import annotations

import argparse
import json
import random
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

WHICH = {"graph": "auto", "launches": 0}


def synchronize(llm: LLM) -> None:
    if llm.runner.device.type == "cuda":
        torch.cuda.synchronize()


def drain(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step_finished()
    synchronize(llm)


def run(llm: LLM, rng: random.Random, decodes: int, tokens: int, steps: int, context: int) -> dict:
    engine, vocab = llm.engine, llm.engine.vocab_size
    running = []
    for _ in range(decodes):
        prompt = [rng.randrange(vocab) for _ in range(context)]
        params = SamplingParams(temperature=0.6, max_tokens=steps + 60, ignore_eos=True)
        running.append(engine.add_request(prompt, params))
    while decodes:
        engine.step_finished()
        if engine.last_step.num_decode_tokens == decodes and not engine.last_step.num_prefill_tokens:
            break
    synchronize(llm)
    one = SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True)
    host, start = 0.0, time.perf_counter()
    for _ in range(steps):
        engine.add_request([rng.randrange(vocab) for _ in range(tokens)], one)
        engine.step_finished()
        host += engine.last_step.host_s
    synchronize(llm)
    wall = time.perf_counter() - start
    for request in running:
        engine.abort(request)
    drain(llm)
    return {"step_ms": 1e3 * wall / steps, "host_ms": 1e3 * host / steps}


def alone(llm: LLM, rng: random.Random, tokens: int, steps: int) -> dict:
    one = SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True)
    taken = []
    for _ in range(steps):
        prompt = [rng.randrange(llm.engine.vocab_size) for _ in range(tokens)]
        start = time.perf_counter()
        llm.engine.add_request(prompt, one)
        drain(llm)
        taken.append(1e3 * (time.perf_counter() - start))
    return {"step_ms": sorted(taken)[len(taken) // 2], "all_ms": taken}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3_0_6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--decodes", type=int, nargs="+", default=[0, 16, 64, 250])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 100, 500, 1000])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new shape after that long")
    options = parser.parse_args()
    config = yaml.safe_load((ROOT / "conf" / "model" / f"{options.model}.yaml").read_text())["config"]
    engines = {
        name: LLM(
            config,
            load_format="dummy",
            skip_tokenizer_init=True,
            device=options.device,
            num_kv_blocks=options.blocks,
            max_model_len=4096,
            enable_prefix_caching=False,
            graph_chunk_tokens=most,
        )
        for name, most in WHICH.items()
    }
    device = engines["graph"].runner.device
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    before = provenance.capture(device, seed=0, overrides=[], device_name=name, cwd=Path.cwd())
    before["command"] = shlex.join(["python", *sys.argv])
    rng, rows, start = random.Random(0), [], time.perf_counter()
    shapes = [(decodes, tokens, False) for tokens in options.tokens for decodes in options.decodes]
    shapes += [(0, tokens, True) for tokens in options.tokens]
    for decodes, tokens, is_alone in shapes:
        if time.perf_counter() - start > options.seconds:
            print("no time for", decodes, tokens)
            continue
        for number in range(-1, options.rounds):  # the first is not counted: it compiles and captures
            for name in rng.sample(sorted(engines), len(engines)):
                llm = engines[name]
                if is_alone:
                    measured = alone(llm, rng, tokens, options.steps)
                else:
                    measured = run(llm, rng, decodes, tokens, options.steps, options.context)
                shape = {"decodes": decodes, "tokens": tokens, "alone": is_alone, "counted": number >= 0}
                rows.append(shape | {"which": name, "round": number} | measured)
        best = {
            name: min(row["step_ms"] for row in rows[-2 * options.rounds :] if row["which"] == name)
            for name in engines
        }
        print(f"{decodes} decodes, {tokens} tokens, alone {is_alone}: {best}", flush=True)
    captures = {
        name: llm.runner.graphs.num_captures if llm.runner.graphs else 0 for name, llm in engines.items()
    }
    for llm in engines.values():
        llm.close()
    after = {"gpu_after": provenance.gpu_state(device), "throttled_after": provenance.is_throttled(device)}
    record = {"options": vars(options) | {"out": str(options.out)}, "num_captures": captures, "rows": rows}
    record["provenance"] = before | after
    options.out.write_text(json.dumps(record, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
