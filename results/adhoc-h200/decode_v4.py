"""stream_k_tma against what is planned now, at the shapes of the marks, ragged rows and blocks of 64: cold, interleaved.

PYTHONPATH=. python results/adhoc-h200/decode_v4.py OUT_FOLDER [SECONDS]: a table on the terminal, raw rows in decode_v4.jsonl.
Points that the seconds (90) do not reach are named. Without a GPU, tiny shapes in Triton's
interpreter, some minutes: the logic alone.
"""
import json, statistics, sys, time
from pathlib import Path
import torch

start, out, limit = time.time(), Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 90.0
out.mkdir(parents=True, exist_ok=True)
GPU = torch.cuda.is_available()
if not GPU:
    import os
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
from experiments import provenance
from experiments.decode_bench import DecodeBench
from experiments.devices import device_name
from experiments.kernel_bench import TOLERANCES, relative_error
from kernels import ceilings, decode, timing
from kernels.decode.planner import TileShape
from kernels.decode.shares import slots_numel
from kernels.decode.stream_k_tma import num_programs_for

device, dtype = (torch.device("cuda", 0), "bfloat16") if GPU else (torch.device("cpu"), "float32")
KV_HEADS, HEAD_DIM = (8, 128) if GPU else (2, 16)
AIMS = {(1, 4096): 8, (1, 32768): 38, (1, 131072): 127, (8, 4096): 37, (16, 4352): 67, (64, 4096): 245, (128, 8192): 960, (256, 1024): 247}
SHAPES = list(AIMS)
RAGGED = tuple(int(128 * 256 ** ((0.5 + 37 * row % 64) / 64)) for row in range(64))
# Splits that were the fastest of those measured before: (query heads, block size, rows, context) -> number.
BEST = {(64, 16, 1, 4096): 64, (64, 16, 1, 32768): 64, (64, 16, 1, 131072): 64, (64, 16, 8, 4096): 8, (64, 16, 16, 4352): 4,
        (64, 16, 128, 8192): 3, (64, 64, 1, 4096): 40, (64, 64, 1, 32768): 40, (64, 64, 1, 131072): 46, (64, 64, 8, 4096): 6, (64, 64, 16, 4352): 3}


def whole_rows(batch: int, most: int) -> int | None:
    """Shares of a line that cut no row of a batch of equal rows, where the GPU holds them and they nearly fill it."""
    found = next((batch // k for k in range(1, batch + 1) if batch % k == 0 and batch // k <= most), 1)
    return found if 2 * found >= most else None


def candidates(problem, heads, lens, block_size):
    """name -> (kernel, options)."""
    equal = len(set(lens)) == 1
    found = {name: (name, decode.get(name).plan(problem)) for name in ("planned", "stream_k")}
    splits = BEST.get((heads, block_size, len(lens), lens[0])) if equal else None
    splits = splits or decode.get("split_kv_tma").plan(problem)["num_splits"]
    found[f"split_tma.x{splits}"] = ("split_kv_tma", {"num_splits": splits})
    if len(lens) >= 64 and block_size == 16:  # nine programs an SM instead of six
        for each in {1, splits} if equal else {splits}:
            found[f"split_tma.x{each}.s3"] = ("split_kv_tma", {"num_splits": each, "num_stages": 3})
    shapes = [(16, 1, 4), (16, 1, 3)] if block_size == 16 else [(32, 1, 3), (32, 1, 2), (16, 1, 4)]
    if GPU and heads != 64 and len(lens) < 64:
        shapes = shapes[:1]
    for number, shape in enumerate(shapes):
        tile = TileShape(*shape)
        full = num_programs_for(problem, tile)
        parts = {f"p{part}": int(full * part) for part in ((0.5, 0.75, 1) if heads == 64 and number == 0 else (0.5, 1))}
        shares = whole_rows(len(lens), full // problem.num_kv_heads) if equal else None
        if shares is not None:
            parts["rows"] = shares * problem.num_kv_heads
        for label, programs in parts.items():
            found[f"sk_tma.t{tile.tile}s{tile.num_stages}.{label}"] = ("stream_k_tma", {"num_programs": max(1, programs), **tile.options()})
    return found


def bound(heads, block_size, lens):
    """(bench, name -> calls on the rotating input sets, name -> options); what is wrong is told and left out."""
    bench = DecodeBench(lens, heads, KV_HEADS, HEAD_DIM, block_size, dtype, device, ())
    generator = torch.Generator(device=device).manual_seed(0)
    sets = [bench.make_inputs(generator) for _ in range(timing.num_input_sets(bench.input_bytes, device, "cold"))]
    (expected,) = bench.reference(sets[0])
    calls, options = {}, {}
    for name, (kernel_name, chosen) in candidates(bench.problem, heads, lens, block_size).items():
        kernel = decode.get(kernel_name)
        try:
            reason = kernel.supports(bench.problem)
            assert reason is None, reason
            workspace = kernel.workspace(bench.problem, device)
            if "num_programs" in chosen:
                workspace = torch.empty(slots_numel(bench.problem, max(chosen["num_programs"], KV_HEADS)), device=device)
            elif "num_splits" in chosen:
                numel = len(lens) * heads * chosen["num_splits"] * (HEAD_DIM + 1)
                workspace = torch.empty(max(numel, 1 if workspace is None else workspace.numel()), device=device)
            outs = [torch.full_like(each.q, float("nan")) for each in sets]
            made = [lambda k=kernel, i=i, o=o, w=workspace, c=chosen: k(i.q, i.k_cache, i.v_cache, i.block_table, i.context_lens, out=o, workspace=w, **c)
                    for i, o in zip(sets, outs)]
            error = relative_error([made[0]()], [expected])
            assert error <= TOLERANCES[dtype], f"error {error}"
            calls[name], options[name] = made, {"kernel": kernel_name, **chosen}
        except Exception as reason:
            print("   ", name, repr(reason)[:160])
    return bench, calls, options


if GPU:
    print(device_name(device), "read bandwidth", round(ceilings.read_bandwidth(device) / 1e9), "GB/s")
    uniform = lambda heads, block_size, shapes: [(heads, block_size, (c,) * b) for b, c in shapes]
    points = uniform(64, 16, SHAPES[3:5] + SHAPES[6:7]) + [(64, 16, RAGGED)] + uniform(64, 16, SHAPES[5:6] + SHAPES[7:] + SHAPES[:3])
    points += uniform(64, 64, SHAPES[3:]) + uniform(16, 16, SHAPES) + uniform(32, 16, SHAPES) + uniform(64, 64, SHAPES[:3])
else:
    points = [(4, 16, (40,) * 3), (4, 16, (100, 0, 17)), (2, 64, (80,) * 2), (2, 16, (9,) * 64)]
record = provenance.capture(device, seed=0, overrides=sys.argv[1:], device_name=device_name(device), cwd=Path.cwd())
(out / "decode_v4-provenance.json").write_text(json.dumps(record, indent=1))
with (out / "decode_v4.jsonl").open("w") as file:
    for heads, block_size, lens in points:
        if time.time() - start > limit:
            print("no time:", heads, block_size, len(lens), lens[0]); continue
        try:
            bench, calls, options = bound(heads, block_size, lens)
            found = timing.time_interleaved(calls, device=device, cache_state="cold", rounds=3 if GPU else 1, samples=4 if GPU else 1)
        except Exception as reason:
            print("FAILED", heads, block_size, len(lens), lens[0], repr(reason)[:300]); continue
        medians = {name: statistics.median(t.median for t in rounds) for name, rounds in found.items()}
        equal = len(set(lens)) == 1
        aim = AIMS.get((len(lens), lens[0])) if block_size == 16 and equal else None
        print(f"{heads} heads {len(lens)} x {max(lens)} blocks {block_size}: floor {bench.cost.bytes / 4.42e6:.1f} aim {aim}",
              " ".join(f"{n}={m:.1f}" for n, m in sorted(medians.items(), key=lambda x: x[1])), f"[{time.time() - start:.0f}]", flush=True)
        for name, rounds in found.items():
            file.write(json.dumps(dict(num_q_heads=heads, block_size=block_size, context_lens=[len(lens), lens[0]] if equal else lens, variant=name,
                options=options[name], aim_us=aim, method=rounds[0].method, samples_us=[t.samples_us for t in rounds])) + "\n")
        file.flush()
        del calls
        if GPU:
            torch.cuda.empty_cache()
