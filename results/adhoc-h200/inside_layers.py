"""Norms and SwiGLU inside the products of few rows (layer_fusion=inside) against kernels of their own, in CUDA graphs.

    python results/adhoc-h200/inside_layers.py OUT_FOLDER SECONDS [--models qwen3_8b qwen3_32b]

Writes inside_layers.jsonl, a row a variant, and its provenance. "layers": embedding, all layers and the last norm;
"step": the head and an argmax too. Both are whole steps of the real shapes, but the layers' weights are those of
DISTINCT layers in turn, far more bytes than the L2 holds, which saves loading 64 of them. Variants, interleaved:
separate kernels; epilogue (what "auto" takes where it was faster: the residual inside o and down); inside, by tile of
the two products. "product": qkv and gate_up alone, cold, each with what stands around it: cuBLAS or dot_linear of
normed rows without norm and activation (plain), the same with both as kernels of their own (separate), and inside.
error: the largest difference from the separate kernels relative to their largest; 0.05 of a product and 0.2 of all
layers is wrong, and not timed. Ends within SECONDS: what would take longer is left out by name.
TRITON_INTERPRET=1 and --device cpu --models tiny_qwen3 try it without a GPU, with one sample a variant.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import yaml
from persistent_layers import step_of
from torch import Tensor, nn
from torch.nn import functional

from engine.config import EngineConfig
from engine.execution.kernel_choice import choose_kernels
from engine.execution.loader import load_model
from engine.layers.fusion import NO_FUSION, LayerFusion, measured_fusion
from engine.models.checkpoint import resolve_model
from engine.models.decoder import Decoder
from engine.parallel.group import ParallelGroup
from experiments import provenance
from experiments.devices import device_name
from kernels import timing
from kernels.activation import silu_mul
from kernels.fused_linear import MAX_ROWS, DotTile, Norm, dot_linear
from kernels.norm import rms_norm

DISTINCT = 8
POINTS = {
    "qwen3_8b": [(16, 4096), (2, 1040), (4, 1040), (8, 1040), (16, 1040)],
    "qwen3_32b": [(16, 1040), (4, 1040), (2, 1040), (8, 1040)],
    "tiny_qwen3": [(2, 40), (3, 40)],
}
PRODUCT_ROWS = (2, 16)
TILES = [
    DotTile(32, 128, 2, 7),
    DotTile(32, 256, 4, 4),
    DotTile(64, 256, 4, 3),
    DotTile(32, 256, 2, 4),
    DotTile(16, 256, 2, 6),
]
PLAIN_TILES = TILES[:2]
LIMITS = {"product": 0.05, "layers": 0.2}


@dataclasses.dataclass(frozen=True)
class InsideWith(LayerFusion):
    """Everything inside, with this tile for qkv and gate_up."""

    tile: DotTile | None = None

    def norm_linear(self, stream: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dot_linear(stream, weight, bias, norm=norm, tile=self.tile)

    def gated_linear(self, stream: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dot_linear(stream, weight, bias, norm=norm, gated=True, tile=self.tile)


FUSIONS: dict[str, LayerFusion] = {
    "separate": NO_FUSION,
    "epilogue": LayerFusion(max_rows=MAX_ROWS),
    "inside": LayerFusion(max_rows=MAX_ROWS, inside=True),
    "inside 32x256x4": InsideWith(max_rows=MAX_ROWS, inside=True, tile=DotTile(32, 256, 4, 4)),
    "inside 64x256x4": InsideWith(max_rows=MAX_ROWS, inside=True, tile=DotTile(64, 256, 4, 3)),
}


def load(name: str, device: torch.device) -> Decoder:
    """The model with all its layers, of which only DISTINCT have weights of their own."""
    config = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())["config"]
    num_layers = config["num_hidden_layers"]
    source = resolve_model(config | {"num_hidden_layers": min(DISTINCT, num_layers)}, "dummy")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = EngineConfig(device=device.type, use_triton=True, load_format="dummy")
    kernels = choose_kernels(engine, device, hidden_size=source.config.hidden_size, dtype=dtype)
    model = load_model(
        source,
        load_format="dummy",
        device=device,
        dtype=dtype,
        group=ParallelGroup.single(),
        kernels=kernels,
        seed=0,
    )
    model.layers = nn.ModuleList(model.layers[i % len(model.layers)] for i in range(num_layers))
    model.config = dataclasses.replace(model.config, num_layers=num_layers)
    return model


class Run:
    """The rows' file, and the time that is left."""

    def __init__(self, out: Path, seconds: float, device: torch.device) -> None:
        self.file = (out / "inside_layers.jsonl").open("w")
        self.start, self.seconds, self.device = time.monotonic(), seconds, device
        self.longest = 0.0

    def has_time(self, what: str, factor: float = 1.3) -> bool:
        """Whether something as long as the longest yet still ends in time; says so if not."""
        if time.monotonic() - self.start + factor * self.longest <= self.seconds:
            return True
        print(f"no time: {what}", flush=True)
        return False

    def measure(
        self,
        about: dict[str, Any],
        calls: dict[str, list[Callable[[], Any]]],
        outputs: dict[str, Callable[[], Tensor]],
        divide: int,
        state: timing.CacheState,
    ) -> None:
        """Check every output against the first, time the calls, write rows."""
        began = time.monotonic()
        errors, expected = {}, None
        for name, output in outputs.items():
            found = output().float()
            expected = found if expected is None else expected
            error = float((found - expected).abs().max() / expected.abs().max())
            errors[name] = error
            if not error < LIMITS[about["kind"]]:
                print("WRONG", about, name, error, flush=True)
                calls = {label: call for label, call in calls.items() if label.removeprefix("step ") != name}
        count = 4 if self.device.type == "cuda" else 1
        timed = timing.time_interleaved(
            calls, device=self.device, cache_state=state, rounds=count, samples=count
        )
        for name, rounds in timed.items():
            median = statistics.median(t.median for t in rounds)
            parts = 1 if name.startswith("step ") else divide
            row = about | {"variant": name, "us": median / parts, "divided_by": parts}
            row |= {"error": errors.get(name.removeprefix("step ")), "method": rounds[0].method}
            self.file.write(json.dumps(row | {"samples_us": [t.samples_us for t in rounds]}) + "\n")
            print(
                *about.values(),
                name,
                f"{median / parts:.2f} us",
                f"error {row['error']}",
                f"[{time.monotonic() - self.start:.0f}]",
                flush=True,
            )
        self.file.flush()
        self.longest = max(self.longest, time.monotonic() - began)


def measure_layers(run: Run, name: str, model: Decoder, rows: int, context: int) -> None:
    """us of "layers" are a layer's, those of "step ..." a whole step's."""
    arguments = step_of(model, rows, context)

    def forward(fusion: LayerFusion) -> Tensor:
        for layer in model.layers:
            layer.fusion = fusion
        return model(*arguments)

    def step(fusion: LayerFusion) -> Tensor:
        return model.compute_logits(forward(fusion)).argmax(-1)

    calls: dict[str, list[Callable[[], Any]]] = {}
    outputs: dict[str, Callable[[], Tensor]] = {}
    for label, fusion in FUSIONS.items():
        outputs[label] = lambda fusion=fusion: forward(fusion)
        calls[label] = [outputs[label]]
        if not isinstance(fusion, InsideWith):
            calls[f"step {label}"] = [lambda fusion=fusion: step(fusion)]
    auto = measured_fusion(model.config.hidden_size).applies(rows, rows)
    about = {"kind": "layers", "model": name, "rows": rows, "context": context, "auto_is_epilogue": auto}
    run.measure(about, calls, outputs, model.config.num_layers, "hot")


def measure_product(run: Run, name: str, model: Decoder, product: str, rows: int) -> None:
    layers = list(model.layers)[: min(DISTINCT, len(model.layers))]
    gated = product == "gate_up"
    modules = [layer.mlp.gate_up_proj if gated else layer.self_attn.qkv_proj for layer in layers]
    weights = [module.weight for module in modules]
    size = weights[0].numel() * weights[0].element_size()
    sets = timing.num_input_sets(size, run.device, "cold")
    weights += [weights[0].clone() for _ in range(sets - len(weights))]
    hidden, dtype = model.config.hidden_size, weights[0].dtype
    x = 3 * torch.randn(rows, hidden, device=run.device, dtype=dtype)
    norm = Norm(torch.rand(hidden, device=run.device, dtype=dtype) + 0.5, 1e-6)
    normed = rms_norm(x, *norm, use_triton=True)

    def separate(weight: Tensor) -> Tensor:
        out = dot_linear(rms_norm(x, *norm, use_triton=True), weight)
        return silu_mul(out, use_triton=True) if gated else out

    forms: dict[str, Callable[[Tensor], Tensor]] = {"separate": separate}
    for tile in TILES:
        label = f"inside {tile.block_n}x{tile.block_k} {tile.num_warps} warps {tile.num_stages} stages"
        forms[label] = lambda weight, tile=tile: dot_linear(x, weight, norm=norm, gated=gated, tile=tile)
    plain: dict[str, Callable[[Tensor], Tensor]] = {
        "plain cuBLAS": lambda weight: functional.linear(normed, weight)
    }
    for tile in PLAIN_TILES:
        label = f"plain {tile.block_n}x{tile.block_k} {tile.num_warps} warps {tile.num_stages} stages"
        plain[label] = lambda weight, tile=tile: dot_linear(normed, weight, tile=tile)
    calls = {
        label: [lambda form=form, weight=weight: form(weight) for weight in weights]
        for label, form in (forms | plain).items()
    }
    outputs = {label: lambda form=form: form(weights[0]) for label, form in forms.items()}
    about = {
        "kind": "product",
        "model": name,
        "rows": rows,
        "product": product,
        "shape": list(weights[0].shape),
    }
    run.measure(about, calls, outputs, 1, "cold")


def measure_model(run: Run, name: str) -> None:
    model = load(name, run.device)
    points = [partial(measure_layers, run, name, model, *point) for point in POINTS[name]]
    for product in ("gate_up", "qkv"):
        points += [partial(measure_product, run, name, model, product, rows) for rows in PRODUCT_ROWS]
    for point in points:
        what = " ".join(str(part) for part in point.args if isinstance(part, str | int))
        if not run.has_time(what):
            continue
        try:
            with torch.inference_mode():
                point()
        except Exception as reason:
            print("FAILED", what, repr(reason)[:400], flush=True)
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--models", nargs="+", default=["qwen3_8b", "qwen3_32b"], choices=list(POINTS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.out, args.seconds, device)
    record = provenance.capture(
        device, seed=0, overrides=sys.argv[1:], device_name=device_name(device), cwd=Path.cwd()
    )
    (args.out / "inside_layers-provenance.json").write_text(json.dumps(record, indent=1))
    for name in args.models:
        if run.has_time(name, 3.0):
            measure_model(run, name)
    print(f"done [{time.monotonic() - run.start:.0f}]")


if __name__ == "__main__":
    main()
