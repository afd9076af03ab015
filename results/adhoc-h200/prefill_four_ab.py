"""warp_specialized with four warps that copy, two to a tile, against its two: right first, then timed.

    PYTHONPATH=.:results/adhoc-h200 python results/adhoc-h200/prefill_four_ab.py OUT.json

The variant is made from the project's own files by replacing text, as of commit 9f904dd.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from prefill_overlap_ab import RAGGED, contiguous, inputs

import kernels
from experiments import provenance
from kernels import prefill
from kernels.timing import time_interleaved

ROLES = [
    (
        "    VALUES: gl.constexpr,\n    KV_HEADS",
        "    VALUES: gl.constexpr,\n    PART: gl.constexpr,\n    PARTS: gl.constexpr,\n    KV_HEADS",
    ),
    (
        """            for i in gl.static_range(BOXES):
                key = gl.minimum(tile * BLOCK_N + i * BOX, last_box)
""",
        """            for i in gl.static_range(PART * BOXES // PARTS, (PART + 1) * BOXES // PARTS):
                key = gl.minimum(tile * BLOCK_N + i * BOX, last_box)
""",
    ),
    (
        "BLOCK_N * HEAD_DIM * 2)\n            for i in gl.static_range(BOXES):",
        "BLOCK_N * HEAD_DIM * 2 // PARTS)\n            for i in gl.static_range(PART * BOXES // PARTS, (PART + 1) * BOXES // PARTS):",
    ),
    ("[rows[i], column + half * 64]", "[rows[i - PART * BOXES // PARTS], column + half * 64]"),
    (
        "            if VALUES and tile + 1 < num_tiles:",
        "            if VALUES and PART == PARTS - 1 and tile + 1 < num_tiles:",
    ),
    (
        "        done += num_tiles\n        if VALUES:",
        "        done += num_tiles\n        if VALUES and PART == PARTS - 1:",
    ),
]
COPY = """            (copy_tiles, ({x}_desc, {x}_boxes, v_atoms, {x}_full, {x}_empty, v_clean, block_table_ptr, context_lens_ptr,
                query_start_loc_ptr, stride_table, {x}_block_rows, stride_{x}_head, batch, place, step, row, first, start,
                stop, {values}, {part}KV_HEADS, TOKENS, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BOX, STAGES)),
"""


def copies(x, values):
    return "".join(COPY.format(x=x, values=values, part=f"{p}, 2, ") for p in (0, 1))


KERNEL = [
    ("mbarrier.init(k_full.index(i), count=1)", "mbarrier.init(k_full.index(i), count=2)"),
    ("mbarrier.init(v_full.index(i), count=1)", "mbarrier.init(v_full.index(i), count=2)"),
    (COPY.format(x="k", values="False", part=""), copies("k", "False")),
    (COPY.format(x="v", values="True", part=""), copies("v", "True")),
    ("[4, 1, 1],", "[4, 1, 1, 1, 1],"),
    (
        "[CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS]",
        "[CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS]",
    ),
]


def patched(source, changes):
    for old, new in changes:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    return source


def load(root, into):
    root, into = Path(root), Path(into)
    into.mkdir(parents=True, exist_ok=True)
    roles = patched((root / "kernels/prefill/warp_roles.py").read_text(), ROLES)
    (into / "roles_b.py").write_text(roles)
    kernel = patched((root / "kernels/prefill/warp_specialized.py").read_text(), KERNEL)
    (into / "prefill_b.py").write_text(
        kernel.replace("from kernels.prefill.warp_roles import", "from roles_b import")
    )
    sys.path.insert(0, str(into))
    import prefill_b

    return prefill_b


b = load(Path(kernels.__file__).parents[1], tempfile.mkdtemp()).WarpSpecializedPrefill()
a = prefill.get("warp_specialized")
SHAPES = [
    (2, 32, 8, 4096, 4096),
    (16, 32, 8, 1024, 1024),
    (1, 64, 8, 8192, 8192),
    (8, 32, 8, 16384, 256),
    (8, 64, 8, 16384, 256),
    (1, 32, 8, 4096, 4096),
    (1, 32, 8, 16384, 16384),
]
MORE = [
    ([33, 1, 0, 200], [4133, 1, 50, 260], 40, 8, 16, 128),
    ([300, 129], [300, 1029], 16, 8, 32, 64),
    ([100, 64], [164, 900], 28, 4, 24, 128),
]


def differs(case):
    wanted = a(*case, out=torch.full_like(case[0], float("nan")))
    found = b(*case, out=torch.full_like(case[0], float("nan")))
    torch.cuda.synchronize()
    return not torch.equal(wanted, found)


if sys.argv[1] == "try":
    import time

    bad = 0
    for queries, contexts, h, kv in [*RAGGED[:1], ([700, 300], [701, 4000], 64, 8)]:
        t = time.time()
        case = inputs(queries, contexts, h, kv)
        a(*case)
        torch.cuda.synchronize()
        print("a", h, time.time() - t, flush=True)
        bad += differs(case)
        print("b", h, bad, time.time() - t, flush=True)
    for batch, h, kv, context, queries in SHAPES:
        if h == 16:
            continue
        bad += sum(differs(inputs([queries] * batch, [context] * batch, h, kv)) for _ in range(2))
        print(batch, h, context, bad, flush=True)
    sys.exit(1 if bad else 0)
subprocess.run([sys.executable, __file__, "try"], timeout=40, check=True)  # ends it if it hangs
device, rows = torch.device("cuda"), []
before = provenance.capture(
    device, seed=0, overrides=[], device_name=torch.cuda.get_device_name(), cwd=Path.cwd()
)
for batch, h, kv, context, queries in SHAPES:
    case = inputs([queries] * batch, [context] * batch, h, kv)
    wide = inputs([queries] * batch, [context] * batch, h, kv, 128)
    calls = {
        n: [lambda k=k, c=c, out=torch.empty_like(case[0]): k(*c, out=out)]
        for n, k, c in (("two", a, case), ("four", b, case), ("two, blocks of 128", a, wide))
    }
    if queries == context:
        calls["cudnn"] = contiguous(case, h, kv, context, batch)["cudnn"]
    flops = batch * h * 128 * 4 * (queries * (context - queries) + queries * (queries + 1) / 2)
    print(batch, h, kv, context, queries)
    for name, timings in time_interleaved(calls, device=device, cache_state="hot", rounds=3).items():
        us = sorted(t.median for t in timings)[1]
        rows.append([batch, h, kv, context, queries, name, us, [t.median for t in timings]])
        print(f"   {name:24s} {us:9.1f} us {flops / us / 1e6:7.1f} TFLOP/s", flush=True)
record = before | {
    "gpu_after": provenance.gpu_state(device),
    "throttled_after": provenance.is_throttled(device),
}
Path(sys.argv[1]).write_text(json.dumps({"rows": rows, "provenance": record}, indent=1) + "\n")
