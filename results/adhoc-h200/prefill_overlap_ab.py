"""prefill_overlap.py against the project's prefill kernel, and cuDNN and flash on contiguous KV: right first, then timed.

    PYTHONPATH=. python results/adhoc-h200/prefill_overlap_ab.py OUT.json
"""

import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))
import torch
import triton
from prefill_overlap import prefill_overlap

from experiments import provenance
from kernels import prefill
from kernels.prefill.triton_flash import LOG2_E
from kernels.timing import time_interleaved

TILES = [(128, 128, 8), (128, 64, 8)]  # block_m, block_n, warps
SHAPES = [(2, 32, 8, 4096, 4096), (2, 16, 8, 4096, 4096), (2, 64, 8, 4096, 4096), (1, 64, 8, 8192, 8192), (8, 32, 8, 16384, 256), (8, 64, 8, 16384, 256)]
RAGGED = [([1, 300, 17, 128], [1, 1000, 17, 4000], 32, 8), ([5, 130, 64], [500, 130, 127], 28, 4), ([700], [701], 16, 8)]


def inputs(queries, contexts, q_heads, kv_heads, block_size=16, head_dim=128):
    generator = torch.Generator("cuda").manual_seed(0)
    counts = [-(-context // block_size) for context in contexts]
    num_blocks = sum(counts) + 3
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    k, v = (make(num_blocks, block_size, kv_heads, head_dim) for _ in range(2))
    order = torch.randperm(num_blocks, device="cuda", generator=generator).int()
    table = torch.zeros(len(contexts), max(counts), dtype=torch.int32, device="cuda")
    start = 0
    for row, (count, context) in enumerate(zip(counts, contexts)):
        blocks = order[start : start + count]
        table[row, :count] = blocks
        if context % block_size:  # unwritten memory
            for cache in (k, v):
                cache[blocks[-1].long(), context % block_size :] = float("nan")
        start += count
    q = make(sum(queries), q_heads, head_dim)
    lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    locs = torch.tensor([0, *queries], dtype=torch.int32, device="cuda").cumsum(0).int()
    return q, k, v, table, lens, locs, max(queries)


def overlap(tile, case, out):
    q, k, v, table, lens, locs, longest = case
    block_m, block_n, warps = tile
    group = q.shape[1] // k.shape[2]
    prefill_overlap[(triton.cdiv(longest, block_m // group), k.shape[2], len(lens))](
        q, k, v, out, table, lens, locs, LOG2_E / math.sqrt(q.shape[2]), *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        *out.stride()[:2], table.stride(0), GROUP=group, HEAD_DIM=q.shape[2], BLOCK_SIZE=k.shape[1], BLOCK_M=block_m,
        BLOCK_N=block_n, num_warps=warps,
    )
    return out


def contiguous(case, q_heads, kv_heads, context, batch):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = case[0].view(batch, context, q_heads, -1).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, context, q.shape[3], device="cuda", dtype=q.dtype) for _ in range(2))

    def call_of(backend):
        def call():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    return {"cudnn": [call_of(SDPBackend.CUDNN_ATTENTION)], "flash": [call_of(SDPBackend.FLASH_ATTENTION)]}


def error(case, tile):
    """Largest difference from the project's kernel, whose own from fp32 its tests bound."""
    wanted = prefill.get("triton")(*case)
    out = overlap(tile, case, torch.full_like(wanted, float("nan")))
    return (out.float() - wanted.float()).abs().max().item()


def main():
    device, rows, errors = torch.device("cuda"), [], []
    before = provenance.capture(device, seed=0, overrides=[], device_name=torch.cuda.get_device_name(), cwd=Path.cwd())
    for queries, contexts, q_heads, kv_heads in RAGGED:
        for tile in TILES:
            errors.append([queries, contexts, q_heads, kv_heads, tile, error(inputs(queries, contexts, q_heads, kv_heads), tile)])
            print(*errors[-1], flush=True)
    for batch, q_heads, kv_heads, context, queries in SHAPES:
        case = inputs([queries] * batch, [context] * batch, q_heads, kv_heads)
        calls = {"triton": [lambda case=case, out=torch.empty_like(case[0]): prefill.get("triton")(*case, out=out)]}
        for tile in TILES:
            found = error(case, tile)
            errors.append([batch, q_heads, kv_heads, context, queries, tile, found])
            if not found < 0.03:
                print("WRONG", tile, found)
                continue
            calls[f"overlap {tile}"] = [lambda case=case, tile=tile, out=torch.empty_like(case[0]): overlap(tile, case, out)]
        if queries == context:
            calls |= contiguous(case, q_heads, kv_heads, context, batch)
        flops = batch * q_heads * 128 * 4 * (queries * (context - queries) + queries * (queries + 1) / 2)
        print(batch, q_heads, kv_heads, context, queries)
        for name, timings in time_interleaved(calls, device=device, cache_state="hot", rounds=3).items():
            us = sorted(timing.median for timing in timings)[1]
            rows.append([batch, q_heads, kv_heads, context, queries, name, us, flops / us / 1e6])
            print(f"   {name:24s} {us:9.1f} us {flops / us / 1e6:7.1f} TFLOP/s", flush=True)
    record = before | {"gpu_after": provenance.gpu_state(device), "throttled_after": provenance.is_throttled(device)}
    Path(sys.argv[1]).write_text(json.dumps({"errors": errors, "rows": rows, "provenance": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
