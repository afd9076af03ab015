"""The columns of a row: names, units (in the names) and types. What does not apply to a row is null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Status = Literal["ok", "incorrect", "oom", "error", "timeout", "unsupported", "not_timed"]
STATUSES: tuple[str, ...] = get_args(Status)

# A run with any of these ends with a non-zero exit code; "unsupported" and "not_timed" are known limits.
FAILURES = frozenset({"incorrect", "oom", "error", "timeout"})

# The contract of the project, in order. Types are pandas dtypes that hold nulls.
CONTRACT: dict[str, str] = {
    "run_id": "string",
    "point_id": "string",
    "suite": "string",
    "status": "string",
    "error": "string",
    "device_name": "string",
    "dtype": "string",
    "model": "string",
    "load_format": "string",
    "tp": "Int64",
    "decode_attention": "string",
    "prefill_attention": "string",
    "block_size": "Int64",
    "num_q_heads": "Int64",
    "num_kv_heads": "Int64",
    "head_dim": "Int64",
    "batch_size": "Int64",
    "context_len": "Int64",
    "output_len": "Int64",
    "cache_state": "string",
    "round": "Int64",
    "time_us": "float64",
    "time_us_low": "float64",
    "time_us_high": "float64",
    "samples_us": "object",
    "bytes": "Int64",
    "flops": "Int64",
    "floor_us": "float64",
    "roofline_fraction": "float64",
    "max_rel_err": "float64",
    "prompt_tokens": "Int64",
    "output_tokens": "Int64",
    "cached_tokens": "Int64",
    "hit_rate": "float64",
    "prefill_s": "float64",
    "decode_s": "float64",
    "prefill_tok_s": "float64",
    "decode_tok_s": "float64",
    "step_ms": "float64",
    "ttft_ms_p50": "float64",
    "ttft_ms_p99": "float64",
    "tpot_ms_p50": "float64",
    "tpot_ms_p99": "float64",
    "num_preemptions": "Int64",
    "peak_memory_bytes": "Int64",
    "timing_method": "string",
    "throttled": "boolean",
}

# Further columns of the suites here.
EXTRAS: dict[str, str] = {
    "level": "string",  # "kernel", "step" or "workload": how much of the system the time covers
    "variant": "string",  # what is compared: a kernel, or a kernel with options, by the name the user gave it
    "engine_pass": "Int64",  # which of its turns an engine made the row in: see passes.py
    "point_row": "Int64",  # 0 .. point_rows - 1: a point is finished when all its rows are there
    "point_rows": "Int64",
    "size": "string",
    "note": "string",
    "operation": "string",  # elementwise suites
    "query_len": "Int64",  # prefill: new tokens of each sequence
    "plan_us": "float64",  # host time of the kernel's plan
    "collective_us": "float64",  # of a decode step, in collectives on rank 0, waiting for the others included
    "collective_step_us": "float64",  # of the same steps, which over NCCL run under a profiler: not those of time_us
    "collective_share": "float64",  # of the two
    "tolerance": "float64",  # of max_rel_err
    "mean_context_len": "float64",  # measured, where context_len is what was asked for
    "tokens_checked": "Int64",
    "tokens_excused": "Int64",  # greedy tokens that differ where the reference's top-2 margin is below tolerance
}
COLUMNS: dict[str, str] = CONTRACT | EXTRAS


def make_row(extra_columns: Mapping[str, str] = {}, /, **values: Any) -> dict[str, Any]:
    """A row with every column of the contract and of extra_columns, null where `values` is silent.

    extra_columns: names and pandas dtypes of columns that only the caller's suite has.
    Raises ValueError for a column that is not declared and for a status that does not exist.
    """
    unknown = sorted(set(values) - set(COLUMNS) - set(extra_columns))
    if unknown:
        raise ValueError(f"unknown column(s) {', '.join(unknown)}; declare them in the suite's `columns`")
    if values.get("status") not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {values.get('status')!r}")
    return dict.fromkeys([*COLUMNS, *extra_columns]) | values
