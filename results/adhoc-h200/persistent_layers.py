"""A decode step's layers, separate kernels against one launch (kernels/persistent), interleaved in CUDA graphs.

    python results/adhoc-h200/persistent_layers.py OUT_FOLDER SECONDS [--models qwen3_0_6b qwen3_8b qwen3_32b]

Dummy weights of the real shapes; embedding and last norm included, head and sampling not. A row of persistent_layers.jsonl:
model, rows, context, tile, microseconds a layer (raw samples of whole steps beside it), the largest difference from the
separate kernels' hidden states, relative to their largest. The first rows are layers too small to take time, for what a
phase costs by itself. --device cpu --models tiny_qwen3 --num-programs 8 tries it in the interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import yaml

from engine.config import EngineConfig
from engine.execution.kernel_choice import choose_kernels
from engine.execution.loader import load_model
from engine.layers.attention_metadata import AttentionMetadata
from engine.models.checkpoint import resolve_model
from engine.models.decoder import Decoder, layer_shape
from engine.parallel.group import ParallelGroup
from experiments import provenance
from experiments.devices import device_name
from kernels import timing
from kernels.decode.contract import DecodeProblem
from kernels.persistent import LayerShape, LayerTile, PersistentLayers
from tests.kernels.persistent_case import Step, random_layers

TILES = {
    "default": LayerTile(),
    "numel 8192": LayerTile(numel=8192),
    "numel 8192 k 1024": LayerTile(numel=8192, block_k=1024),
    "k 1024": LayerTile(block_k=1024),
    "16 warps": LayerTile(num_warps=16),
    "16 warps numel 8192": LayerTile(numel=8192, num_warps=16),
}
POINTS = [(1, 1040), (2, 1040), (2, 8448), (1, 24576)]
BLOCK_SIZE = 16


def load(name: str, device: torch.device) -> Decoder:
    config = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())["config"]
    source = resolve_model(config, "dummy")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = EngineConfig(device=device.type, use_triton=True, load_format="dummy")
    kernels = choose_kernels(engine, device, hidden_size=source.config.hidden_size, dtype=dtype)
    return load_model(
        source, load_format="dummy", device=device, dtype=dtype, group=ParallelGroup.single(), kernels=kernels, seed=0
    )


def step_of(model: Decoder, rows: int, context: int) -> tuple[Any, ...]:
    """The arguments of Decoder.forward for a decode step, its cache full of small random keys and values."""
    config, device, dtype = model.config, model.norm.weight.device, model.norm.weight.dtype
    per_row = -(-context // BLOCK_SIZE)
    order = torch.randperm(rows * per_row, device=device).view(rows, per_row).int()
    size = (config.num_layers, 2, rows * per_row, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_cache = torch.empty(size, dtype=dtype, device=device).normal_()
    lens = torch.full((rows,), context, dtype=torch.int32, device=device)
    problem = DecodeProblem(
        rows, config.num_q_heads, config.num_kv_heads, config.head_dim, BLOCK_SIZE, context, dtype, device, context
    )
    kernel = model.layers[0].self_attn.kernels.decode
    slots = order[:, (context - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        slots, rows, order, lens, kernel.plan(problem), kernel.workspace(problem, device),
        0, order[:0], nothing, torch.zeros(1, dtype=torch.int32, device=device), 0,
    )
    ids = torch.arange(rows, device=device) + 17
    positions = torch.full((rows,), context - 1, device=device)
    return ids, positions, metadata, kv_cache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--models", nargs="+", default=["qwen3_0_6b", "qwen3_8b", "qwen3_32b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-programs", type=int)
    args = parser.parse_args()
    start, device = time.time(), torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    record = provenance.capture(
        device, seed=0, overrides=sys.argv[1:], device_name=device_name(device), cwd=Path.cwd()
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "persistent_layers-provenance.json").write_text(json.dumps(record, indent=1))
    with (args.out / "persistent_layers.jsonl").open("w") as file:

        def measure(about: dict[str, Any], num_layers: int, calls: dict[str, Any], errors: dict[str, float]) -> None:
            options = {"device": device, "cache_state": "hot", "rounds": 4, "samples": 4}
            found = timing.time_interleaved({name: [call] for name, call in calls.items()}, **options)
            for name, rounds in found.items():
                median = statistics.median(t.median for t in rounds)
                row = about | {"variant": name, "us_a_layer": median / num_layers, "error": errors.get(name)}
                file.write(json.dumps(row | {"samples_us": [t.samples_us for t in rounds]}) + "\n")
                print(*about.values(), name, f"{median / num_layers:.2f} us a layer, error {errors.get(name)}",
                      f"[{time.time() - start:.0f}]", flush=True)
            file.flush()

        tiny = LayerShape(64, 64, 8, 8, 16, 1e-6, qk_norm=True, attention_bias=False, mlp_bias=False)
        layers = PersistentLayers(tiny, random_layers(tiny, 64, device=device), num_programs=args.num_programs,
                                  tile=LayerTile(numel=1024, block_k=64))
        step = Step.random(tiny, 64 if device.type == "cuda" else 1, [16], device=device) if device.type == "cuda" else None
        if step is not None:
            try:
                measure({"model": "six phases of nothing", "rows": 1, "context": 16}, 64, {"tiny": lambda: step.run(layers)}, {})
            except Exception as reason:
                print("FAILED six phases of nothing", repr(reason)[:300])
        for name in args.models:
            model = load(name, device)
            num_layers = model.config.num_layers
            weights = [layer.persistent_weights() for layer in model.layers]
            for rows, context in POINTS if device.type == "cuda" else [(1, 40)]:
                if time.time() - start > args.seconds:
                    print("no time:", name, rows, context)
                    continue
                arguments = step_of(model, rows, context)
                with torch.inference_mode():
                    model._persistent = None
                    expected = model(*arguments).float()
                    calls: dict[str, Any] = {"separate": lambda: model(*arguments)}
                    errors = {}
                    for label, tile in (TILES if device.type == "cuda" else {"default": None}).items():
                        try:
                            persistent = PersistentLayers(
                                layer_shape(model.config), weights, num_programs=args.num_programs, tile=tile
                            )
                            ids, positions, metadata, kv_cache = arguments

                            def call(persistent=persistent):
                                stream = model.embed_tokens(ids)
                                persistent(stream, positions, model.rotary_emb.cos_sin, kv_cache,
                                           metadata.decode_block_table, metadata.decode_context_lens,
                                           metadata.slot_mapping)
                                return model.norm(stream)

                            error = (call().float() - expected).abs().max() / expected.abs().max()
                            errors[label], calls[label] = round(float(error), 5), call
                            if not error < 0.1:
                                del calls[label]
                                print("WRONG", name, rows, context, label, float(error))
                        except Exception as reason:
                            print("FAILED", name, rows, context, label, repr(reason)[:300])
                    about = {"model": name, "rows": rows, "context": context}
                    if device.type == "cuda":
                        measure(about | {"num_layers": num_layers}, num_layers, calls, errors)
                    else:
                        print(about, errors)
                del arguments, calls
            del model, weights
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
