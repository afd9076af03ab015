"""Decode attention at the shapes of the marks, paged variants and contiguous SDPA interleaved, cold.

python results/adhoc-h200/decode_marks.py OUT_FOLDER SECONDS: a table on the terminal, raw samples in decode_marks.jsonl.
"""
import json, statistics, sys, time
from pathlib import Path
import torch
from experiments import provenance
from experiments.decode_bench import DecodeBench
from experiments.devices import device_name
from experiments.kernel_bench import TOLERANCES, relative_error
from experiments.settings import Variant
from kernels import ceilings, timing

SHAPES = [(1, 4096), (1, 32768), (1, 131072), (8, 4096), (16, 4352), (64, 4096), (128, 8192), (256, 1024)]
AIMS = {(1, 4096): 8, (1, 32768): 38, (1, 131072): 127, (8, 4096): 37, (16, 4352): 67, (64, 4096): 245, (128, 8192): 960, (256, 1024): 247}
RAGGED = tuple(int(128 * 256 ** ((0.5 + 37 * row % 64) / 64)) for row in range(64))
PAGED = ("planned", "split_kv", "split_kv_tma", "split_kv_fused", "fixed_split", "stream_k", "stream_k_tma", "flashinfer")
start, out, limit = time.time(), Path(sys.argv[1]), float(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)
device = torch.device("cuda", 0)


def bound(heads, block_size, lens, names, contiguous=False):
    bench = DecodeBench(lens, heads, 8, 128, block_size, "bfloat16", device, [Variant(n, n) for n in names], contiguous=contiguous)
    generator = torch.Generator(device=device).manual_seed(0)
    sets = [bench.make_inputs(generator) for _ in range(timing.num_input_sets(bench.input_bytes, device, "cold"))]
    expected = bench.reference(sets[0])
    calls, plans = {}, {}
    for candidate in bench.candidates():
        if candidate.unsupported:
            print("   ", candidate.name, candidate.unsupported); continue
        try:
            made = [candidate.bind(each).call for each in sets]
            error = relative_error(made[0](), expected)
            assert error <= TOLERANCES["bfloat16"], f"error {error}"
            calls[candidate.name] = made
        except Exception as reason:
            print("   ", candidate.name, repr(reason)[:120])
    from kernels import decode
    return bench, calls, decode.get("planned").plan(bench.problem)


print(device_name(device), "read bandwidth", round(ceilings.read_bandwidth(device) / 1e9), "GB/s")
record = provenance.capture(device, seed=0, overrides=sys.argv[1:], device_name=device_name(device), cwd=Path.cwd())
(out / "decode_marks-provenance.json").write_text(json.dumps(record, indent=1))
points = [(h, 16, (c,) * b) for h in (64, 32, 16) for b, c in SHAPES[:5]] + [(64, 16, RAGGED)]
points += [(h, 16, (c,) * b) for h in (64, 32, 16) for b, c in SHAPES[5:]] + [(64, 64, (c,) * b) for b, c in SHAPES]
with (out / "decode_marks.jsonl").open("w") as file:
    for heads, block_size, lens in points:
        if time.time() - start > limit:
            print("no time:", heads, block_size, len(lens), lens[0]); continue
        try:
            bench, calls, plan = bound(heads, block_size, lens, PAGED)
            if len(set(lens)) == 1:
                calls |= bound(heads, lens[0] if block_size == 16 else block_size, lens, ("sdpa",), contiguous=True)[1]
            found = timing.time_interleaved(calls, device=device, cache_state="cold", rounds=4, samples=4)
        except Exception as reason:
            print("FAILED", heads, block_size, len(lens), lens[0], repr(reason)[:300]); continue
        medians = {name: statistics.median(t.median for t in rounds) for name, rounds in found.items()}
        aim = AIMS.get((len(lens), lens[0])) if block_size == 16 and len(set(lens)) == 1 else None
        print(f"{heads} heads {len(lens)} x {max(lens)} blocks {block_size}: floor {bench.cost.bytes / 4.42e6:.1f} aim {aim} plan {plan['variant']} x{plan.get('num_splits', '')}",
              " ".join(f"{n}={m:.1f}" for n, m in sorted(medians.items(), key=lambda x: x[1])), f"[{time.time() - start:.0f}]", flush=True)
        for name, rounds in found.items():
            file.write(json.dumps(dict(num_q_heads=heads, block_size=block_size, context_lens=lens if len(set(lens)) > 1 else [len(lens), lens[0]],
                variant=name, aim_us=aim, plan=plan if name == "planned" else None, samples_us=[t.samples_us for t in rounds])) + "\n")
        file.flush()
        del calls
        torch.cuda.empty_cache()
