"""The engine against Transformers on the same weights: greedy ids, teacher-forced logits, and where they part.

Every prompt is answered greedily by Transformers, one at a time, and by the engine, all in one batch. A first different
token counts as wrong unless the reference's two best logits are closer there than the stated margin. Then both run
over the reference's answer (teacher forcing), which compares every token's distribution whatever came before it. Where
they differ, the modules of both are compared in order at the first such token.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.records import Row
from experiments.settings import Settings, Variant
from experiments.suites import options
from experiments.suites.protocol import Point, PointContext, Suite

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure

    from engine import LLM
    from engine.models.checkpoint import ModelSource
    from experiments.agreement import Tolerance
    from experiments.backends.transformers import TransformersReference
    from experiments.prompt_check import PromptCheck

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse keeper and the sea.",
    "List three differences between a list and a tuple in Python.",
    "Translate into German: The train to Hamburg leaves at half past nine tomorrow morning.",
    "A farmer has 17 sheep. All but 9 run away. How many are left? Think step by step.",
    "Summarise: Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. It happens in the "
    "chloroplasts of plant cells, where chlorophyll absorbs red and blue light and reflects green.",
    "def fibonacci(n):\n    # Complete this function, iteratively.\n",
    "Give me a recipe for pancakes with exact amounts for four people.",
    "Who wrote 'Pride and Prejudice', in which year, and what is it about?",
)


@dataclass(frozen=True)
class CorrectnessOptions:
    """prompts: texts; null: num_prompts of PROMPTS or, without a tokenizer, of 1 to max_prompt_len random ids.

    output_len: new tokens a prompt at most. The interpreted_* ones hold where a kernel runs in Triton's interpreter.
    reference_dtype: of the reference's weights; null: the engine's. margin_tolerance, logprob_tolerance: shares of the
    largest logit; null: those of experiments.agreement for the engine's dtype.
    """

    num_prompts: int
    output_len: int
    interpreted_prompts: int
    interpreted_output_len: int
    max_prompt_len: int = 48
    prompts: Sequence[str] | None = None
    ignore_eos: bool = False
    top_k: int = 10
    reference_dtype: str | None = None
    margin_tolerance: float | None = None
    logprob_tolerance: float | None = None

    def __post_init__(self) -> None:
        names = ("num_prompts", "output_len", "interpreted_prompts", "interpreted_output_len")
        for name in (*names, "max_prompt_len", "top_k"):
            options.positive(name, getattr(self, name))
        options.flag("ignore_eos", self.ignore_eos)
        if self.reference_dtype is not None:
            options.choices("reference_dtype", self.reference_dtype, options.DTYPES)
        for name in ("margin_tolerance", "logprob_tolerance"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or value < 0
            ):
                raise ValueError(f"bench.{name} must be a number >= 0, got {value!r}")
        if self.prompts is not None and (
            isinstance(self.prompts, str) or not all(isinstance(text, str) and text for text in self.prompts)
        ):
            raise ValueError(f"bench.prompts must be a list of texts, got {self.prompts!r}")


class CorrectnessSuite(Suite):
    """One point a variant, one row a prompt."""

    name = "correctness"
    options = CorrectnessOptions
    columns: Mapping[str, str] = {
        "prompt_index": "Int64",
        "reference_dtype": "string",
        "prompt_source": "string",  # "chat" (a text in the chat template), "text" or "random ids"
        "matching_prefix": "Int64",  # tokens up to the first difference of the greedy answers
        "identical": "boolean",
        "greedy_margin": "float64",  # the reference's top-2 margin where they first differ, logits
        "margin_tolerance": "float64",  # as a share of the largest logit there
        "tokens_mismatched": "Int64",  # teacher-forced tokens whose argmax differs
        "max_logprob_diff": "float64",  # teacher-forced, of the reference's tokens, nats
        "mean_logprob_diff": "float64",
        "max_logprob_share": "float64",  # the largest of them over the largest logit of its token
        "logprob_tolerance": "float64",  # of max_logprob_share
        "max_kl": "float64",  # nats
        "mean_kl": "float64",
        "top_k": "Int64",
        "top_k_agreement": "float64",
        "diff_step": "Int64",  # the first token that differs in any way, and where its difference arises
        "diff_layer": "Int64",
        "diff_operation": "string",
        "diff_rel_err": "float64",
    }

    def points(self, settings: Settings) -> list[Point]:
        bench: CorrectnessOptions = self.parse_options(settings)
        return [
            Point(self.name, self._params(settings, bench, variant), True) for variant in settings.variants
        ]

    def _params(self, settings: Settings, bench: CorrectnessOptions, variant: Variant) -> dict[str, Any]:
        if variant.options:
            raise ValueError(f"attention.{variant.name} has kernel options; the engine takes none")
        model = settings.model
        return {
            **vars(bench),
            "prompts": None if bench.prompts is None else list(bench.prompts),
            "level": "workload",
            "variant": variant.name,
            "decode_attention": variant.decode,
            "prefill_attention": variant.prefill or settings.engine["prefill_attention"],
            "model": model.name,
            "model_argument": model.argument,
            "load_format": model.load_format,
            "dtype": model.dtype,
            "engine": {k: v for k, v in settings.engine.items() if k != "prefill_attention"},
            "tp": 1,
            "seed": settings.seed,
        }

    def run(self, point: Point, context: PointContext) -> list[Row]:
        import torch

        from engine.models.checkpoint import resolve_model
        from experiments.interpreter import is_interpreted

        bench: CorrectnessOptions = self.parse_options(context.settings)
        source = resolve_model(point.params["model_argument"], point.params["load_format"])
        prompts, prompt_source = _prompts(source, point, bench)
        with _make_llm(point, context, prompts, bench.output_len) as llm:
            dtype = _name(llm.model.norm.weight.dtype)
            tolerance = _tolerance(dtype, bench)
            output_len = bench.output_len
            if is_interpreted(lambda: llm.forced_logits([0], [0, 0])):
                prompts, output_len = prompts[: bench.interpreted_prompts], bench.interpreted_output_len
            reference_dtype = bench.reference_dtype or dtype
            with _make_reference(llm, source, point, getattr(torch, reference_dtype)) as reference:
                checks = _check_all(llm, reference, prompts, output_len, source, bench, tolerance)
            shared = {
                "dtype": dtype,
                "reference_dtype": reference_dtype,
                "prompt_source": prompt_source,
                "block_size": llm.config.block_size,
                "num_q_heads": source.config.num_q_heads,
                "num_kv_heads": source.config.num_kv_heads,
                "head_dim": source.config.head_dim,
                "batch_size": len(prompts),
                "output_len": output_len,
            }
        return [
            context.row(point, **(shared | _values(i, prompt, check, bench.top_k)))
            for i, (prompt, check) in enumerate(zip(prompts, checks))
        ]

    def summary(self, rows: pd.DataFrame) -> pd.DataFrame:
        """A line a variant: counts over its prompts, and the worst of each measure."""
        lines = []
        for variant, group in rows.groupby("variant", sort=False, dropna=False):
            told = group["error"].dropna().tolist() + group["note"].dropna().tolist()
            lines.append(
                {
                    "variant": variant,
                    "model": group["model"].iloc[0],
                    "dtype": group["dtype"].iloc[0],
                    "status": ", ".join(dict.fromkeys(group["status"])),
                    "prompts": int(group["prompt_index"].notna().sum()),
                    "identical": int(group["identical"].sum()),
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
        import pandas as pd

        return pd.DataFrame(lines)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """Largest log-probability difference of each prompt, by variant, under the tolerance."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        measured = rows.dropna(subset=["max_logprob_share"])
        if measured.empty:
            return {}
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for variant, group in measured.groupby("variant", sort=False):
            # A difference of exactly 0 has no place on a logarithmic axis: it is drawn at the smallest one shown.
            heights = group["max_logprob_share"].clip(lower=1e-9).astype(float)
            axes.plot(group["prompt_index"].astype(int), heights, "o", label=variant, alpha=0.7)
        for tolerance in sorted(set(measured["logprob_tolerance"].dropna())):
            axes.axhline(tolerance, color="0.4", linestyle="--", label=f"tolerance {tolerance:g}")
        axes.set(
            yscale="log",
            xlabel="prompt",
            ylabel="largest |Δ log-probability| / largest |logit|",
            title="Engine against Transformers, teacher-forced",
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        return {"logprob_difference": figure}


def _prompts(source: ModelSource, point: Point, bench: CorrectnessOptions) -> tuple[list[list[int]], str]:
    """Token ids of the prompts and what they are: texts, by the chat template if there is one, or random ids."""
    from engine.tokenizer import load_tokenizer

    tokenizer = None
    if point.params["load_format"] != "dummy":
        try:
            tokenizer = load_tokenizer(None, source)
        except ValueError:
            if bench.prompts is not None:
                raise
    if tokenizer is None:
        if bench.prompts is not None:
            raise ValueError("bench.prompts needs a model with trained weights and a tokenizer")
        rng, vocab_size = random.Random(point.params["seed"]), source.config.vocab_size
        lengths = [rng.randint(1, bench.max_prompt_len) for _ in range(bench.num_prompts)]
        return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths], "random ids"
    texts = bench.prompts or [PROMPTS[i % len(PROMPTS)] for i in range(bench.num_prompts)]
    if tokenizer.has_chat_template:
        return [tokenizer.apply_chat_template([{"role": "user", "content": t}]) for t in texts], "chat"
    return [tokenizer.encode(text) for text in texts], "text"


def _make_llm(point: Point, context: PointContext, prompts: Sequence[Sequence[int]], output_len: int) -> LLM:
    from engine import LLM

    params = point.params
    engine = dict(params["engine"])
    if engine.get("num_kv_blocks") is None:
        # What these prompts can use and no more, so that there is room for the reference beside it.
        lengths = [len(prompt) + output_len for prompt in prompts]
        engine["num_kv_blocks"] = sum(-(-length // engine["block_size"]) for length in lengths)
    return LLM(
        params["model_argument"],
        device=context.settings.device,
        dtype=params["dtype"],
        load_format=params["load_format"],
        seed=params["seed"],
        decode_attention=params["decode_attention"],
        prefill_attention=params["prefill_attention"],
        skip_tokenizer_init=True,
        **engine,
    )


def _make_reference(llm: LLM, source: ModelSource, point: Point, dtype: torch.dtype) -> TransformersReference:
    """From the checkpoint by Transformers' own loader; where there is none, with the engine's dummy weights."""
    from experiments.backends.transformers import TransformersReference

    if point.params["load_format"] != "dummy":
        assert source.path is not None
        return TransformersReference.from_directory(source.path, dtype=dtype, device=llm.runner.device)
    config = point.params["model_argument"]
    if source.path is not None:
        config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    return TransformersReference.from_decoder(config, llm.model, dtype=dtype)


def _check_all(
    llm: LLM,
    reference: TransformersReference,
    prompts: Sequence[list[int]],
    output_len: int,
    source: ModelSource,
    bench: CorrectnessOptions,
    tolerance: Tolerance,
) -> list[PromptCheck]:
    from engine import SamplingParams
    from experiments.prompt_check import check_prompt

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=bench.ignore_eos)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    eos = () if bench.ignore_eos else source.eos_token_ids
    checks = []
    for prompt, output in zip(prompts, outputs):
        expected = reference.generate(prompt, output_len, eos)
        checks.append(check_prompt(llm, reference, prompt, expected, output, tolerance, top_k=bench.top_k))
    return checks


def _tolerance(dtype: str, bench: CorrectnessOptions) -> Tolerance:
    import torch

    from experiments.agreement import TOLERANCES

    stated = {"margin": bench.margin_tolerance, "logprob": bench.logprob_tolerance}
    return replace(
        TOLERANCES[getattr(torch, dtype)], **{name: v for name, v in stated.items() if v is not None}
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(index: int, prompt: Sequence[int], check: PromptCheck, top_k: int) -> dict[str, Any]:
    forced, location = check.forced, check.location
    return {
        "status": "ok" if check.error is None else "incorrect",
        "error": check.error,
        "note": check.note,
        "prompt_index": index,
        "prompt_tokens": len(prompt),
        "output_tokens": len(check.output.token_ids),
        "cached_tokens": check.output.num_cached_tokens,
        "num_preemptions": check.output.num_preemptions,
        "matching_prefix": check.matching_prefix,
        "identical": check.greedy_step is None,
        "greedy_margin": check.greedy_margin,
        "margin_tolerance": check.tolerance.margin,
        "tokens_checked": forced.num_tokens,
        "tokens_mismatched": forced.num_mismatched,
        "tokens_excused": forced.num_excused,
        "max_logprob_diff": _finite(forced.max_logprob_diff),
        "max_logprob_share": _finite(forced.max_logprob_share),
        "mean_logprob_diff": _finite(forced.mean_logprob_diff),
        "logprob_tolerance": check.tolerance.logprob,
        "max_kl": _finite(forced.max_kl),
        "mean_kl": _finite(forced.mean_kl),
        "top_k": top_k,
        "top_k_agreement": forced.top_k_agreement,
        "diff_step": check.diff_step,
        "diff_layer": None if location is None else location.layer,
        "diff_operation": None if location is None else location.operation,
        "diff_rel_err": None if location is None else _finite(location.rel_err),
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity; the row's error says what happened."""
    return value if math.isfinite(value) else None


SUITE = CorrectnessSuite()
