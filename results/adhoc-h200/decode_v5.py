"""Ragged batches of an engine's lengths, and whole rows of blocks of 64 in fewer stages: cold, interleaved.

PYTHONPATH=. python results/adhoc-h200/decode_v5.py OUT_FOLDER [SECONDS]: a table, raw rows in decode_v5.jsonl.
"""
import json, random, statistics, sys, time
from pathlib import Path
import torch
from experiments import provenance
from experiments.decode_bench import DecodeBench
from experiments.devices import device_name
from experiments.kernel_bench import TOLERANCES, relative_error
from kernels import decode, timing

start, out, limit = time.time(), Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
out.mkdir(parents=True, exist_ok=True)
device, rng = torch.device("cuda", 0), random.Random(0)
RAGGED = tuple(int(128 * 256 ** ((0.5 + 37 * row % 64) / 64)) for row in range(64))
between = lambda rows, low, high: tuple(rng.randint(low, high) for _ in range(rows))
POINTS = [
    (64, 16, RAGGED), (16, 16, between(256, 100, 2000)), (16, 16, between(128, 100, 2000)), (16, 16, between(32, 100, 2000)),
    (32, 16, between(64, 1000, 9000)), (32, 16, between(8, 1000, 9000)), (16, 16, RAGGED), (64, 64, RAGGED),
    (64, 64, (8192,) * 128), (64, 64, (1024,) * 256), (64, 64, (4096,) * 64), (16, 64, between(256, 100, 2000)),
]
record = provenance.capture(device, seed=0, overrides=sys.argv[1:], device_name=device_name(device), cwd=Path.cwd())
(out / "decode_v5-provenance.json").write_text(json.dumps(record, indent=1))
with (out / "decode_v5.jsonl").open("w") as file:
    for heads, block_size, lens in POINTS:
        if time.time() - start > limit:
            print("no time:", heads, block_size, len(lens)); continue
        bench = DecodeBench(lens, heads, 8, 128, block_size, "bfloat16", device, ())
        sets = [bench.make_inputs(torch.Generator(device=device).manual_seed(0)) for _ in range(timing.num_input_sets(bench.input_bytes, device, "cold"))]
        (expected,) = bench.reference(sets[0])
        chosen = {name: (name, decode.get(name).plan(bench.problem)) for name in ("planned", "split_kv_tma", "stream_k_tma", "split_kv")}
        for stages in (2, 3):
            if block_size == 64:
                chosen[f"whole rows of {stages} stages"] = ("split_kv_tma", {"num_splits": 1, "num_stages": stages})
        calls = {}
        for name, (kernel_name, options) in chosen.items():
            kernel = decode.get(kernel_name)
            workspace = kernel.workspace(bench.problem, device)
            outs = [torch.full_like(each.q, float("nan")) for each in sets]
            made = [lambda k=kernel, i=i, o=o, w=workspace, c=options: k(i.q, i.k_cache, i.v_cache, i.block_table, i.context_lens, out=o, workspace=w, **c) for i, o in zip(sets, outs)]
            error = relative_error([made[0]()], [expected])
            if not error <= TOLERANCES["bfloat16"]:
                print("    wrong:", name, error); continue
            calls[name] = made
        found = timing.time_interleaved(calls, device=device, cache_state="cold", rounds=3, samples=4)
        medians = {name: statistics.median(s for t in rounds for s in t.samples_us) for name, rounds in found.items()}
        for name, rounds in found.items():
            file.write(json.dumps({"num_q_heads": heads, "block_size": block_size, "context_lens": lens, "variant": name, "options": {"kernel": chosen[name][0], **chosen[name][1]}, "samples_us": [t.samples_us for t in rounds]}) + "\n")
        file.flush()
        floor = sum(lens) * 2 * 8 * 128 * 2 / 4.424e6
        print(f"{heads} heads, blocks of {block_size}, {len(lens)} rows to {max(lens)}: floor {floor:.1f}", " ".join(f"{n}={us:.1f}" for n, us in sorted(medians.items(), key=lambda x: x[1])), {k: v for k, v in chosen["planned"][1].items() if k in ("variant", "num_splits", "num_stages")}, f"[{time.time() - start:.0f} s]", flush=True)
