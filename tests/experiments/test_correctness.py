"""The correctness suite finds agreement where there is one, and names the place of a planted fault."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from matplotlib import pyplot as plt
from omegaconf import OmegaConf

from engine import LLM, SamplingParams
from engine.models.checkpoint import resolve_model
from experiments.agreement import TOLERANCES
from experiments.backends.transformers import TransformersReference
from experiments.prompt_check import PromptCheck, check_prompt
from experiments.records import to_frame
from experiments.roofline import Ceilings
from experiments.settings import Settings, resolve
from experiments.suites import correctness
from experiments.suites.correctness import CorrectnessSuite
from experiments.suites.protocol import PointContext
from tests.engine.checkpoints import LLAMA, QWEN3, smollm2_checkpoint, write_random_checkpoint

PROMPT = [7, 3, 250, 11, 42]
OUTPUT_LEN = 8
FP32 = TOLERANCES[torch.float32]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("qwen3"), QWEN3)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Iterator[TransformersReference]:
    with TransformersReference.from_directory(
        checkpoint, dtype=torch.float32, device=torch.device("cpu")
    ) as reference:
        yield reference


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), device="cpu", skip_tokenizer_init=True, num_kv_blocks=16) as llm:
        yield llm


def check(llm: LLM, reference: TransformersReference, prompt: list[int] = PROMPT) -> PromptCheck:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return check_prompt(llm, reference, prompt, reference.generate(prompt, OUTPUT_LEN), output, FP32)


def test_a_right_engine_agrees(llm: LLM, reference: TransformersReference) -> None:
    result = check(llm, reference)
    assert (result.error, result.note, result.diff_step, result.location) == (None, None, None, None)
    assert result.matching_prefix == len(result.expected) == OUTPUT_LEN
    assert result.forced.num_tokens == OUTPUT_LEN
    assert result.forced.max_logprob_diff < 1e-5
    assert result.forced.top_k_agreement == 1.0


FAULTS = {
    "layers.1.self_attn.k_norm.weight": (1, "self_attn.k_norm"),
    "layers.2.self_attn.qkv_proj.weight": (2, "self_attn.q_norm"),
    "layers.0.self_attn.o_proj.weight": (0, "self_attn"),
    "layers.1.mlp.down_proj.weight": (1, "mlp"),
    "layers.2.post_attention_layernorm.weight": (2, "post_attention_layernorm"),
    "norm.weight": (None, "norm"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_where_it_is(llm: LLM, reference: TransformersReference, name: str) -> None:
    parameter = dict(llm.model.named_parameters())[name]
    parameter.copy_(parameter.flip(0))
    result = check(llm, reference)
    assert result.error is not None
    assert result.diff_step == 0
    assert result.location is not None
    assert (result.location.layer, result.location.operation) == FAULTS[name]
    assert str(result.location) in result.error


def test_a_fault_of_the_decode_kernel_shows_at_the_first_decoded_token(
    llm: LLM, reference: TransformersReference
) -> None:
    """Prefill gives the first token, so the second is the first that can be wrong, in layer 0's attention."""
    right = llm.runner.kernels.decode

    class Wrong:
        name, plan, workspace = right.name, right.plan, right.workspace

        def __call__(self, *args: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
            return right(*args, out=out, **options).mul_(1.5)

    for layer in llm.model.layers:
        layer.self_attn.kernels = dataclasses.replace(layer.self_attn.kernels, decode=Wrong())
    result = check(llm, reference)
    assert result.diff_step == 1
    assert result.location is not None
    assert (result.location.layer, result.location.operation) == (0, "self_attn")


def test_a_difference_in_the_batch_alone_is_told_apart(llm: LLM, reference: TransformersReference) -> None:
    """The logits agree under teacher forcing, but the batched answer is another one."""
    expected = reference.generate(PROMPT, OUTPUT_LEN)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    changed = [*output.token_ids[:3], (output.token_ids[3] + 1) % 307, *output.token_ids[4:]]
    wrong = dataclasses.replace(output, token_ids=tuple(changed))
    result = check_prompt(llm, reference, PROMPT, expected, wrong, FP32)
    assert (result.matching_prefix, result.greedy_step, result.diff_step) == (3, 3, 3)
    assert result.error is not None
    assert "greedy token 3 differs" in result.error
    assert result.note is not None
    assert "batched run only" in result.note
    generous = dataclasses.replace(FP32, margin=1e6)
    assert check_prompt(llm, reference, PROMPT, expected, wrong, generous).error is None
    short = dataclasses.replace(output, token_ids=output.token_ids[:3])
    ended = check_prompt(llm, reference, PROMPT, expected, short, generous)
    assert ended.error is not None
    assert "one of them ended" in ended.error


def test_bf16_is_excused_for_rounding_and_for_nothing_else(checkpoint: Path) -> None:
    bf16 = TOLERANCES[torch.bfloat16]
    reference = TransformersReference.from_directory(
        checkpoint, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    errors = {}
    for fault in (None, *FAULTS):
        with LLM(
            str(checkpoint), device="cpu", dtype="bfloat16", skip_tokenizer_init=True, num_kv_blocks=16
        ) as llm:
            if fault is not None:
                parameter = dict(llm.model.named_parameters())[fault]
                parameter.copy_(parameter.flip(0))
            [output] = llm.generate([PROMPT], params, use_tqdm=False)
            expected = reference.generate(PROMPT, OUTPUT_LEN)
            errors[fault] = check_prompt(llm, reference, PROMPT, expected, output, bf16).error
    assert errors.pop(None) is None
    assert None not in errors.values(), errors


# --- the suite ----------------------------------------------------------------------------------------------


def run_suite(*overrides: str) -> tuple[CorrectnessSuite, list[dict[str, Any]]]:
    conf = str(Path(__file__).parents[2] / "conf")
    with initialize_config_dir(conf, version_base="1.3"):
        composed = OmegaConf.to_container(compose("config", ["+suite=correctness", "device=cpu", *overrides]))
    assert isinstance(composed, dict)
    settings = Settings.parse(resolve(composed, Path.cwd()))
    context = PointContext(
        settings, torch.device("cpu"), Ceilings(1e9, {}), "run", "cpu", CorrectnessSuite.columns
    )
    suite = CorrectnessSuite()
    return suite, [row for point in suite.points(settings) for row in suite.run(point, context)]


def test_the_suite_checks_a_checkpoint(checkpoint: Path) -> None:
    """Random prompts, since there is no tokenizer; a row a prompt and a line a kernel, one of them interpreted."""
    suite, rows = run_suite(
        f"model.path={checkpoint}",
        "attention=[torch,split_kv]",
        "bench.num_prompts=3",
        "bench.output_len=5",
        "bench.interpreted_output_len=2",
    )
    graph = [row for row in rows if row["execution"] == "graph"]
    assert [(row["status"], row["prompt_index"]) for row in graph] == [("unsupported", None)] * 2
    assert all("CUDA graphs need a GPU" in row["error"] for row in graph)
    eager = [row for row in rows if row["execution"] == "eager"]
    assert len(eager) + len(graph) == len(rows)
    assert [row["prompt_index"] for row in eager] == [0, 1, 2, 0, 1]
    for row in eager:
        assert (row["status"], row["identical"], row["prompt_source"]) == ("ok", True, "random ids")
        assert row["matching_prefix"] == row["output_tokens"] == row["tokens_checked"] == row["output_len"]
        assert (row["dtype"], row["tokens_mismatched"], row["diff_step"]) == ("float32", 0, None)
        assert row["identical_to_eager"] is None
    assert [row["output_len"] for row in eager] == [5, 5, 5, 2, 2]
    frame = to_frame(rows)
    summary = suite.summary(frame)
    assert summary[["variant", "execution", "prompts", "identical"]].values.tolist() == [
        ["torch", "eager", 3, 3],
        ["torch", "graph", 0, 0],
        ["split_kv", "eager", 2, 2],
        ["split_kv", "graph", 0, 0],
    ]
    table = suite.tables(frame)["agreement"]
    assert table["prompt"].tolist() == [0, 1, 2, 0, 1]
    assert set(table["eager_and_transformers"]) == {"identical"}
    assert set(table["graph_and_transformers"]) == set(table["graph_and_eager"]) == {"unsupported"}
    assert set(table["status"]) == {"ok"}
    figures = suite.figures(frame)
    assert list(figures) == ["logprob_difference"]
    plt.close(figures["logprob_difference"])


def test_the_suite_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference with other weights, as if the engine had loaded wrong ones: dummy weights of a mapping."""
    real = TransformersReference.from_decoder

    def other_weights(*args: Any, **options: Any) -> TransformersReference:
        reference = real(*args, **options)
        weight = reference.modules()["layers.1.mlp.down_proj"].weight
        weight.data.copy_(weight.data.flip(0))
        return reference

    monkeypatch.setattr(TransformersReference, "from_decoder", other_weights)
    suite, rows = run_suite(
        "model=tiny_qwen3", "attention=torch", "bench.num_prompts=2", "bench.output_len=3", "engine=eager"
    )
    assert len(rows) == 2
    for row in rows:
        assert row["status"] == "incorrect"
        assert (row["diff_step"], row["diff_layer"], row["diff_operation"]) == (0, 1, "mlp")
        assert "layer 1 mlp" in row["error"]
        assert "layer 1 mlp" in row["note"]
    [line] = suite.summary(to_frame(rows)).to_dict("records")
    assert line["status"] == "incorrect"
    assert "layer 1 mlp" in line["first_difference"]


def test_the_suite_asks_a_trained_model_real_questions() -> None:
    directory = smollm2_checkpoint()
    _, rows = run_suite(
        f"model.path={directory}",
        "attention=torch",
        "bench.num_prompts=2",
        "bench.output_len=4",
        "bench.execution=eager",
    )
    assert [row["prompt_source"] for row in rows] == ["chat", "chat"]
    assert all(row["status"] == "ok" and row["identical"] for row in rows)


def other_execution(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[PromptCheck, int], PromptCheck]
) -> None:
    """Let the suite's graph execution, which no CPU has, be another eager run whose prompts are changed."""
    real = correctness._checked

    def checked(setup: Any, execution: str, *args: Any) -> Any:
        checks, columns = real(setup, "eager", *args)
        if execution == "graph":
            checks = [change(check, i) for i, check in enumerate(checks)]
        return checks, columns

    monkeypatch.setattr(correctness, "_checked", checked)


SMALL = ("model=tiny_qwen3", "attention=torch", "bench.num_prompts=2", "bench.output_len=4")


def test_three_ways_to_the_same_tokens_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second execution that answers one of two prompts otherwise, from its third token on."""

    def change(check: PromptCheck, index: int) -> PromptCheck:
        if index == 0:
            return check
        ids = check.output.token_ids
        output = dataclasses.replace(check.output, token_ids=(*ids[:2], ids[2] ^ 1, *ids[3:]))
        return dataclasses.replace(
            check, output=output, matching_prefix=2, greedy_step=2, greedy_margin=0.5, greedy_excused=False
        )

    other_execution(monkeypatch, change)
    suite, rows = run_suite(*SMALL)
    assert [(row["execution"], row["prompt_index"]) for row in rows] == [
        ("eager", 0),
        ("eager", 1),
        ("graph", 0),
        ("graph", 1),
    ]
    assert [row["identical"] for row in rows] == [True, True, True, False]
    assert [row["identical_to_eager"] for row in rows] == [None, None, True, False]
    assert [row["eager_matching_prefix"] for row in rows] == [None, None, 4, 2]
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "incorrect"]
    frame = to_frame(rows)
    summary = suite.summary(frame).set_index("execution")
    assert summary.loc["graph", ["prompts", "identical", "identical_to_eager"]].tolist() == [2, 1, 1]
    assert suite.tables(frame)["agreement"].drop(columns=["tp", "variant"]).values.tolist() == [
        [0, "identical", "identical", "identical", "ok"],
        [1, "identical", "first 2 tokens", "first 2 tokens", "incorrect"],
    ]


def test_one_execution_that_fails_leaves_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(check: PromptCheck, index: int) -> PromptCheck:
        raise RuntimeError("CUDA out of memory")

    other_execution(monkeypatch, change)
    suite, rows = run_suite(*SMALL)
    assert [(row["execution"], row["status"]) for row in rows] == [
        ("eager", "ok"),
        ("eager", "ok"),
        ("graph", "oom"),
    ]
    table = suite.tables(to_frame(rows))["agreement"]
    assert table["graph_and_transformers"].tolist() == ["oom", "oom"]


def test_an_engine_that_is_always_eager_has_no_other_execution() -> None:
    with pytest.raises(ValueError, match=r"engine\.enforce_eager=true rules out"):
        run_suite(*SMALL, "engine=eager", "bench.execution=[eager,graph]")


def test_a_difference_on_several_ranks_is_told_without_its_place(
    checkpoint: Path, reference: TransformersReference
) -> None:
    """Their modules are in other processes: the row says that the tokens differ, and is no error of its own."""
    options: Any = {"device": "cpu", "skip_tokenizer_init": True, "num_kv_blocks": 16, "seed": 1}
    with LLM(QWEN3, load_format="dummy", tensor_parallel_size=2, **options) as llm:
        result = check(llm, reference)
    assert result.error is not None
    assert "differ" in result.error
    assert result.location is None
    assert result.note is not None
    assert "ranks of their own" in result.note


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("bench.num_prompts=0", "bench.num_prompts"),
        ("bench.output_len=x", "bench.output_len"),
        ("bench.reference_dtype=int8", "bench.reference_dtype"),
        ("bench.margin_tolerance=-1", "bench.margin_tolerance"),
        ("bench.prompts=hello", "bench.prompts"),
        ("bench.execution=[eager,compiled]", "bench.execution"),
        ("bench.prompts=[hello]", "bench.prompts needs a model"),
        ("+bench.typo=1", "bench.typo"),
    ],
)
def test_bad_options_are_named(override: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        run_suite("model=tiny_qwen3", "attention=torch", override)


# --- the reference ------------------------------------------------------------------------------------------


def test_the_reference_is_greedy_whatever_the_checkpoint_suggests(tmp_path: Path) -> None:
    """W11: sampling settings and penalties of generation_config.json, and its EOS ids, do not reach it."""
    write_random_checkpoint(tmp_path, QWEN3)
    options: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
    plain = TransformersReference.from_directory(tmp_path, **options).generate(PROMPT, 24)
    settings = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.8,
        "no_repeat_ngram_size": 2,
        "eos_token_id": plain[3],
        "max_new_tokens": 2,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    pinned = TransformersReference.from_directory(tmp_path, **options)
    assert pinned.generate(PROMPT, 24) == plain
    assert len(plain) == 24
    first = plain.index(plain[3])
    assert pinned.generate(PROMPT, 24, [plain[3], 306]) == plain[: first + 1]


def test_the_reference_forces_the_tokens_it_is_given(reference: TransformersReference) -> None:
    continuation = reference.generate(PROMPT, OUTPUT_LEN)
    logits = reference.forced_logits(PROMPT, continuation)
    assert logits.shape == (OUTPUT_LEN, 307)
    assert logits.argmax(-1).tolist() == continuation
    other = reference.forced_logits(PROMPT, [5, *continuation[1:]])
    assert torch.allclose(other[0], logits[0], atol=1e-5)
    assert not torch.allclose(other[1], logits[1], atol=1e-2)


@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3 tied", "llama untied"])
def test_dummy_weights_reach_the_reference(config: dict[str, Any]) -> None:
    with LLM(config, load_format="dummy", device="cpu", skip_tokenizer_init=True, num_kv_blocks=16) as llm:
        reference = TransformersReference.from_decoder(config, llm.model, dtype=torch.float32)
        result = check(llm, reference)
        assert result.error is None
        assert result.matching_prefix == OUTPUT_LEN


def test_a_reference_of_another_shape_is_refused() -> None:
    with LLM(QWEN3, load_format="dummy", device="cpu", skip_tokenizer_init=True, num_kv_blocks=4) as llm:
        deeper = QWEN3 | {"num_hidden_layers": 4}
        with pytest.raises(ValueError, match=r"differ in parameters.*layers\.3"):
            TransformersReference.from_decoder(deeper, llm.model, dtype=torch.float32)


def test_eos_ids_of_both_files_end_both_answers(tmp_path: Path, reference: TransformersReference) -> None:
    expected = reference.generate(PROMPT, 24)
    eos = expected[5]
    write_random_checkpoint(tmp_path, QWEN3, eos_token_id=[306, eos])
    source = resolve_model(tmp_path, "auto")
    with LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, num_kv_blocks=16) as llm:
        [output] = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    assert list(output.token_ids) == reference.generate(PROMPT, 24, source.eos_token_ids)
    assert output.token_ids[-1] == eos
    assert output.finish_reason == "stop"
