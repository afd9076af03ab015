"""Every attention kernel inside the engine: a request gives the tokens that it gives alone, whatever company it has.

test_differential.py draws configurations, in fp64, by the kernels that compute in it. Here are all the others of the
registries, in fp32: compiled on a GPU, in Triton's interpreter elsewhere. Batches of other sizes may round otherwise:
one request may take another token, where rounding explains it; probabilities must agree in all.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine import LLM, RequestOutput, SamplingParams
from kernels import decode, prefill
from kernels.decode import DecodeProblem
from kernels.prefill import PrefillProblem
from tests.engine.checkpoints import QWEN3, write_random_checkpoint
from tests.engine.near_ties import assert_same_but_ties

MODEL = QWEN3 | {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
MAX_LEN = 320
OPTIONS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": MAX_LEN}
COMPANY = OPTIONS | {"max_num_seqs": 5, "max_num_batched_tokens": 285, "num_kv_blocks": 21}
"""Prompts in chunks; the first four requests fit, and then grow into a fifth block each, which is one too many."""
ALONE = OPTIONS | {"max_num_seqs": 1, "enable_prefix_caching": False, "num_kv_blocks": 20}


def requests(more_tokens: int = 0) -> list[tuple[int, list[int], dict[str, Any]]]:
    """(step of arrival, prompt, sampling parameters). Long beside short, some with a common beginning."""
    rng = random.Random(0)
    shared = [rng.randrange(307) for _ in range(70)]
    kinds = [{"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 20}, {"top_p": 0.9}]
    found = []
    for i, length in enumerate([79, 95, 63, 47, 1, 290, 5, 158, 33]):
        prompt = [rng.randrange(307) for _ in range(length)]
        if i % 3 == 2:
            prompt = (shared + prompt)[: max(length, 40)]
        params = {"seed": i, "max_tokens": 4 + i % 2 + more_tokens, "ignore_eos": True} | kinds[i % 4]
        found.append((max(0, i - 3), prompt, params))
    return found


def outputs_of(llm: LLM, wanted: list[tuple[int, list[int], dict[str, Any]]]) -> list[RequestOutput]:
    waiting, outputs, step = list(enumerate(wanted)), {}, 0
    while waiting or llm.engine.has_unfinished_requests():
        while waiting and (waiting[0][1][0] <= step or not llm.engine.has_unfinished_requests()):
            index, (_, prompt, params) = waiting.pop(0)
            llm.engine.add_request(prompt, SamplingParams(**params, logprobs=0), str(index))
        outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
        step += 1
    return [outputs[str(i)] for i in range(len(wanted))]


def check(directory: Any, device: torch.device, **kernels: Any) -> None:
    wanted = requests(more_tokens=20 if device.type == "cuda" else 0)
    with LLM(directory, device=str(device), **COMPANY, **kernels) as llm:
        llm.runner.kv_cache.fill_(float("nan"))
        together = outputs_of(llm, wanted)
        stats = llm.stats()
        assert stats["num_preemptions"] > 0
        assert stats["num_cached_tokens"] > 0
    with LLM(directory, device=str(device), **ALONE, **kernels) as llm:
        alone = [outputs_of(llm, [request])[0] for request in wanted]
    assert [len(output.token_ids) for output in alone] == [params["max_tokens"] for _, _, params in wanted]
    tokens = [[list(output.token_ids) for output in outputs] for outputs in (together, alone)]
    assert_same_but_ties(directory, wanted, *tokens)
    for one, other in zip(together, alone, strict=True):
        for token, row, other_token, other_row in zip(
            one.token_ids, one.logprobs, other.token_ids, other.logprobs
        ):
            if token != other_token:
                break
            assert row[token] == pytest.approx(other_row[token], abs=3e-5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), MODEL)


SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32, "block_size": 16, "dtype": torch.float32}


@pytest.mark.parametrize("name", decode.names())
def test_decode_kernels(directory, device, name):
    problem = DecodeProblem(batch_size=5, max_context_len=MAX_LEN, device=device, **SHAPE)
    if (reason := decode.get(name).supports(problem)) is not None:
        pytest.skip(reason)
    check(directory, device, decode_attention=name)


@pytest.mark.parametrize("name", prefill.names())
def test_prefill_kernels(directory, device, name):
    problem = PrefillProblem(batch_size=5, max_query_len=285, max_context_len=MAX_LEN, device=device, **SHAPE)
    if (reason := prefill.get(name).supports(problem)) is not None:
        pytest.skip(reason)
    check(directory, device, prefill_attention=name)
