import json, random, sys, time, torch
from kernels import decode, timing, ceilings

dev = torch.device("cuda:0")
bw = ceilings.read_bandwidth(dev)
mm = ceilings.matmul_rate(dev, torch.bfloat16)
print("ceilings", bw / 1e9, mm / 1e12)


def make(hq, b, s, bs=16, hkv=8, d=128, dt=torch.bfloat16):
    nb = b * -(-s // bs)
    pool = nb + nb // 8 + 4
    kc = torch.randn(pool, bs, hkv, d, device=dev, dtype=dt)
    vc = torch.randn_like(kc)
    bt = torch.randperm(pool, device=dev)[:nb].to(torch.int32).view(b, -1)
    return dict(
        q=torch.randn(b, hq, d, device=dev, dtype=dt),
        k_cache=kc,
        v_cache=vc,
        block_table=bt,
        context_lens=torch.full((b,), s, dtype=torch.int32, device=dev),
        out=torch.empty(b, hq, d, device=dev, dtype=dt),
    )


rows = []


def go(hq, b, s, opts, bs=16):
    kv = 2 * b * s * 8 * 128 * 2
    n = timing.num_input_sets(kv, dev, "cold")
    sets = [make(hq, b, s, bs) for _ in range(n)]
    prob = decode.DecodeProblem(b, hq, 8, 128, bs, s, torch.bfloat16, dev)
    var = {}
    ref = decode.get("reference")(**{k: v for k, v in sets[0].items() if k != "out"})
    for label, (name, o) in opts.items():
        k = decode.get(name)
        plan = {**k.plan(prob), **o}
        ws = k.workspace(prob, dev) if not o else None
        try:
            got = k(**sets[0], workspace=ws, **plan).float()
            err = ((got - ref.float()).norm() / ref.float().norm()).item()
            assert err < 1e-2, err
        except Exception as e:
            print("skip", label, repr(e)[:100])
            continue
        var[label] = [(lambda k=k, st=st, ws=ws, plan=plan: k(**st, workspace=ws, **plan)) for st in sets]
    res = timing.time_interleaved(var, device=dev, cache_state="cold", rounds=3, samples=5)
    out = sorted((min(t.median for t in ts), l) for l, ts in res.items())
    print(
        f"hq{hq} b{b} s{s} bs{bs} floor {kv / bw * 1e6:.1f}us sets {n}:",
        *[f"{l}={t:.1f}" for t, l in out[:8]],
        "| default",
        [f"{t:.1f}" for t, l in out if l == "default"],
        "plan",
        decode.get("split_kv").plan(prob),
    )
    rows.append(dict(hq=hq, b=b, s=s, bs=bs, res={l: [t.samples_us for t in ts] for l, ts in res.items()}))


t0 = time.time()
D = ("split_kv", {})
go(64, 1, 4096, {"default": D, "single_pass": ("single_pass", {})})
for hq, b, s in [(64, 1, 4096), (16, 1, 4096), (64, 1, 32768)]:
    o = {"default": D}
    for tile, w, st in [
        (32, 2, 4),
        (32, 4, 4),
        (64, 4, 3),
        (64, 4, 4),
        (64, 4, 5),
        (64, 2, 5),
        (128, 4, 3),
        (128, 8, 3),
        (32, 2, 6),
        (32, 4, 6),
        (64, 8, 5),
    ]:
        for ns in {(64, 1, 4096): (16, 32, 64), (16, 1, 4096): (16, 32, 64), (64, 1, 32768): (33, 50, 66)}[
            (hq, b, s)
        ]:
            o[f"t{tile}w{w}s{st}n{ns}"] = (
                "split_kv",
                dict(tile=tile, num_warps=w, num_stages=st, num_splits=ns),
            )
    go(hq, b, s, o)
    print("t", time.time() - t0)
for hq, b, s in [
    (64, 1, 131072),
    (64, 8, 4096),
    (64, 16, 4352),
    (64, 64, 4096),
    (64, 128, 8192),
    (64, 256, 1024),
    (32, 8, 4096),
    (16, 64, 4096),
]:
    if time.time() - t0 > float(sys.argv[2]):
        break
    o = {"default": D}
    for tile, w, st in [(64, 4, 3), (32, 4, 5), (64, 8, 5), (128, 8, 3), (128, 4, 3), (32, 2, 5)]:
        o[f"t{tile}w{w}s{st}"] = ("split_kv", dict(tile=tile, num_warps=w, num_stages=st))
    go(hq, b, s, o)
    print("t", time.time() - t0)
json.dump(rows, open(sys.argv[1] + "/bench.json", "w"))
