import sys, json, time, torch
from torch.nn import functional as F
from kernels import timing
from kernels.linear import few_rows_linear, RowTile

dev = torch.device("cuda:0")
t0 = time.time()
rows = []
S = {
    "0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    "8B": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    "32B": [(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)],
}
for m, vs in (
    (
        1,
        [
            (2, 1024, 4),
            (4, 512, 4),
            (4, 1024, 4),
            (4, 1024, 8),
            (8, 512, 4),
            (8, 1024, 8),
            (16, 256, 4),
            (4, 2048, 8),
        ],
    ),
    (2, [(4, 512, 4), (8, 256, 4)]),
    (4, [(4, 512, 4), (4, 256, 4), (8, 256, 4)]),
):
    for name, shapes in S.items():
        if time.time() - t0 > float(sys.argv[2]):
            break
        for n, k in shapes:
            sets = timing.num_input_sets(n * k * 2, dev, "cold")
            ws = [torch.randn(n, k, device=dev, dtype=torch.bfloat16) for _ in range(sets)]
            x = torch.randn(m, k, device=dev, dtype=torch.bfloat16)
            var = {"torch": [(lambda w=w: F.linear(x, w)) for w in ws]}
            for v in vs:
                if v[1] > k * 1.5:
                    continue
                t = RowTile(*v)
                var[str(v)] = [(lambda w=w, t=t: few_rows_linear(x, w, None, t)) for w in ws]
            res = timing.time_interleaved(var, device=dev, cache_state="cold", rounds=2, samples=3)
            out = sorted((round(min(t.median for t in ts), 2), l) for l, ts in res.items())
            print(
                m,
                name,
                n,
                k,
                "floor",
                round(n * k * 2 / 4.424e6, 2),
                " ".join(f"{l}={t}" for t, l in out[:5]),
                "torch",
                [t for t, l in out if l == "torch"][0],
                flush=True,
            )
            rows.append(
                dict(m=m, model=name, n=n, k=k, res={l: [t.samples_us for t in ts] for l, ts in res.items()})
            )
            del ws, var
json.dump(rows, open(sys.argv[1] + "/linear.json", "w"))
print("t", time.time() - t0)
