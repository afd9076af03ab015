"""A/B of a decode step's layers on one GPU: separate kernels, fused ones, and fused ones with dependent launch.

    PYTHONPATH=. python results/adhoc-h200/fused_layer_ab.py OUT_FOLDER [SECONDS=75]

1. Eight processes compile the tiles and check every product against fp32 (wrong ones are printed and not timed).
2. tiles.json: each product of a layer alone, cold, with dependent launch, every tile and cuBLAS.
3. layers.json: several layers with weights of their own in one CUDA graph, with the best tiles of 2; every variant's
   output against the separate kernels' first, and PDL's bits against those without it over 20 replays.
DRY=1 runs the same on a CPU in Triton's interpreter with small shapes, to test the script.
"""

import json
import os
import subprocess
import sys
import time

t0 = time.time()
DRY = os.environ.get("DRY") == "1"
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
import torch
from torch.nn import functional as F

import kernels.fused_linear as fl
from engine.layers.attention_metadata import AttentionMetadata, KernelChoice
from engine.layers.fusion import NO_FUSION, LayerFusion
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.parallel.group import ParallelGroup
from kernels import decode, prefill, timing
from kernels.activation import silu_mul
from kernels.decode import DecodeProblem
from kernels.norm import rms_norm

OUT, LIMIT = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2] != "warm" else 75.0
dev = torch.device("cpu" if DRY else "cuda:0")
PDL = not DRY
ROUNDS = 1 if DRY else 3
EPS = 1e-6
# The engine's default where it has one.
KERNEL = "planned" if "planned" in decode.available(dev) else "split_kv"
CONTEXT = 40 if DRY else 1040
GB_S = 4424.0
# hidden, query heads, intermediate; layers timed (5 L2s of weights at least), layers of the model, us of the head
MODELS = {
    "0.6B": (1024, 16, 3072, 12, 28, 75),
    "8B": (4096, 32, 12288, 3, 36, 300),
    "32B": (5120, 64, 25600, 3, 64, 372),
}
HEAD_DIM, KV_HEADS = 128, 8
if DRY:
    MODELS, HEAD_DIM, KV_HEADS = {"tiny": (64, 4, 96, 2, 4, 10)}, 16, 2
REST_US = 60  # embedding, last norm, sampling, state: engine_profile.txt


def products(name):
    hidden, heads, inter = MODELS[name][:3]
    qkv = (heads + 2 * KV_HEADS) * HEAD_DIM
    return {
        "qkv": (qkv, hidden, "norm"),
        "o": (hidden, heads * HEAD_DIM, "add"),
        "gate_up": (2 * inter, hidden, "norm"),
        "down": (hidden, inter, "gated"),
    }


PLAIN = {
    1: [(4, 1024, 4), (8, 1024, 4), (2, 1024, 4), (8, 512, 4), (2, 2048, 4), (8, 2048, 8)],
    2: [(4, 1024, 4), (8, 512, 4)],
    4: [(4, 512, 4), (8, 512, 4)],
}
DOT = [(8, 512, 1, 4), (16, 256, 2, 6), (16, 512, 2, 4), (32, 256, 4, 4), (32, 128, 4, 6), (64, 128, 4, 5)]
if DRY:
    PLAIN, DOT = {1: [(4, 32, 4)], 2: [(4, 64, 4)], 4: []}, [(16, 32, 2, 3)]


def candidates(k, rows):
    """label -> tile of a product with k inputs."""
    found = {}
    for t in PLAIN.get(rows, ()):
        if t[1] < 1.5 * k:
            found["p" + "x".join(map(str, t))] = fl.PlainTile(*t)
    if rows in (2, 16):
        found |= {"d" + "x".join(map(str, t)): fl.DotTile(*t) for t in DOT if t[1] < 1.5 * k}
    return found


class Case:
    """One product's inputs. call: with a tile, in the layer's own form; on the tensor cores without prologue."""

    def __init__(self, n, k, kind, rows):
        r = lambda *s: torch.randn(*s, device=dev, dtype=torch.bfloat16)
        self.kind, self.k = kind, k
        self.x = r(rows, 2 * k if kind == "gated" else k)
        self.bare = self.x[:, :k].contiguous()
        self.g, self.out = 1 + 0.1 * r(k), r(rows, n)

    def call(self, w, tile, pdl):
        if isinstance(tile, fl.DotTile):
            if self.kind == "norm":
                return fl.dot_linear(self.bare, w, tile=tile, pdl=pdl)
            return fl.add_linear(self.bare, w, self.out, tile=tile, pdl=pdl)
        if self.kind == "norm":
            return fl.norm_linear(self.x, self.g, EPS, w, tile=tile, pdl=pdl)
        if self.kind == "gated":
            return fl.gated_linear(self.x, w, self.out, tile=tile, pdl=pdl)
        return fl.add_linear(self.x, w, self.out, tile=tile, pdl=pdl)

    def error(self, w, tile, pdl):
        """Norm of the difference to fp32 over the norm of the product."""
        x = self.bare
        if not isinstance(tile, fl.DotTile) and self.kind == "norm":
            x = rms_norm(self.x, self.g, EPS, use_triton=False)
        elif not isinstance(tile, fl.DotTile) and self.kind == "gated":
            x = silu_mul(self.x, use_triton=False)
        exact = x.float() @ w.float().T
        if self.kind == "norm":
            got = self.call(w, tile, pdl).float()
        else:
            before = self.out.clone()
            self.call(w, tile, pdl)
            got, self.out = self.out.float() - before.float(), before
        return ((got - exact).norm() / exact.norm()).item()


def warm(index, count):
    """Compile and check this process' share of the tiles: {label: error} of the wrong ones."""
    wrong, seen = {}, 0
    for name in MODELS:
        for what, (n, k, kind) in products(name).items():
            w = torch.randn(n, k, device=dev, dtype=torch.bfloat16) * k**-0.5
            for rows in (1, 2, 4, 16):
                for label, tile in candidates(k, rows).items():
                    # By tile, so that no two processes compile the same.
                    seen = sum(map(ord, f"{label}{min(rows, 4) if label[0] == 'p' else kind}"))
                    if seen % count != index:
                        continue
                    for pdl in {False, PDL}:
                        try:
                            e = Case(n, k, kind, rows).error(w, tile, pdl)
                        except Exception as x:
                            e = repr(x)[:200]
                        if not isinstance(e, float) or not e < 2e-2:
                            wrong[f"{name} {what} {rows} {label} pdl {pdl}"] = e
            del w
    json.dump(wrong, open(f"{OUT}/.wrong{index}.json", "w"))


if "warm" in sys.argv:
    warm(int(sys.argv[-2]), int(sys.argv[-1]))
    sys.exit()

os.makedirs(OUT, exist_ok=True)
count = 1 if DRY else 8
workers = [
    subprocess.Popen([sys.executable, __file__, OUT, "warm", str(i), str(count)]) for i in range(count)
]
for worker in workers:
    worker.wait()
wrong = {}
for i in range(count):
    path = f"{OUT}/.wrong{i}.json"
    wrong |= json.load(open(path)) if os.path.exists(path) else {f"process {i}": "ended without a result"}
    os.path.exists(path) and os.remove(path)
print(KERNEL, end=" ")
print("WRONG" if wrong else "all products right", wrong, f"t {time.time() - t0:.0f}", flush=True)

# --- 2. tiles ------------------------------------------------------------------------------------------------------

best, tile_rows = {}, []
for name in MODELS:
    for what, (n, k, kind) in products(name).items():
        if time.time() - t0 > 0.55 * LIMIT:
            print("no time for tiles of", name, what)
            continue
        sets = timing.num_input_sets(2 * n * k, dev, "cold")
        ws = [torch.randn(n, k, device=dev, dtype=torch.bfloat16) * k**-0.5 for _ in range(sets)]
        for rows in (1, 2, 16):
            case = Case(n, k, kind, rows)
            var = {"torch": [(lambda w=w: F.linear(case.bare, w)) for w in ws]}
            tiles = candidates(k, rows)
            for label, tile in tiles.items():
                if not any(f"{name} {what} {rows} {label} pdl {p}" in wrong for p in (False, True)):
                    var[label] = [(lambda w=w, t=tile: case.call(w, t, PDL)) for w in ws]
            default = fl.choose_plain_tile(n, k, rows) if rows <= 2 else fl.choose_dot_tile(n, k)
            var["default, no pdl"] = [(lambda w=w: case.call(w, default, False)) for w in ws]
            try:
                res = timing.time_interleaved(var, device=dev, cache_state="cold", rounds=2, samples=2)
            except Exception as x:
                print("FAILED", name, what, rows, repr(x)[:300])
                continue
            med = {l: min(t.median for t in ts) for l, ts in res.items()}
            order = sorted(med, key=med.get)
            for letter, key in (("p", (n, k, rows)), ("d", (n, k, rows))):
                of = [l for l in order if l in tiles and l[0] == letter]
                if of:
                    best[letter, *key] = tiles[of[0]]
            floor = 2 * n * k / GB_S / 1e3
            show = [*order[:4], *(l for l in order[4:] if l in ("torch", "default, no pdl"))]
            print(
                f"{name} {what} {n}x{k} m{rows} floor {floor:.1f}:",
                *[f"{l}={med[l]:.1f}" for l in show],
                flush=True,
            )
            tile_rows.append(
                dict(
                    model=name,
                    product=what,
                    n=n,
                    k=k,
                    kind=kind,
                    rows=rows,
                    floor_us=floor,
                    default=str(default),
                )
                | dict(samples_us={l: [t.samples_us for t in ts] for l, ts in res.items()})
            )
            json.dump(tile_rows, open(f"{OUT}/tiles.json", "w"))
        del ws, var
        if not DRY:
            torch.cuda.empty_cache()
print(f"t {time.time() - t0:.0f}", flush=True)

# --- 3. layers -----------------------------------------------------------------------------------------------------

plain_default, dot_default = fl.choose_plain_tile, fl.choose_dot_tile
fl.choose_plain_tile = lambda n, k, rows: best.get(("p", n, k, min(rows, 2))) or plain_default(n, k, rows)


def model(name, layers):
    hidden, heads, inter = MODELS[name][:3]
    config = ModelConfig.from_hf(
        dict(
            architectures=["Qwen3ForCausalLM"],
            model_type="qwen3",
            vocab_size=256,
            hidden_size=hidden,
            head_dim=HEAD_DIM,
        )
        | dict(intermediate_size=inter, num_hidden_layers=layers, num_attention_heads=heads, rms_norm_eps=EPS)
        | dict(num_key_value_heads=KV_HEADS, hidden_act="silu", max_position_embeddings=4096, rope_theta=1e6)
        | dict(attention_bias=False, tie_word_embeddings=False, eos_token_id=0, dtype="bfloat16")
    )
    choice = KernelChoice(decode.get(KERNEL), prefill.get("torch"), use_triton=True)
    made = Decoder(config, group=ParallelGroup.single(), kernels=choice, dtype=torch.bfloat16, device=dev)
    for parameter in made.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() == 2 else parameter.fill_(1.0)
    return made, config


class Step:
    """The layers' share of a decode step of `rows` sequences of CONTEXT tokens."""

    def __init__(self, made, config, rows):
        blocks = -(-CONTEXT // 16)
        self.made, self.rows = made, rows
        self.cache = torch.randn(
            config.num_layers, 2, rows * blocks, 16, KV_HEADS, HEAD_DIM, device=dev, dtype=torch.bfloat16
        )
        table = torch.randperm(rows * blocks, device=dev).int().view(rows, blocks)
        last = CONTEXT - 1
        kernel = decode.get(KERNEL)
        problem = DecodeProblem(rows, config.num_q_heads, KV_HEADS, HEAD_DIM, 16, 64 if DRY else 2048, torch.bfloat16, dev)
        empty = torch.empty(0, dtype=torch.int32, device=dev)
        self.metadata = AttentionMetadata(
            slot_mapping=table[:, last // 16].long() * 16 + last % 16,
            num_decodes=rows,
            decode_block_table=table,
            decode_context_lens=torch.full((rows,), CONTEXT, dtype=torch.int32, device=dev),
            decode_plan=kernel.plan(problem),
            decode_workspace=kernel.workspace(problem, dev),
            num_prefill_tokens=0,
            prefill_block_table=empty.view(0, 0),
            prefill_context_lens=empty,
            query_start_loc=empty,
            max_query_len=0,
        )
        self.positions = torch.full((rows,), last, dtype=torch.int64, device=dev)
        self.x = torch.randn(rows, config.hidden_size, device=dev, dtype=torch.bfloat16)
        self.qkv = torch.randn(
            rows, (config.num_q_heads + 2 * KV_HEADS) * HEAD_DIM, device=dev, dtype=torch.bfloat16
        )

    def run(self, fusion):
        hidden, residual = self.x.clone(), None
        for layer, cache in zip(self.made.layers, self.cache.unbind(0)):
            layer.fusion = fusion
            hidden, residual = layer(
                hidden, residual, self.positions, self.made.rotary_emb, self.metadata, cache
            )
        return hidden if residual is None else hidden + residual

    def attend(self, pdl):
        for layer, cache in zip(self.made.layers, self.cache.unbind(0)):
            out = layer.self_attn.attend(
                self.qkv, self.positions, self.made.rotary_emb, self.metadata, cache, pdl=pdl
            )
        return out


def same_bits(step, fusion, expected):
    """Whether 20 replays of a graph give the very output of the same kernels without dependent launch."""
    if DRY:
        return True
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run(fusion)
    for _ in range(20):
        graph.replay()
        if not torch.equal(out, expected):
            return False
    return True


def variants(rows):
    most = fl.MAX_ROWS
    found = {"separate": NO_FUSION, "epilogue": LayerFusion(most), "epilogue+pdl": LayerFusion(most, pdl=PDL)}
    found["epilogue+pdl, wide by cuBLAS"] = LayerFusion(most, max_dot_outputs=0, pdl=PDL)
    if rows <= fl.MAX_PLAIN_ROWS:
        found |= {"fused": LayerFusion(most, rows), "fused+pdl": LayerFusion(most, rows, pdl=PDL)}
    return found


layer_rows = []
with torch.inference_mode():
    for name, (hidden, heads, inter, layers, total, head_us) in MODELS.items():
        if time.time() - t0 > 0.92 * LIMIT:
            print("no time for layers of", name)
            continue
        made, config = model(name, layers)
        for rows in (1, 2) if DRY else (1, 2, 4, 8, 16):
            if time.time() - t0 > LIMIT:
                print("no time for", name, rows)
                break
            of = 2 if rows <= 2 else 16
            fl.choose_dot_tile = lambda n, k, size, of=of: best.get(("d", n, k, of)) or dot_default(n, k)
            step = Step(made, config, rows)
            reference = step.run(NO_FUSION).float()
            var, bad, eager = {}, {}, {}
            for label, fusion in variants(rows).items():
                try:
                    out = step.run(fusion)
                    e = ((out.float() - reference).norm() / reference.norm()).item()
                    assert e < 2e-2, f"error {e}"
                    eager[label] = out
                    plain = label.split("+")[0]
                    if "+pdl" in label and "cuBLAS" not in label:
                        assert same_bits(step, fusion, eager[plain]), "PDL changes bits"
                    elif label != "separate":
                        assert same_bits(step, fusion, out), "replays change bits"
                    var[label] = [lambda fusion=fusion: step.run(fusion)]
                except Exception as x:
                    bad[label] = repr(x)[:300]
            var["attention"] = [lambda: step.attend(False)]
            var["attention+pdl"] = [lambda: step.attend(PDL)]
            res = timing.time_interleaved(var, device=dev, cache_state="hot", rounds=ROUNDS, samples=ROUNDS)
            us = {l: min(t.median for t in ts) / layers for l, ts in res.items()}
            weights = 2 * sum(n * k for n, k, _ in products(name).values())
            floor = (weights + 4 * rows * CONTEXT * KV_HEADS * HEAD_DIM) / GB_S / 1e3
            whole = {l: t for l, t in us.items() if "attention" not in l}
            winner = min(whole, key=whole.get)
            ms = {l: (total * whole[l] + head_us + REST_US) / 1e3 for l in ("separate", winner)}
            print(f"{name} rows {rows} us/layer floor {floor:.1f}:", *[f"{l}={t:.1f}" for l, t in us.items()])
            print(
                f"   BEST {winner}; step about {ms['separate']:.2f} -> {ms[winner]:.2f} ms",
                bad or "",
                flush=True,
            )
            layer_rows.append(
                dict(
                    model=name,
                    rows=rows,
                    context=CONTEXT,
                    layers=layers,
                    floor_us=floor,
                    bad=bad,
                    best=winner,
                )
                | dict(
                    cache_state="cold: layers rotate",
                    method=res["separate"][0].method,
                    us_per_layer=us,
                    step_ms=ms,
                )
                | dict(samples_us_all_layers={l: [t.samples_us for t in ts] for l, ts in res.items()})
                | dict(tiles={" ".join(map(str, key)): str(tile) for key, tile in best.items()})
            )
            json.dump(layer_rows, open(f"{OUT}/layers.json", "w"))
            del step, var, eager
        del made
        if not DRY:
            torch.cuda.empty_cache()
print(f"t {time.time() - t0:.0f}")
