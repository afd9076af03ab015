"""A trained model, SmolLM2-135M-Instruct in fp32, against Transformers on real prompts."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from tests.engine.checkpoints import reference_model, smollm2_checkpoint

NUM_NEW = 32
QUESTIONS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "What is 17 + 25?",
    "Wie heißt die Hauptstadt von Österreich? 🇦🇹",
    "def fibonacci(n):",
]
MORE_QUESTIONS = [
    "Write a short poem about the sea.",
    "Translate to Spanish: 'Good morning, my friends.'",
    "List three prime numbers larger than ten.",
    "Summarise the plot of Romeo and Juliet.",
    "Give me a recipe for pancakes.",
]
SYSTEM = (
    "You are a careful assistant of a small museum. Answer briefly, name your sources when you have any, "
    "and say so when you do not know. "
) * 6


@pytest.fixture(scope="module")
def checkpoint():
    return smollm2_checkpoint()


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, device="cpu", max_model_len=1024, num_kv_blocks=256) as llm:
        yield llm


def conversation(question: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": question}]


def ask(llm, questions, num_new):
    params = SamplingParams(temperature=0.0, max_tokens=num_new)
    return llm.chat([conversation(question) for question in questions], params, use_tqdm=False)


@pytest.fixture(scope="module")
def answers(llm):
    return ask(llm, QUESTIONS, NUM_NEW)


def test_greedy_answers_equal_transformers(checkpoint, llm, answers):
    compare(checkpoint, llm, answers, NUM_NEW)


@pytest.mark.slow
def test_long_greedy_answers_equal_transformers(checkpoint, llm):
    compare(checkpoint, llm, ask(llm, [*QUESTIONS, *MORE_QUESTIONS], 64), 64)


def compare(checkpoint, llm, answers, num_new):
    model = reference_model(checkpoint)
    for answer in answers:
        ids = torch.tensor([answer.prompt_token_ids])
        with torch.inference_mode():
            theirs = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new,
                do_sample=False,
                eos_token_id=sorted(llm.engine.eos_token_ids),
                pad_token_id=0,
            )
        assert list(answer.token_ids) == theirs[0, ids.shape[1] :].tolist()


def test_the_model_is_a_trained_one(answers):
    assert "Paris" in answers[0].text


def test_text_is_what_the_tokenizer_says_of_all_ids_at_once(llm, answers):
    for answer in answers:
        whole = llm.tokenizer.decode(answer.token_ids)
        assert answer.text == whole.removesuffix("\ufffd")


def test_a_shared_system_prompt_is_computed_once(llm):
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=8)
    conversations = [conversation(question, SYSTEM) for question in QUESTIONS[:3]]
    first = llm.chat(conversations[:1], params, use_tqdm=False)[0]
    computed_before = llm.stats()["num_prefill_tokens"]
    others = llm.chat(conversations[1:], params, use_tqdm=False)

    ids = [first.prompt_token_ids, *(output.prompt_token_ids for output in others)]
    shared = next(i for i, column in enumerate(zip(*ids)) if len(set(column)) > 1)
    assert shared >= 150
    block_size = llm.config.block_size
    assert first.num_cached_tokens == 0
    assert [output.num_cached_tokens for output in others] == [shared // block_size * block_size] * 2
    computed = llm.stats()["num_prefill_tokens"] - computed_before
    assert computed == sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in others)
    llm.reset_prefix_cache()
    again = llm.chat(conversations[1:], params, use_tqdm=False)
    assert [output.token_ids for output in again] == [output.token_ids for output in others]


def test_streaming_yields_the_same_text_in_pieces(llm, answers):
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompt = llm.tokenizer.apply_chat_template(conversation(QUESTIONS[3]))
    pieces = list(llm.stream(prompt, params))
    assert len(pieces) > 5
    assert answers[3].text.startswith("".join(pieces))
    assert not llm.engine.has_unfinished_requests()


def test_leaving_a_stream_early_aborts_its_request(llm):
    stream = llm.stream("Once upon a time", SamplingParams(temperature=0.0, max_tokens=50))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.step() == []
    assert llm.engine.block_manager.num_free_blocks == llm.engine.block_manager.num_blocks


def test_a_stop_string_cuts_the_text_before_it(llm, answers):
    stop = answers[0].text[8:13]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, stop=[stop])
    (output,) = llm.chat(conversation(QUESTIONS[0]), params, use_tqdm=False)
    assert output.finish_reason == "stop"
    assert output.text == answers[0].text[: answers[0].text.index(stop)]
    assert answers[0].token_ids[: len(output.token_ids)] == output.token_ids
