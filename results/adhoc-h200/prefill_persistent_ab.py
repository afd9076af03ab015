"""prefill_persistent.py's variants against warp_specialized and cuDNN on contiguous KV: right first, then timed.

    PYTHONPATH=. python results/adhoc-h200/prefill_persistent_ab.py OUT.json

Each variant is first tried in a process of its own, which is ended if it hangs.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from prefill_overlap_ab import RAGGED, contiguous, inputs
from prefill_persistent import prefill_persistent

from experiments import provenance
from kernels import prefill
from kernels.timing import time_interleaved

VARIANTS = {
    "persistent": dict(),
    "late queries": dict(early_queries=False),
    "no snake": dict(snake=False),
    "no snake, no zigzag": dict(snake=False, zigzag=False),
    "131 programs": dict(num_programs=131),
}
SHAPES = [(2, 32, 8, 4096, 4096), (16, 32, 8, 1024, 1024), (1, 64, 8, 8192, 8192), (8, 32, 8, 16384, 256), (8, 64, 8, 16384, 256), (64, 32, 8, 256, 256), (1, 32, 8, 4096, 4096), (1, 32, 8, 16384, 16384)]
MORE = [([33, 1, 0, 200], [4133, 1, 50, 260], 40, 8, 16, 128), ([300, 129], [300, 1029], 16, 8, 32, 64), ([257], [257], 32, 8, 256, 128), ([100, 64], [164, 900], 28, 4, 24, 128)]


def error(case, options):
    """Largest difference from the project's kernel, whose own from fp32 its tests bound."""
    wanted = prefill.get("triton")(*case)
    out = prefill_persistent(*case, out=torch.full_like(wanted, float("nan")), **options)
    return (out.float() - wanted.float()).abs().max().item()


def try_alone(name):
    options, worst = VARIANTS[name], 0.0
    for queries, contexts, q_heads, kv_heads, *more in [*RAGGED, *MORE]:
        block_size, head_dim = more or (16, 128)
        found = error(inputs(queries, contexts, q_heads, kv_heads, block_size, head_dim), options)
        print(name, queries, contexts, q_heads, kv_heads, more, found, flush=True)
        worst = found if not found <= worst else worst
    for batch, q_heads, kv_heads, context, queries in SHAPES[:4]:
        case = inputs([queries] * batch, [context] * batch, q_heads, kv_heads)
        found = max(error(case, options) for _ in range(5))
        print(name, batch, q_heads, kv_heads, context, queries, found, flush=True)
        worst = found if not found <= worst else worst
    sys.exit(0 if worst < 0.03 else 1)


def main():
    device, rows = torch.device("cuda"), []
    tries = {name: subprocess.Popen([sys.executable, __file__, "try", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for name in VARIANTS}
    outcome = {}
    for name, process in tries.items():
        try:
            text, _ = process.communicate(timeout=60)
            outcome[name] = [process.returncode, text[-3000:]]
        except subprocess.TimeoutExpired:
            process.kill()
            outcome[name] = ["hangs", process.communicate()[0][-3000:]]
        print(name, *outcome[name], flush=True)
    right = [name for name in VARIANTS if outcome[name][0] == 0]
    before = provenance.capture(device, seed=0, overrides=[], device_name=torch.cuda.get_device_name(), cwd=Path.cwd())
    for batch, q_heads, kv_heads, context, queries in SHAPES:
        case = inputs([queries] * batch, [context] * batch, q_heads, kv_heads)
        calls = {"warp_specialized": [lambda case=case, out=torch.empty_like(case[0]): prefill.get("warp_specialized")(*case, out=out)]}
        for name in right:
            calls[name] = [lambda case=case, name=name, out=torch.empty_like(case[0]): prefill_persistent(*case, out=out, **VARIANTS[name])]
        if queries == context:
            calls["cudnn"] = contiguous(case, q_heads, kv_heads, context, batch)["cudnn"]
        if (batch, q_heads, context) == (2, 32, 4096):  # is the number of copies what limits it?
            wide = inputs([queries] * batch, [context] * batch, q_heads, kv_heads, 128)
            for name in right[:1]:
                calls[f"{name}, blocks of 128"] = [lambda case=wide, name=name, out=torch.empty_like(case[0]): prefill_persistent(*case, out=out, **VARIANTS[name])]
        flops = batch * q_heads * 128 * 4 * (queries * (context - queries) + queries * (queries + 1) / 2)
        print(batch, q_heads, kv_heads, context, queries)
        for name, timings in time_interleaved(calls, device=device, cache_state="hot", rounds=3).items():
            us = sorted(timing.median for timing in timings)[1]
            rows.append([batch, q_heads, kv_heads, context, queries, name, us, flops / us / 1e6])
            print(f"   {name:24s} {us:9.1f} us {flops / us / 1e6:7.1f} TFLOP/s", flush=True)
    record = before | {"gpu_after": provenance.gpu_state(device), "throttled_after": provenance.is_throttled(device)}
    Path(sys.argv[1]).write_text(json.dumps({"tries": outcome, "rows": rows, "provenance": record}, indent=1) + "\n")


if __name__ == "__main__":
    try_alone(sys.argv[2]) if sys.argv[1] == "try" else main()
