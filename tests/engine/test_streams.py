"""Several streams and generate at once: every one gets its own end, whoever steps the engine."""

from __future__ import annotations

import itertools

import pytest

from engine import LLM, SamplingParams
from tests.engine.checkpoints import QWEN3, write_random_checkpoint, write_tokenizer

# A stream that never ends is found sooner than any other test that hangs; the import of Transformers is in it.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = write_tokenizer(write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), QWEN3))
    with LLM(str(directory), device="cpu", num_kv_blocks=64, max_model_len=128) as llm:
        yield llm


class ByteTokenizer:
    """Every token is a letter."""

    def decode(self, token_ids):
        return "x" * len(token_ids)


def params(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options))


def text_of(llm: LLM, prompt: str, max_tokens: int) -> str:
    return llm.generate(prompt, params(max_tokens), use_tqdm=False)[0].text


@pytest.mark.parametrize("lengths", [(12, 1), (1, 12), (6, 6), (12, 3, 7)])
def test_streams_in_turns_all_end(llm, lengths):
    prompts = ["one", "two two", "three"][: len(lengths)]
    expected = [text_of(llm, prompt, n) for prompt, n in zip(prompts, lengths)]
    streams = [llm.stream(prompt, params(n)) for prompt, n in zip(prompts, lengths)]
    rounds = itertools.zip_longest(*streams, fillvalue="")
    assert ["".join(pieces) for pieces in zip(*rounds)] == expected
    assert not llm.engine.has_unfinished_requests()


def test_a_stream_left_early_keeps_the_end_of_another(llm):
    long, short = llm.stream("one", params(12)), llm.stream("two", params(1))
    next(long)
    long.close()
    assert "".join(short) == text_of(llm, "two", 1)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("leave", ["close", "forget"])
def test_a_stream_that_is_never_read_leaves_no_request(llm, leave):
    stream = llm.stream("one", params(12))
    if leave == "close":
        stream.close()
    del stream
    assert not llm.engine.has_unfinished_requests()


def test_generate_between_the_pieces_of_a_stream(llm):
    stream = llm.stream("one", params(12))
    pieces = [next(stream)]
    assert text_of(llm, "two", 20)
    assert "".join(pieces + list(stream)) == text_of(llm, "one", 12)


def test_an_end_not_yet_reported_is_not_taken_for_ones_own(llm):
    """Its id was chosen by a user, in the form that the engine chooses."""
    chosen = f"request-{llm.engine._num_arrivals + 2}"
    llm.engine.add_request("abc", params(1), chosen)
    expected = text_of(llm, "two", 8)
    assert text_of(llm, "two", 8) == expected
    assert "".join(llm.stream("two", params(8))) == expected
    assert [output.request_id for output in llm.engine.step()] == [chosen]


def test_a_stream_whose_request_is_aborted_ends(llm):
    before = {f"request-{llm.engine._num_arrivals}"}
    stream = llm.stream("one", params(100))
    pieces = [next(stream)]
    llm.engine.abort(before.pop())
    pieces += stream
    assert text_of(llm, "one", 100).startswith("".join(pieces))
    assert not llm.engine.has_unfinished_requests()


def test_a_stream_whose_request_fails_raises(llm):
    """Without its finish_reason, a text that was cut off would look like a whole one."""
    stream = llm.stream("one", params(12))
    pieces = [next(stream)]
    llm.runner.kv_cache.fill_(float("nan"))
    try:
        with pytest.raises(RuntimeError, match="ended with an error: the model's logits held NaN"):
            pieces += stream
    finally:
        llm.runner.kv_cache.zero_()
        llm.reset_prefix_cache()
    assert text_of(llm, "one", 12).startswith("".join(pieces))
    assert not llm.engine.has_unfinished_requests()


def test_a_stream_outlives_its_engine_with_an_error():
    with LLM(QWEN3, load_format="dummy", device="cpu", num_kv_blocks=4) as llm:
        llm.engine.tokenizer = ByteTokenizer()
        stream = llm.stream([1, 2], params(40))
        next(stream)
    with pytest.raises(RuntimeError, match="ended with an error: the engine is closed"):
        list(stream)
