"""rms_norm and add_rms_norm by tile, against the kernel before, torch.compile and an empty kernel, interleaved.

PYTHONPATH=. python results/adhoc-h200/norm_variants.py OUT.json [SECONDS]

States: "hot" (the same inputs again), "cold" (x, residual and weight from memory), "weight" (x and residual hot, each
call's weight from memory, as in a decode step, whose weights pass through the cache between two uses). Prints medians,
writes raw samples and provenance. kernels.norm's default is 1 x 4 warps (hidden 5120: 1 x 8). bf16; on a CPU two tiny
shapes in Triton's interpreter, to try the script itself.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from experiments import provenance
from experiments.devices import device_name
from experiments.elementwise_bench import compiled
from experiments.kernel_bench import relative_error
from kernels import timing
from kernels.norm import _launch, add_rms_norm, rms_norm
from kernels.triton_support import tl, triton

EPS = 1e-6
DTYPE = torch.bfloat16
MOST = 2.0**-6  # two roundings of bf16, of a row's largest value
TILES = {
    1024: [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4)],
    4096: [(1, 4), (1, 8), (1, 16), (1, 32)],
    5120: [(1, 4), (1, 8), (1, 16), (1, 32)],
}


@triton.jit
def _nothing_kernel(x_ptr):
    pass


@triton.jit(do_not_specialize=["num_rows"])
def _kernel_before(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    num_rows,
    eps,
    stride_x_row,
    stride_x_head,
    stride_residual_row,
    stride_residual_head,
    HEADS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """kernels/norm.py's of commit 882c74c, as measured in ../elementwise_kernel-h200-0.6b."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < HIDDEN)[None, :]
    row = (rows // HEADS).to(tl.int64)
    head = (rows % HEADS).to(tl.int64)
    x_rows = row * stride_x_row + head * stride_x_head
    out_offsets = rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    x = tl.load(x_ptr + x_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual_rows = row * stride_residual_row + head * stride_residual_head
        residual_offsets = residual_rows[:, None] + columns[None, :]
        x += tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + out_offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + eps)
    scaled = (x * scale[:, None]).to(total_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    tl.store(normed_ptr + out_offsets, (weight[None, :] * scaled).to(normed_ptr.dtype.element_ty), mask=mask)


def before(t):
    x, residual = t["x"], t.get("residual")
    num_rows, hidden = x.shape
    normed, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    rows = max(1, 2048 // block)
    _kernel_before[(triton.cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual,
        t["weight"],
        normed,
        total,
        num_rows,
        EPS,
        *(hidden, hidden, hidden, hidden),
        HEADS=1,
        HIDDEN=hidden,
        BLOCK=block,
        ROWS=rows,
        ADD=residual is not None,
        num_warps=4 if rows * block <= 4096 else 8,
    )
    return (normed,) if residual is None else (normed, total)


def by_tile(rows, num_warps):
    def run(t):
        found = _launch(t["x"], t.get("residual"), t["weight"], EPS, rows, num_warps)
        return found if "residual" in t else found[:1]

    return run


def by_torch(t, use_triton=False):
    if "residual" in t:
        return add_rms_norm(t["x"], t["residual"], t["weight"], EPS, use_triton=use_triton)
    return (rms_norm(t["x"], t["weight"], EPS, use_triton=use_triton),)


def make_sets(device, hidden, rows, add, state):
    """Input sets enough for the state; in "weight" they share x and residual."""
    draw = torch.Generator(device=device).manual_seed(0)
    names = ("x", "residual") if add else ("x",)
    weight_bytes = hidden * DTYPE.itemsize
    moving = weight_bytes * (1 if state == "weight" else 1 + rows * len(names))
    count = timing.num_input_sets(moving, device, "hot" if state == "hot" else "cold")

    def normal(*shape):
        return torch.randn(shape, generator=draw, device=device, dtype=DTYPE)

    shared = {name: normal(rows, hidden) for name in names}
    sets = []
    for _ in range(count):
        own = shared if state == "weight" else {name: normal(rows, hidden) for name in names}
        sets.append({**own, "weight": normal(hidden)})
    return sets


def main():
    start, out = time.time(), Path(sys.argv[1])
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    record = provenance.capture(
        device, seed=0, overrides=sys.argv[1:], device_name=device_name(device), cwd=Path.cwd()
    )
    states = ("weight", "cold", "hot")
    # What a decode step of 0.6B does comes first; a prefill chunk tells whether a decode tile may be everyone's.
    points = [(1024, rows, add, s) for rows in (1, 256) for add in (True, False) for s in states]
    points += [(h, rows, True, s) for h in (4096, 5120) for rows in (1, 256) for s in ("weight", "hot")]
    points += [(1024, 8192, True, "cold"), (4096, 8192, True, "cold")]
    everything = [
        (h, rows, add, s) for rows in (16, 64, 1, 256) for h in TILES for add in (True, False) for s in states
    ]
    points += [point for point in everything if point not in points]
    if not cuda:
        points = [(1024, 2, True, "weight"), (1024, 1, False, "hot")]
    results, compiled_for, skipped = [], {}, []
    for hidden, rows, add, state in points:
        if time.time() - start > limit:
            skipped.append((hidden, rows, add, state))
            continue
        sets = make_sets(device, hidden, rows, add, state)
        runs = {f"{r} x {w} warps": by_tile(r, w) for r, w in TILES[hidden]} | {"before": before}
        if cuda:
            key = (hidden, rows, add)
            compiled_for[key] = compiled_for.get(key) or compiled(by_torch)
            runs["compile"] = compiled_for[key]
        calls, wrong = {}, {}
        expected = by_torch(sets[0])
        for name, run in runs.items():
            # A compiler that fails for one shape or tile costs that variant only.
            try:
                error = relative_error(run(sets[0]), expected)
            except Exception as failure:
                wrong[name] = f"{type(failure).__name__}: {failure}"[:300]
                continue
            if not error <= MOST:
                wrong[name] = f"error {error}"
                continue
            calls[name] = [lambda run=run, t=t: run(t) for t in sets]
        if cuda:
            calls["empty"] = [lambda t=t: _nothing_kernel[(1,)](t["x"]) for t in sets]
        found = timing.time_interleaved(
            calls, device=device, cache_state="hot" if state == "hot" else "cold", rounds=3, samples=4
        )
        medians = {n: statistics.median(s for t in ts for s in t.samples_us) for n, ts in found.items()}
        results.append(
            {
                "op": "add_rms_norm" if add else "rms_norm",
                "hidden": hidden,
                "rows": rows,
                "state": state,
                "median_us": medians,
                "samples_us": {name: [t.samples_us for t in ts] for name, ts in found.items()},
                "method": {name: ts[0].method for name, ts in found.items()},
                "wrong": wrong,
            }
        )
        table = "  ".join(
            f"{name}={us:.2f}" for name, us in sorted(medians.items(), key=lambda pair: pair[1])
        )
        spent = time.time() - start
        label = f"{'add_' if add else ''}rms_norm {hidden} x {rows} {state}"
        print(f"{label:32} {table}  [{spent:.0f} s]", wrong or "", flush=True)
        out.write_text(json.dumps({"provenance": record, "results": results, "skipped": skipped}, indent=1))
    out.write_text(json.dumps({"provenance": record, "results": results, "skipped": skipped}, indent=1))
    print(f"{len(results)} points, {len(skipped)} without time, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
