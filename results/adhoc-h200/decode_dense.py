"""Dense splits of the leading candidates: python .carry/dense.py OUT SECONDS"""
import json, random, statistics as st, sys, time
t0 = time.time()
import torch
from kernels import decode, timing
out_dir, limit = sys.argv[1], float(sys.argv[2])
dev = torch.device("cuda:0"); HKV, D = 8, 128
torch.manual_seed(0)
V = {
    "tma.t16w1s4": ("split_kv_tma", dict(tile=16, num_warps=1, num_stages=4)),
    "pf.t32w4s3": ("split_kv", dict(tile=32, num_warps=4, num_stages=3, prefetch=True)),
}
V64 = {
    "tma.t64w2s2": ("split_kv_tma", dict(tile=64, num_warps=2, num_stages=2)),
    "tma.t32w2s4": ("split_kv_tma", dict(tile=32, num_warps=2, num_stages=4)),
    "tma.t32w1s3": ("split_kv_tma", dict(tile=32, num_warps=1, num_stages=3)),
    "pf.t32w4s3": ("split_kv", dict(tile=32, num_warps=4, num_stages=3, prefetch=True)),
    "pf.t64w4s2": ("split_kv", dict(tile=64, num_warps=4, num_stages=2, prefetch=True)),
}
NS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 49, 57, 64, 80, 99]
def make(hq, lens, bs):
    b, per = len(lens), [-(-n // bs) for n in lens]
    pool = sum(per) + sum(per) // 8 + 4
    kc = torch.randn(pool, bs, HKV, D, device=dev, dtype=torch.bfloat16); vc = torch.randn_like(kc)
    ids = torch.randperm(pool, device=dev).int()
    bt = torch.full((b, max(per)), 10**9, dtype=torch.int32, device=dev); at = 0
    for i, n in enumerate(per):
        bt[i, :n] = ids[at:at + n]; at += n
    q = torch.randn(b, hq, D, device=dev, dtype=torch.bfloat16)
    return dict(q=q, k_cache=kc, v_cache=vc, block_table=bt, context_lens=torch.tensor(lens, dtype=torch.int32, device=dev), out=torch.empty_like(q))
rows = []
def go(hq, lens, bs=16, tag=""):
    if time.time() - t0 > limit: print("no time", hq, len(lens), lens[0], tag); return
    try:
        b, kv = len(lens), 2 * sum(lens) * HKV * D * 2
        sets = [make(hq, lens, bs) for _ in range(timing.num_input_sets(kv, dev, "cold"))]
        ref = decode.get("reference")(**{k: v for k, v in sets[0].items() if k != "out"}).float()
        var, bad = {}, {}
        for f, (name, o) in (V if bs == 16 else V64).items():
            k = decode.get(name)
            for n in NS:
                progs = n * b * HKV
                if n > 1 and (n > -(-max(lens) // 64) or (progs > 1100 and not tag) or (tag and n > 49)): continue
                if b == 1 and n < 12 and max(lens) > 4000: continue
                oo = dict(o, num_splits=n)
                try:
                    sets[0]["out"].fill_(float("nan"))
                    got = k(**sets[0], **oo).float()
                    e = ((got - ref).norm(dim=-1) / ref.norm(dim=-1)).max().item()
                    assert e < 1e-2, e
                except Exception as x: bad[f"{f}.n{n}"] = repr(x)[:90]; continue
                ws = torch.empty(b * hq * (D + 1) * n + 4096, device=dev)
                var[f"{f}.n{n}"] = [(lambda k=k, s=s, ws=ws, oo=oo: k(**s, workspace=ws, **oo)) for s in sets]
        res = timing.time_interleaved(var, device=dev, cache_state="cold", rounds=2, samples=4)
        med = {l: min(t.median for t in ts) for l, ts in res.items()}
        print(f"hq{hq} b{b} s{max(lens)} bs{bs} {tag} floor {kv / 4.42e6:.1f} [{time.time() - t0:.0f}]", " ".join(f"{l}={m:.1f}" for l, m in sorted(med.items(), key=lambda x: x[1])[:6]), bad or "", flush=True)
        rows.append(dict(hq=hq, lens=lens if tag else [max(lens), b], tag=tag, bs=bs, floor=kv / 4.42e6, bad=bad, res={l: [t.samples_us for t in ts] for l, ts in res.items()}))
        json.dump(rows, open(out_dir + "/decode_dense.json", "w"))
        del sets, var
        if kv > 5e8: torch.cuda.empty_cache()
    except Exception as x: print("FAILED", hq, len(lens), repr(x)[:300])
rng = random.Random(0)
ragged = [int(128 * 256 ** rng.random()) for _ in range(64)]
for hq, b, s in [(64,1,4096),(64,8,4096),(16,16,1050),(16,1,1050),(64,1,32768),(64,16,4352),(64,64,4096),(64,256,1024),(64,1,131072),(16,64,1100),(32,2,8192),(64,4,1024),(64,32,4096),(32,1,1050),(16,4,4096)]:
    go(hq, [s] * b)
go(64, ragged, tag="ragged"); go(16, ragged[:16], tag="ragged16")
for hq, b, s in [(64,1,4096),(64,16,4352),(64,64,4096),(16,16,1050),(64,1,32768),(64,1,131072),(64,8,4096),(64,256,1024)]: go(hq, [s] * b, bs=64)
for hq, b, s in [(64,128,8192),(16,1,4096),(16,64,4096),(64,2,1050),(32,16,4096),(16,1,32768),(32,8,1050),(16,256,1024),(64,3,2048),(32,24,700)]: go(hq, [s] * b)
