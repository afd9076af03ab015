"""LLM.profile leaves a trace of what ran, and nothing behind."""

from __future__ import annotations

import gzip
import json

import pytest

from engine import LLM, SamplingParams
from tests.engine.checkpoints import QWEN3

OPTIONS = {"load_format": "dummy", "skip_tokenizer_init": True, "num_kv_blocks": 64}
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def events(file):
    content = file.read_bytes()
    return json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)["traceEvents"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_holds_the_steps_that_ran_meanwhile(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with LLM(QWEN3, device="cpu", **OPTIONS) as llm:
        expected = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)[0].token_ids
        with llm.profile(name):
            traced = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)[0].token_ids
        assert traced == expected
        activations = sum(event["name"] == "aten::silu" for event in events(tmp_path / name))
        assert activations == 4 * QWEN3["num_hidden_layers"]  # a step a token
        with llm.profile(tmp_path / "second.json"):
            pass
        assert not any(event["name"] == "aten::silu" for event in events(tmp_path / "second.json"))


def test_where_nothing_can_be_written_is_told_before_anything_runs(tmp_path):
    with LLM(QWEN3, device="cpu", **OPTIONS) as llm:
        for path, message in [
            (tmp_path / "trace.txt", "must end in .json"),
            (tmp_path / "no" / "t.json", "folder"),
        ]:
            with pytest.raises(ValueError, match=message), llm.profile(path):
                raise AssertionError("not reached")
        outer, inner = llm.profile(tmp_path / "outer.json"), llm.profile(tmp_path / "inner.json")
        with outer, pytest.raises(RuntimeError, match="under way already"), inner:
            raise AssertionError("not reached")
        assert [file.name for file in tmp_path.iterdir()] == ["outer.json"]


def test_an_error_meanwhile_is_raised_and_the_trace_written(tmp_path):
    with LLM(QWEN3, device="cpu", **OPTIONS) as llm:
        with pytest.raises(KeyError), llm.profile(tmp_path / "trace.json"):
            raise KeyError("a user's")
        assert events(tmp_path / "trace.json")
        with llm.profile(tmp_path / "again.json"):
            pass


def test_every_rank_writes_a_trace(tmp_path):
    with LLM(QWEN3, device="cpu", tensor_parallel_size=2, **OPTIONS) as llm, llm.profile(tmp_path / "t.json"):
        llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.rank0.json", "t.rank1.json"]
    for file in tmp_path.iterdir():
        assert any(event["name"] == "aten::embedding" for event in events(file))


@pytest.mark.gpu
def test_a_trace_of_a_gpu_holds_its_kernels(tmp_path):
    with LLM(QWEN3 | {"head_dim": 64}, device="cuda", **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        with llm.profile(tmp_path / "trace.json"):
            llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    kernels = [event for event in events(tmp_path / "trace.json") if event.get("cat") == "kernel"]
    assert len(kernels) > 4 * QWEN3["num_hidden_layers"]
