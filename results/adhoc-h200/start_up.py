"""Seconds from nothing to the first token, each in a process of its own: with Triton's cache empty, and again with it full.

    python results/adhoc-h200/start_up.py --model qwen3_8b --out start_up.json

process_s: from the start of the interpreter, imports included. engine_s: LLM(...) alone. first_token_s: LLM(...) and one prompt
of --prompt-len tokens to its first token. decode_s: four more tokens, so the first CUDA graph. Dummy weights of the real shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def once(model: str, device: str, prompt_len: int, started: float) -> dict[str, float]:
    import yaml

    from engine import LLM, SamplingParams

    config = yaml.safe_load((ROOT / "conf" / "model" / f"{model}.yaml").read_text())["config"]
    imported = time.time()
    with LLM(config, load_format="dummy", device=device, skip_tokenizer_init=True) as llm:
        engine = time.time()
        llm.generate([list(range(prompt_len))], SamplingParams(temperature=0.6, max_tokens=1), use_tqdm=False)
        first = time.time()
        llm.generate([list(range(prompt_len))], SamplingParams(temperature=0.6, max_tokens=5, ignore_eos=True), use_tqdm=False)
        last = time.time()
    return {
        "process_s": first - started,
        "import_s": imported - started,
        "engine_s": engine - imported,
        "first_token_s": first - imported,
        "decode_s": last - first,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_8b", help="a file of conf/model/")
    parser.add_argument("--out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--started", type=float, help="for the processes that this one starts")
    options = parser.parse_args()
    if options.started is not None:
        print(json.dumps(once(options.model, options.device, options.prompt_len, options.started)))
        return 0
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty cache", "full cache", "full cache, again"):
            command = [sys.executable, __file__, "--model", options.model, "--device", options.device]
            command += ["--prompt-len", str(options.prompt_len), "--started", str(time.time())]
            done = subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": cache}, check=True, stdout=subprocess.PIPE, text=True)
            results[state] = json.loads(done.stdout.splitlines()[-1])
            print(state, {name: round(value, 2) for name, value in results[state].items()}, flush=True)
    import torch

    from experiments import provenance

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    record = provenance.capture(device, seed=0, overrides=[], device_name=name, cwd=Path.cwd())
    record["command"] = shlex.join(["python", *sys.argv])
    Path(options.out).write_text(json.dumps({"model": options.model, "runs": results, "provenance": record}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
