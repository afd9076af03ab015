"""What a correctness run is read by: a line a kernel and execution, the three-way table, and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a variant, number of ranks and execution: counts over its prompts, and the worst of each measure.

    identical, identical_to_eager: prompts whose greedy answer is Transformers', and the eager run's.
    """
    rows = _with_execution(rows)
    lines = []
    for (tp, variant, execution), group in rows.groupby(
        ["tp", "variant", "execution"], sort=False, dropna=False
    ):
        told = group["error"].dropna().tolist() + group["note"].dropna().tolist()
        against_eager = group["identical_to_eager"].dropna()
        lines.append(
            {
                "tp": tp,
                "variant": variant,
                "execution": execution,
                "model": group["model"].iloc[0],
                "dtype": group["dtype"].iloc[0],
                "status": ", ".join(dict.fromkeys(group["status"])),
                "prompts": int(group["prompt_index"].notna().sum()),
                "identical": int(group["identical"].sum()),
                "identical_to_eager": int(against_eager.sum()) if len(against_eager) else None,
                "shortest_match": group["matching_prefix"].min(),
                "tokens": group["tokens_checked"].sum(),
                "mismatched": group["tokens_mismatched"].sum(),
                "excused": group["tokens_excused"].sum(),
                "max_logprob_diff": group["max_logprob_diff"].max(),
                "mean_kl": group["mean_kl"].mean(),
                "top_k_agreement": group["top_k_agreement"].mean(),
                "first_difference": told[0] if told else None,
            }
        )
    return pd.DataFrame(lines)


def agreement(rows: pd.DataFrame) -> pd.DataFrame:
    """Transformers, eager and graph in one line a variant, number of ranks and prompt.

    Each pair is "identical", or how many tokens the two greedy answers have in common before they part, or the status
    of the execution that was not run. status: "ok" where every difference is excused as a near tie.
    """
    from experiments.tables import worst_status

    rows = _with_execution(rows)
    lines = []
    for (tp, variant), group in rows.groupby(["tp", "variant"], sort=False, dropna=False):
        for prompt in sorted(group["prompt_index"].dropna().unique()) or [None]:
            of_prompt = group[(group["prompt_index"] == prompt).fillna(False) | group["prompt_index"].isna()]
            found = {execution: part.iloc[0] for execution, part in of_prompt.groupby("execution")}
            judged = of_prompt[of_prompt["prompt_index"].notna()]
            lines.append(
                {
                    "tp": tp,
                    "variant": variant,
                    "prompt": prompt,
                    "eager_and_transformers": _pair(found.get("eager"), "identical", "matching_prefix"),
                    "graph_and_transformers": _pair(found.get("graph"), "identical", "matching_prefix"),
                    "graph_and_eager": _pair(
                        found.get("graph"), "identical_to_eager", "eager_matching_prefix"
                    ),
                    "status": worst_status((judged if len(judged) else of_prompt)["status"]),
                }
            )
    return pd.DataFrame(lines)


def _pair(row: Any, identical: str, prefix: str) -> str | None:
    if row is None:
        return None
    if pd.isna(row["prompt_index"]):
        return str(row["status"])
    if pd.isna(row[identical]):  # the other side was not run
        return None
    return "identical" if row[identical] else f"first {row[prefix]} tokens"


def _with_execution(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows made before there was a choice tell of no execution."""
    return rows.assign(
        **{
            name: None
            for name in ("execution", "identical_to_eager", "eager_matching_prefix")
            if name not in rows
        }
    )


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Largest log-probability difference of each prompt, by variant and execution, under the tolerance."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    from experiments.plots import STYLE, look

    measured = _with_execution(rows).dropna(subset=["max_logprob_share"])
    if measured.empty:
        return {}
    series = measured.groupby(["variant", "execution"], sort=False, dropna=False)
    variants = list(dict.fromkeys(measured["variant"]))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
        for number, ((variant, execution), group) in enumerate(series):
            colour, marker = look(variants.index(variant))
            # Beside one another: kernels that sum in the same order differ from the reference by the same amount.
            shift = 0.7 * ((number + 0.5) / len(series) - 0.5)
            # A difference of exactly 0 has no place on a logarithmic axis: it is drawn at the smallest one shown.
            heights = group["max_logprob_share"].clip(lower=1e-9).astype(float)
            axes.plot(
                group["prompt_index"].astype(float) + shift,
                heights,
                marker,
                color=colour,
                markerfacecolor="white" if execution == "graph" else colour,
                markersize=4,
                label=variant if pd.isna(execution) else f"{variant}, {execution}",
            )
        for tolerance in sorted(set(measured["logprob_tolerance"].dropna())):
            axes.axhline(tolerance, color="0.4", linestyle="--", label=f"tolerance {tolerance:g}")
        axes.set(yscale="log", xlabel="prompt", ylabel="largest |Δ log-probability| / largest |logit|")
        axes.set_title("Engine against Transformers, teacher-forced", fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(-0.6, float(measured["prompt_index"].max()) + 0.6)
        figure.legend(loc="outside right center", fontsize=8)
    return {"logprob_difference": figure}
