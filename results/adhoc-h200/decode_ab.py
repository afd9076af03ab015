"""python .carry/decode_ab.py OUT [SECONDS] [flashinfer]: A/B of decode variants on the GPU; table last, raw samples in OUT."""
import json, math, random, sys, time
t0 = time.time()
import torch, triton, triton.language as tl
from kernels import ceilings, decode, timing
from kernels.decode import DecodeProblem
out_dir, limit = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 90.0
flashinfer = "flashinfer" in sys.argv
dev = torch.device("cuda:0"); HKV, D, SMS = 8, 128, 132
torch.manual_seed(0)

@triton.jit
def _null(x_ptr):
    tl.store(x_ptr + tl.program_id(0), 1.0)

@triton.jit
def _chain(x_ptr, HOPS: tl.constexpr):
    i = tl.load(x_ptr + tl.program_id(0)).to(tl.int64)
    for _ in tl.static_range(HOPS):
        i = tl.load(x_ptr + i).to(tl.int64)
    tl.store(x_ptr + i, i.to(tl.int32))

# family -> (kernel, options, programs an SM by the compiler's report at 64/8 heads)
V = {
    "base": ("split_kv", dict(tile=64, num_warps=4, num_stages=3), 5),
    "t32s4": ("split_kv", dict(tile=32, num_warps=4, num_stages=4), 6),
    "pf.t32w4s3": ("split_kv", dict(tile=32, num_warps=4, num_stages=3, prefetch=True), 6),
    "pf.t32w4s4": ("split_kv", dict(tile=32, num_warps=4, num_stages=4, prefetch=True), 4),
    "pf.t64w4s2": ("split_kv", dict(tile=64, num_warps=4, num_stages=2, prefetch=True), 4),
    "pf.t64w2s3": ("split_kv", dict(tile=64, num_warps=2, num_stages=3, prefetch=True), 3),
    "pf.t16w2s5": ("split_kv", dict(tile=16, num_warps=2, num_stages=5, prefetch=True), 6),
    "tma.w1s4": ("split_kv_tma", dict(tile=16, num_warps=1, num_stages=4), 6),
    "tma.w1s6": ("split_kv_tma", dict(tile=16, num_warps=1, num_stages=6), 4),
    "tma.w1s8": ("split_kv_tma", dict(tile=16, num_warps=1, num_stages=8), 3),
    "tma.w2s6": ("split_kv_tma", dict(tile=16, num_warps=2, num_stages=6), 4),
    "tma.w4s6": ("split_kv_tma", dict(tile=16, num_warps=4, num_stages=6), 4),
}
V64 = {
    "base": V["base"],
    "pf.t64w4s2": ("split_kv", dict(tile=64, num_warps=4, num_stages=2, prefetch=True), 5),
    "tma.t64w2s2": ("split_kv_tma", dict(tile=64, num_warps=2, num_stages=2), 4),
    "tma.t64w4s3": ("split_kv_tma", dict(tile=64, num_warps=4, num_stages=3), 3),
    "tma.t32w2s4": ("split_kv_tma", dict(tile=32, num_warps=2, num_stages=4), 4),
    "tma.t16w1s6": ("split_kv_tma", dict(tile=16, num_warps=1, num_stages=6), 4),
}

def make(hq, lens, bs, paged=True):
    b, per = len(lens), [-(-n // bs) for n in lens]
    pool = sum(per) + (sum(per) // 8 + 4 if paged else 0)
    kc = torch.randn(pool, bs, HKV, D, device=dev, dtype=torch.bfloat16); vc = torch.randn_like(kc)
    ids = (torch.randperm(pool, device=dev) if paged else torch.arange(pool, device=dev)).int()
    bt = torch.full((b, max(per)), 10**9, dtype=torch.int32, device=dev); at = 0
    for i, n in enumerate(per):
        bt[i, :n] = ids[at:at + n]; at += n
    q = torch.randn(b, hq, D, device=dev, dtype=torch.bfloat16)
    return dict(q=q, k_cache=kc, v_cache=vc, block_table=bt, context_lens=torch.tensor(lens, dtype=torch.int32, device=dev), out=torch.empty_like(q))

def err(a, ref):
    e = ((a.float() - ref).norm(dim=-1) / ref.norm(dim=-1)).max().item()
    return math.inf if math.isnan(e) else e

rows, best_of = [], {}
def go(*a, **k):
    try: go_(*a, **k)
    except Exception: import traceback; traceback.print_exc(limit=-3)
def go_(hq, lens, plan_ctx=None, bs=16, only=None, extra=False, tag="", mult=1):
    if time.time() - t0 > limit: print("no time for", hq, len(lens), lens[0], tag); return
    b, s = len(lens), max(lens); plan_ctx = plan_ctx or s
    kv = 2 * sum(lens) * HKV * D * 2
    sets = [make(hq, lens, bs) for _ in range(mult * timing.num_input_sets(kv, dev, "cold"))]
    prob = DecodeProblem(b, hq, HKV, D, bs, plan_ctx, torch.bfloat16, dev)
    ref = decode.get("reference")(**{k: v.float() if k in ("q", "k_cache", "v_cache") and kv < 2e9 else v for k, v in sets[0].items() if k != "out"}).float()
    opts = {"default": ("split_kv", decode.get("split_kv").plan(prob))}
    for f, (name, o, occ) in (V if bs == 16 else V64).items():
        full = max(1, min(occ * SMS // (HKV * b), -(-s // 64)))
        ns = {full, max(1, full // 2)} if not tag else {2, 4, 8, 16}
        if b == 1 and f == "base": ns |= {33}
        for n in sorted(ns): opts[f"{f}.n{n}"] = (name, dict(o, num_splits=n))
    opts["stream_k"] = ("stream_k", decode.get("stream_k").plan(prob))
    if b * HKV < SMS:
        for n in ((32, 64) if s > 2000 else (16, 32)):
            o = dict(tile=32, num_warps=4, num_stages=4, num_splits=n if b == 1 else max(1, n // b))
            opts[f"fused.n{n}"] = ("split_kv_fused", o)
            if o["num_splits"] * HKV * b <= 6 * SMS: opts[f"coop.n{n}"] = ("split_kv_fused", dict(o, cooperative=True))
    if only: opts = {k: v for k, v in opts.items() if k in only}
    var, bad = {}, {}
    for l, (name, o) in opts.items():
        k = decode.get(name)
        try:
            sets[0]["out"].fill_(float("nan"))
            e = err(k(**sets[0], **o), ref)
            assert e < 1e-2, f"error {e}"
        except Exception as x:
            bad[l] = repr(x)[:90]; continue
        ws = torch.empty(b * hq * (D + 1) * (o.get("num_splits") or 64) + 4096, device=dev) if name != "stream_k" else None
        var[l] = [(lambda k=k, st=st, ws=ws, o=o: k(**st, workspace=ws, **o)) for st in sets]
    if len(set(lens)) == 1 and not tag:
        flat = [make(hq, lens, s if s % 16 else bs, paged=False) for _ in sets]
        sd = decode.get("sdpa")
        try:
            sd(**flat[0], contiguous_len=s); var["sdpa"] = [(lambda st=st: sd(**st, contiguous_len=s)) for st in flat]
        except Exception as x: bad["sdpa"] = repr(x)[:90]
    if flashinfer:
        fi = decode.get("flashinfer")
        try:
            pr = [fi.plan(prob) | fi.prepare(prob, st["block_table"], st["context_lens"]) for st in sets]
            assert err(fi(**sets[0], **pr[0]), ref) < 1e-2
            var["fi"] = [(lambda st=st, p=p: fi(**st, **p)) for st, p in zip(sets, pr)]
        except Exception as x: bad["fi"] = repr(x)[:90]
    if extra:  # what launching costs, and the kernels without any context
        zero = [dict(st, context_lens=torch.zeros_like(st["context_lens"])) for st in sets]
        x = torch.zeros(1 << 20, dtype=torch.int32, device=dev)
        var["null1"] = [lambda: _null[(132,)](x.view(torch.float32))]
        var["null2"] = [lambda: (_null[(132,)](x.view(torch.float32)), _null[(132,)](x.view(torch.float32)))]
        x2 = torch.zeros(1 << 20, dtype=torch.int32, device=dev)
        var["chain2"] = [lambda: _chain[(512,)](x2, HOPS=2, num_warps=4)]
        for l in ("t32s4.n64", "tma.w1s6.n64", "coop.n64"):
            if l in opts and l in var:
                k, o = decode.get(opts[l][0]), opts[l][1]
                var[l + "@0"] = [(lambda k=k, st=st, o=o, ws=torch.empty(1 << 21, device=dev): k(**st, workspace=ws, **o)) for st in zero]
    res = timing.time_interleaved(var, device=dev, cache_state="cold", rounds=3, samples=5)
    med = {l: min(t.median for t in ts) for l, ts in res.items()}
    order = sorted(med, key=med.get)
    fam = {}
    for l in order: fam.setdefault(l.split(".n")[0], l)
    if not only and bs == 16: best_of[(b, s)] = [l for l in order if l != "sdpa" and "@" not in l][:5] + ["default", "stream_k"]
    print(f"hq{hq} b{b} s{s}/{plan_ctx} bs{bs} {tag} x{len(sets)} floor {kv / 4.42e6:.1f} DEFAULT {med.get('default', -1):.1f} n{opts['default'][1]['num_splits'] if 'default' in opts else ''}:", *[f"{l}={med[l]:.1f}" for l in (fam.values() if not only else order)], flush=True)
    if bad: print("   BAD", bad)
    rows.append(dict(hq=hq, lens=lens if tag else [s, b], plan_ctx=plan_ctx, bs=bs, tag=tag, floor=kv / 4.42e6, bad=bad, res={l: [t.samples_us for t in ts] for l, ts in res.items()}))
    json.dump(rows, open(out_dir + "/decode_ab.json", "w"))
    del sets, var
    if kv > 5e8: torch.cuda.empty_cache()

print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
go(64, [4096], extra=True); print(f"t {time.time() - t0:.0f}")
go(16, [1050] * 16, 4096); go(16, [1050], 4096); print(f"t {time.time() - t0:.0f}")
rng = random.Random(0)
ragged = [int(128 * 256 ** rng.random()) for _ in range(64)]
for lens in ([32768], [4096] * 8, [4352] * 16, [4096] * 64, [1024] * 256, [131072]): go(64, lens)
print(f"t {time.time() - t0:.0f}")
go(64, ragged, 32768, tag="ragged", only=[f"{f}.n{n}" for f in ("base", "pf.t32w4s3", "tma.w1s6", "tma.w2s6") for n in (2, 4, 8, 16)] + ["default", "stream_k"])
for lens in ([4096], [4096] * 16, [4096] * 64): go(64, lens, bs=64)
print(f"t {time.time() - t0:.0f}")
go(64, [8192] * 128, only=[*dict.fromkeys(best_of.get((64, 4096), ["default"]))])
from kernels.ceilings import _reader
for gib in (0.5, 1, 4, 16):
    x = torch.rand(int(gib * 2**28), device=dev)
    r = timing.time_interleaved({b: [_reader(x, b)] for b in (4096, 16384)}, device=dev, cache_state="hot", rounds=2)
    print(f"read {gib} GiB GB/s", {b: round(x.numel() * 4e-3 / min(t.median for t in ts)) for b, ts in r.items()}); del x
go(64, [4096], only=("default", "t32s4.n64", "tma.w1s6.n64"), mult=4)
go(64, [4352] * 16, only=("default", "pf.t32w4s3.n6", "tma.w1s6.n4"), mult=4)
print("read_bandwidth", ceilings.read_bandwidth(dev) / 1e9, f"t {time.time() - t0:.0f}")
for hq in (16, 32):
    for lens in ([4096], [4096] * 8, [32768], [4096] * 64, [4352] * 16, [131072], [1024] * 256, [8192] * 128):
        go(hq, lens, only=best_of.get((len(lens), lens[0]), best_of.get((64, 4096))))
print(f"t {time.time() - t0:.0f}")
