"""From raw rows to the table that is read: one line for each thing measured, medians, intervals, who wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments import stats

# What tells one line of the table from another; columns that are null throughout, or new to a suite, do no harm.
KEYS = (
    *("suite", "level", "model", "load_format", "dtype", "tp", "num_q_heads", "num_kv_heads", "head_dim"),
    *("block_size", "operation", "batch_size", "query_len", "context_len", "unique_len", "output_len"),
    *("arrivals", "request_rate", "temperature", "top_k", "top_p", "cache_state"),
)
SERIES = "variant"

# Speed-ups are over this variant where a comparison has it, else over the first one that was timed.
BASELINE = "single_pass"

_MEDIANS = (
    *("floor_us", "roofline_fraction", "max_rel_err", "plan_us", "step_ms", "prefill_tok_s", "decode_tok_s"),
    *("peak_memory_bytes", "tokens_checked", "tokens_excused"),
)


def summarise(
    rows: pd.DataFrame,
    keys: Sequence[str] = KEYS,
    medians: Sequence[str] = (),
    intervals: Sequence[str] = (),
) -> pd.DataFrame:
    """One line a combination of keys and variant: status, median time over the rounds with its 95% interval,
    speed-up over the baseline with its interval, and `fastest` where a winner is shown.

    medians: further columns of which the table is to hold the median; intervals: those of them that get an interval as
    well, NAME_low and NAME_high. A line whose rows have several statuses carries the worst. Lines that were not timed,
    or of which any row is incorrect, have null times.
    """
    keys = [key for key in keys if key in rows and rows[key].notna().any()]
    lines = []
    rows = _with_states(rows)
    for cell, group in rows.groupby(keys, dropna=False, sort=False):
        lines += _cell(dict(zip(keys, cell)), group, (*_MEDIANS, *medians), intervals)
    table = pd.DataFrame(lines)
    if table.empty:
        return table
    order = {variant: i for i, variant in enumerate(rows["variant"].drop_duplicates())}
    table["_order"] = table["variant"].map(order)
    sort = [key for key in keys if table[key].nunique() > 1]
    table = table.sort_values([*sort, "_order"], kind="stable", na_position="last").drop(columns="_order")
    return table.reset_index(drop=True)


def _with_states(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that were not timed carry no cache state: they stand beside the timed ones of their comparison."""
    return rows.assign(variant=rows[SERIES].fillna("-"))


def _cell(
    key: dict[str, Any], group: pd.DataFrame, medians: Sequence[str], intervals: Sequence[str]
) -> list[dict[str, Any]]:
    """The lines of one comparison."""
    variants = list(dict.fromkeys(group["variant"]))
    wrong = set(group.loc[group["status"] == "incorrect", "variant"])  # in one pass of an engine, say
    right = group[(group["status"] == "ok") & ~group["variant"].isin(wrong) & group["time_us"].notna()]
    timed = {variant: right[right["variant"] == variant] for variant in variants}
    samples = {name: frame.sort_values("round")["time_us"].tolist() for name, frame in timed.items()}
    samples = {name: times for name, times in samples.items() if times}
    baseline = BASELINE if BASELINE in samples else next(iter(samples), None)
    paired = len({len(times) for times in samples.values()}) == 1
    best = stats.winner(samples) if paired and _took_turns(group) else None
    lines = []
    for variant in variants:
        of_variant = group[group["variant"] == variant]
        line = {key_name: _plain(value) for key_name, value in key.items()}
        line |= {"variant": variant, "status": worst_status(of_variant["status"])}
        if variant in samples:
            line |= _times(samples[variant])
            if baseline is not None and variant != baseline and paired:
                ratio = stats.paired_ratio(samples[baseline], samples[variant])
                line |= {
                    "speedup": ratio.value,
                    "speedup_low": ratio.low,
                    "speedup_high": ratio.high,
                    "speedup_over": baseline,
                }
            frame = timed[variant]
            line["gb_per_s"] = _median(frame["bytes"].astype(float) / frame["time_us"] / 1e3)
        if variant in wrong:
            of_variant = of_variant[of_variant["status"] == "incorrect"]
        known = [name for name in medians if name in of_variant and of_variant[name].notna().any()]
        line |= {name: _median(of_variant[name]) for name in known}
        for name in intervals:
            if name in known:
                found = stats.median_interval(of_variant[name].dropna().astype(float).tolist())
                line |= {f"{name}_low": found.low, f"{name}_high": found.high}
        line["fastest"] = variant == best
        errors = of_variant["error"].dropna()
        line["error"] = errors.iloc[0] if len(errors) else None
        lines.append(line)
    return lines


def _took_turns(rows: pd.DataFrame) -> bool:
    """Whether what is compared was measured in turns: kernels are, round by round; engines are from two passes on.

    Else one may only seem faster, because the machine was when it had its turn.
    """
    of_engines = rows["level"].isin(["step", "workload"]) if "level" in rows else rows[SERIES].isna()
    return not of_engines.any() or ("engine_pass" in rows and bool(rows["engine_pass"].nunique() > 1))


def over_rounds(rows: pd.DataFrame) -> str:
    """Of how many rounds a median is, and what its bars are then, for titles: "6 rounds, 95% interval".

    Fewer than stats.MIN_PAIRS rounds have no 95% interval: the bootstrap then gives their range.
    """
    timed = rows[(rows["status"] == "ok") & rows["time_us"].notna()]
    if timed.empty:
        return "no rounds"
    keys = [key for key in KEYS if key in timed and timed[key].notna().any()]
    counts = timed.groupby([*keys, SERIES], dropna=False).size()
    fewest, most = int(counts.min()), int(counts.max())
    if most == 1:
        return "1 round"
    told = f"{most} rounds" if fewest == most else f"{fewest} to {most} rounds"
    return f"{told}, {'95% interval' if fewest >= stats.MIN_PAIRS else 'lowest to highest'}"


def median_of(rows: pd.DataFrame) -> str:
    """over_rounds for titles of medians: "median of 6 rounds, 95% interval"; of a single round there is none."""
    over = over_rounds(rows)
    return over if over == "1 round" else f"median of {over}"


def worst_status(statuses: pd.Series) -> str:
    """The status to be told of when a line's rows differ."""
    found = set(statuses)
    for status in ("error", "timeout", "oom", "incorrect", "unsupported", "not_timed"):
        if status in found:
            return status
    return "ok"


def _times(samples: Sequence[float]) -> dict[str, float]:
    interval = stats.median_interval(samples)
    return {"time_us": interval.value, "time_us_low": interval.low, "time_us_high": interval.high}


def _median(values: pd.Series) -> float:
    numbers = values.dropna().astype(float)
    return float(np.median(numbers)) if len(numbers) else math.nan


def _plain(value: Any) -> Any:
    return None if value is pd.NA or (isinstance(value, float) and math.isnan(value)) else value


def compact(table: pd.DataFrame) -> pd.DataFrame:
    """The table for the eye: text, constant columns dropped, intervals beside their medians."""
    if table.empty:
        return table
    if "fastest" not in table:  # a suite with a summary of its own, where speed is not the question
        return table.map(lambda value: _number(value) if isinstance(value, float) else _text(value))
    shown: dict[str, list[str]] = {}
    for name in (*KEYS[1:], "variant"):
        if name in table and (name == "variant" or not _follows(table, name)):
            shown[_HEADINGS.get(name, name)] = [_text(value) for value in table[name]]
    shown["status"] = [str(status) for status in table["status"]]
    if "time_us" in table:
        columns = (table[name] for name in ("time_us", "time_us_low", "time_us_high"))
        shown["time us [95%]"] = [_with_interval(*values) or "-" for values in zip(*columns)]
    if "speedup" in table:
        columns = (table[name] for name in ("speedup", "speedup_low", "speedup_high", "speedup_over"))
        shown["speed-up [95%]"] = [_speedup(*values) for values in zip(*columns)]
    if "roofline_fraction" in table:
        shown["roofline"] = ["" if _absent(v) else f"{100 * v:.1f}%" for v in table["roofline_fraction"]]
    for name, heading in _FIGURES.items():
        if name in table and table[name].notna().any():
            shown[heading] = [_number(value) for value in table[name]]
    shown["fastest"] = ["<-" if fastest else "" for fastest in table["fastest"]]
    return pd.DataFrame(shown)


def _follows(table: pd.DataFrame, name: str) -> bool:
    """Whether a key says nothing new: it is constant, or the ranks and the level of a line determine it."""
    if table[name].nunique(dropna=False) < 2:
        return True
    others = [other for other in ("level", "tp") if other in table and other != name]
    if name not in ("num_q_heads", "num_kv_heads") or not others:
        return False
    return bool((table.groupby(others, dropna=False)[name].nunique(dropna=False) < 2).all())


def reasons(table: pd.DataFrame) -> list[str]:
    """Why lines have no time, each reason once, with the number of lines it explains."""
    if table.empty or "error" not in table:
        return []
    without = table[table["error"].notna()]
    counts = without.groupby(["status", "error"], sort=False).size()
    return [f"{status} ({count} lines): {error}" for (status, error), count in counts.items()]


# Further columns that the table for the eye shows where a suite has them.
_FIGURES = {
    "efficiency": "efficiency",
    "collective_share": "in collectives",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "hit_rate": "hit rate",
    "prefill_s": "prefill s",
    "prefill_tok_s": "prefill tok/s",
    "decode_tok_s": "decode tok/s",
    "output_tok_s": "output tok/s",
    "total_tok_s": "total tok/s",
    "ttft_ms_p50": "TTFT p50 ms",
    "ttft_ms_p99": "TTFT p99 ms",
    "tpot_ms_p50": "TPOT p50 ms",
    "goodput_req_s": "goodput req/s",
    "max_rel_err": "rel. error",
}

_HEADINGS = {
    "batch_size": "batch",
    "context_len": "context",
    "cache_state": "cache",
    "num_q_heads": "q heads",
}


def _absent(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():  # an integer beside nulls
        return str(int(value))
    return "" if _absent(value) else str(value)


def _number(value: Any) -> str:
    if _absent(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _with_interval(value: Any, low: Any, high: Any) -> str:
    if _absent(value):
        return ""
    if _absent(low):
        return _number(value)
    return f"{_number(value)} [{_number(low)}, {_number(high)}]"


def _speedup(value: Any, low: Any, high: Any, over: Any) -> str:
    return "" if _absent(value) else f"{_with_interval(value, low, high)}x {over}"


def rounded(table: pd.DataFrame) -> pd.DataFrame:
    """A table for the eye: numbers to three digits, nothing where there is none."""
    return pd.DataFrame(
        {
            name: [_number(v) if isinstance(v, float) else _text(v) for v in table[name]]
            for name in table.columns
        }
    )


def to_text(table: pd.DataFrame) -> str:
    """Columns side by side for a terminal."""
    return table.to_string(index=False) if len(table) else "(no rows)"


def to_markdown(table: pd.DataFrame) -> str:
    """A Markdown table of a table of text."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + " --- |" * len(table.columns)]
    lines += [
        "| " + " | ".join(str(v).replace("|", "\\|") for v in values) + " |" for values in table.to_numpy()
    ]
    return "\n".join(lines)
