"""The engine against Transformers on the same weights: greedy ids, teacher-forced logits, and where they part.

Every prompt is answered greedily by Transformers, one at a time, and by the engine, all in one batch, once eagerly and
once by CUDA graphs, whose answers are also compared with each other. A first token that is not the reference's counts
as wrong unless the reference's two best logits are closer there than the stated margin. Then both run over the
reference's answer (teacher forcing), which compares every token's distribution whatever came before it. Where they
differ, the modules of both are compared in order at the first such token.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.failures import UnsupportedError, VerdictError, describe, status_of
from experiments.records import Row
from experiments.settings import Settings
from experiments.suites import options
from experiments.suites.protocol import Point, PointContext, Suite

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure

    from engine import LLM
    from engine.models.checkpoint import ModelSource
    from experiments.agreement import Tolerance
    from experiments.backends.engine import EngineSetup
    from experiments.backends.transformers import TransformersReference
    from experiments.prompt_check import PromptCheck

EXECUTIONS = ("eager", "graph")

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
    """execution: "eager" and "graph" (CUDA graphs), one or both; null: both, or eager alone with engine.enforce_eager.
    prompts: texts; null: num_prompts of PROMPTS or, without a tokenizer, of 1 to max_prompt_len random ids.

    output_len: new tokens a prompt at most. The interpreted_* ones hold where a kernel runs in Triton's interpreter.
    reference_dtype: of the reference's weights; null: the engine's. margin_tolerance, logprob_tolerance: shares of the
    largest logit; null: those of experiments.agreement for the engine's dtype.
    """

    num_prompts: int
    output_len: int
    interpreted_prompts: int
    interpreted_output_len: int
    execution: Any = None
    max_prompt_len: int = 48
    tensor_parallel: Any = (1,)
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
        object.__setattr__(
            self, "tensor_parallel", options.positives("tensor_parallel", self.tensor_parallel)
        )
        options.flag("ignore_eos", self.ignore_eos)
        if self.execution is not None:
            object.__setattr__(self, "execution", options.choices("execution", self.execution, EXECUTIONS))
        if self.reference_dtype is not None:
            options.choices("reference_dtype", self.reference_dtype, options.DTYPES)
        for name in ("margin_tolerance", "logprob_tolerance"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or value < 0
            ):
                raise ValueError(f"bench.{name} must be a number >= 0, got {value!r}")
        if self.prompts is not None and (
            not isinstance(self.prompts, list | tuple)
            or not self.prompts
            or not all(isinstance(text, str) and text for text in self.prompts)
        ):
            raise ValueError(f"bench.prompts must be a list of texts, got {self.prompts!r}")

    def executions(self, settings: Settings) -> tuple[str, ...]:
        """How the engine is to run, in order: eager first, which the other is compared with."""
        always_eager = settings.engine["enforce_eager"]
        if self.execution is None:
            return ("eager",) if always_eager else EXECUTIONS
        if always_eager and "graph" in self.execution:
            raise ValueError("bench.execution holds graph, which engine.enforce_eager=true rules out")
        return tuple(name for name in EXECUTIONS if name in self.execution)


class CorrectnessSuite(Suite):
    """One point a variant, one row a prompt and execution."""

    name = "correctness"
    options = CorrectnessOptions
    columns: Mapping[str, str] = {
        "execution": "string",  # "eager" or "graph"
        "prompt_index": "Int64",
        "reference_dtype": "string",
        "prompt_source": "string",  # "chat" (a text in the chat template), "text" or "random ids"
        "matching_prefix": "Int64",  # tokens up to the first difference of the greedy answers
        "identical": "boolean",
        "identical_to_eager": "boolean",  # of graphs: whether the greedy answer is the eager run's
        "eager_matching_prefix": "Int64",  # of graphs: tokens up to the first difference from the eager run's
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
        from experiments.backends.engine import EngineSetup, engine_options

        engine_options(settings)  # refuses what LLM would, before anything runs
        bench: CorrectnessOptions = self.parse_options(settings)
        points = []
        for tp, variant in itertools.product(bench.tensor_parallel, settings.variants):
            setup = EngineSetup(settings, variant, tp)
            params = setup.columns() | {
                "level": "workload",
                "seed": settings.seed,
                "model_config": settings.model.argument,
                "engine": dict(settings.engine),
                "variant_options": dict(variant.options),
                "bench": {name: value for name, value in vars(bench).items() if name != "tensor_parallel"}
                | {"execution": list(bench.executions(settings))},
            }
            points.append(setup.point(self.name, params))
        return points

    def run(self, point: Point, context: PointContext) -> list[Row]:
        from engine.models.checkpoint import resolve_model
        from experiments.backends.engine import EngineSetup

        settings = context.settings
        bench: CorrectnessOptions = self.parse_options(settings)
        variant = next(v for v in settings.variants if v.name == point.params["variant"])
        setup = EngineSetup(settings, variant, point.params["tp"])
        source = resolve_model(settings.model.argument, settings.model.load_format)
        prompts, prompt_source = _prompts(settings, source, bench)
        rows: list[Row] = []
        answers: dict[str, list[tuple[int, ...]]] = {}
        with _reference(setup, source, context.device, bench) as reference:
            for execution in point.params["bench"]["execution"]:
                shared = {
                    "execution": execution,
                    "reference_dtype": bench.reference_dtype or setup.dtype_name,
                    "prompt_source": prompt_source,
                }
                try:
                    checks, columns = _checked(setup, execution, prompts, source, reference, bench)
                except Exception as exception:  # the other execution may still run
                    shared |= exception.columns if isinstance(exception, VerdictError) else {}
                    failure = {"status": status_of(exception), "error": describe(exception)}
                    rows.append(context.row(point, **(shared | failure)))
                    continue
                shared |= columns
                answers[execution] = [check.output.token_ids for check in checks]
                for i, (prompt, check) in enumerate(zip(prompts, checks)):
                    values = shared | _values(i, prompt, check, bench.top_k)
                    if execution != "eager" and "eager" in answers:
                        values |= _against_eager(answers["eager"][i], check.output.token_ids)
                    rows.append(context.row(point, **values))
        return rows

    def blank_rows(self, point: Point) -> list[dict[str, Any]]:
        return [{"execution": execution} for execution in point.params["bench"]["execution"]]

    def summary(self, rows: pd.DataFrame) -> pd.DataFrame:
        from experiments.correctness_tables import summary

        return summary(rows)

    def tables(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        from experiments.correctness_tables import agreement

        return {"agreement": agreement(rows)}

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        from experiments.correctness_tables import figures

        return figures(rows)


def _prompts(
    settings: Settings, source: ModelSource, bench: CorrectnessOptions
) -> tuple[list[list[int]], str]:
    """Token ids of the prompts and what they are: texts, by the chat template if there is one, or random ids."""
    from engine.tokenizer import load_tokenizer

    tokenizer = None
    if settings.model.load_format != "dummy":
        try:
            tokenizer = load_tokenizer(None, source)
        except ValueError:
            if bench.prompts is not None:
                raise
    if tokenizer is None:
        if bench.prompts is not None:
            raise ValueError("bench.prompts needs a model with trained weights and a tokenizer")
        rng, vocab_size = random.Random(settings.seed), source.config.vocab_size
        lengths = [rng.randint(1, bench.max_prompt_len) for _ in range(bench.num_prompts)]
        return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths], "random ids"
    texts = bench.prompts or [PROMPTS[i % len(PROMPTS)] for i in range(bench.num_prompts)]
    if tokenizer.has_chat_template:
        return [tokenizer.apply_chat_template([{"role": "user", "content": t}]) for t in texts], "chat"
    return [tokenizer.encode(text) for text in texts], "text"


def _reference(
    setup: EngineSetup, source: ModelSource, device: torch.device, bench: CorrectnessOptions
) -> TransformersReference:
    """From the checkpoint by Transformers' own loader; where there is none, with the weights of the same seed."""
    import torch

    from experiments.backends.transformers import TransformersReference

    dtype = setup.dtype if bench.reference_dtype is None else getattr(torch, bench.reference_dtype)
    model = setup.settings.model
    if model.load_format != "dummy":
        assert source.path is not None
        return TransformersReference.from_directory(source.path, dtype=dtype, device=device)
    config = model.config
    if source.path is not None:
        config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    assert config is not None
    return TransformersReference.from_dummy(
        config, drawn_as=setup.dtype, dtype=dtype, device=device, seed=setup.settings.seed
    )


def _tolerance(dtype: torch.dtype, bench: CorrectnessOptions) -> Tolerance:
    stated = {"margin": bench.margin_tolerance, "logprob": bench.logprob_tolerance}
    from experiments.agreement import TOLERANCES

    return replace(TOLERANCES[dtype], **{name: value for name, value in stated.items() if value is not None})


def _checked(
    setup: EngineSetup,
    execution: str,
    prompts: Sequence[Sequence[int]],
    source: ModelSource,
    reference: TransformersReference,
    bench: CorrectnessOptions,
) -> tuple[list[PromptCheck], dict[str, Any]]:
    """The engine's answers in one execution, judged; and what its rows say of it: what ran, on how much."""
    from engine import SamplingParams
    from experiments.interpreter import is_interpreted
    from experiments.prompt_check import check_prompt

    if execution == "graph" and setup.settings.device == "cpu":
        raise UnsupportedError("CUDA graphs need a GPU: on a CPU the engine runs eagerly")
    output_len = bench.output_len
    block_size = setup.settings.engine["block_size"]
    sizes: dict[str, Any] = {"enforce_eager": execution == "eager"}
    if setup.settings.engine["num_kv_blocks"] is None:
        # What these prompts can use and no more, so that there is room for the reference beside it.
        sizes["num_kv_blocks"] = sum(-(-(len(prompt) + output_len) // block_size) for prompt in prompts)
    with setup.open(**sizes) as llm:
        llm.runner.capture_at_once(True)
        reason = _no_graphs(llm) if execution == "graph" else None
        if reason is not None:
            raise UnsupportedError(reason)
        if is_interpreted(lambda: llm.forced_logits([0], [0, 0])):
            prompts, output_len = prompts[: bench.interpreted_prompts], bench.interpreted_output_len
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=bench.ignore_eos)
        outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        eos = () if bench.ignore_eos else source.eos_token_ids
        tolerance = _tolerance(setup.dtype, bench)
        checks = []
        for prompt, output in zip(prompts, outputs):
            expected = reference.generate(prompt, output_len, eos)
            checks.append(
                check_prompt(llm, reference, prompt, expected, output, tolerance, top_k=bench.top_k)
            )
        columns = {
            "batch_size": len(checks),
            "output_len": output_len,
            "decode_attention": llm.runner.kernels.decode.name,
            "prefill_attention": llm.runner.kernels.prefill.name,
        }
    return checks, columns


def _no_graphs(llm: LLM) -> str | None:
    """Why an engine that may use CUDA graphs runs without, or None if it does not."""
    from experiments.checked_engine import rank_reports

    runner = llm.runner
    if all(report["uses_cuda_graphs"] for report in rank_reports(llm)):
        return None
    if not runner.kernels.use_triton:
        return "no CUDA graphs: the engine runs its layers on torch (use_triton)"
    if not runner.kernels.decode.capturable:
        return f"no CUDA graphs: none can hold a call of decode_attention {runner.kernels.decode.name!r}"
    return "no CUDA graphs: none can hold the collectives of these ranks"


def _against_eager(eager: Sequence[int], graph: Sequence[int]) -> dict[str, Any]:
    from experiments.agreement import matching_prefix

    return {
        "identical_to_eager": tuple(eager) == tuple(graph),
        "eager_matching_prefix": matching_prefix(eager, graph),
    }


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
