"""Text to ids and back, chat templates, and where a tokenizer is looked for."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from engine.detokenizer import IncrementalDetokenizer
from engine.models.checkpoint import resolve_model
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.checkpoints import QWEN3, smollm2_checkpoint, write_random_checkpoint, write_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<bos>{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant{% if loud %}!{% endif %}: {% endif %}"
)
NOWHERE = resolve_model(QWEN3, "dummy")


def load(directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(directory, NOWHERE)
    assert tokenizer is not None
    return tokenizer


def test_text_survives_the_round_trip(tmp_path: Path) -> None:
    tokenizer = load(write_tokenizer(tmp_path))
    text = "  Grüße , 世界 !\n\n🙂 don't \t"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.encode("") == []


def test_a_prompt_gets_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = load(write_tokenizer(tmp_path, bos=True))
    assert tokenizer.encode("a")[0] == 256
    assert len(tokenizer.encode("a")) == 2


def test_special_tokens_and_ids_without_a_token_are_left_out_of_text(tmp_path: Path) -> None:
    """A model's vocabulary is often padded beyond its tokenizer's."""
    tokenizer = load(write_tokenizer(tmp_path))
    [a] = tokenizer.encode("a")
    assert tokenizer.decode([256, a, 257, 300, a]) == "aa"
    assert tokenizer.decode([300]) == ""
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    for token_id in (*tokenizer.encode("é"), 300, 257, a):
        detokenizer.append(token_id)
    detokenizer.finish()
    assert detokenizer.text == "éa"


def test_the_chat_template_lays_out_a_conversation(tmp_path: Path) -> None:
    """Special tokens written by the template become single ids, and none is added around them."""
    tokenizer = load(write_tokenizer(tmp_path, bos=True, chat_template=TEMPLATE))
    conversation = [{"role": "user", "content": "hi"}]
    body = Tokenizer.encode(load(write_tokenizer(tmp_path / "plain")), "user: hi")
    prompt = tokenizer.apply_chat_template(conversation)
    assert prompt[: len(body) + 2] == [256, *body, 257]
    assert prompt.count(256) == 2
    assert tokenizer.decode(prompt).endswith("assistant: ")
    assert tokenizer.decode(tokenizer.apply_chat_template(conversation, loud=True)).endswith("assistant!: ")
    assert tokenizer.apply_chat_template(conversation, add_generation_prompt=False) == [256, *body, 257]


def test_a_conversation_the_template_refuses_is_a_value_error(tmp_path: Path) -> None:
    tokenizer = load(write_tokenizer(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(ValueError, match="no tools"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    divides = load(write_tokenizer(tmp_path / "divides", chat_template="{{ 1 // (messages | length - 1) }}"))
    with pytest.raises(ValueError, match="the chat template refuses the conversation: integer division"):
        divides.apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="no chat template"):
        load(write_tokenizer(tmp_path / "plain")).apply_chat_template([{"role": "user", "content": "x"}])


def test_the_models_own_tokenizer_is_the_default(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, QWEN3)
    source = resolve_model(tmp_path, "auto")
    with pytest.raises(ValueError, match=f"no tokenizer can be loaded from {tmp_path}.*skip_tokenizer_init"):
        load_tokenizer(None, source)
    write_tokenizer(tmp_path)
    own = load_tokenizer(None, source)
    assert own is not None
    assert own.encode("a") == load(tmp_path).encode("a")


def test_a_bare_configuration_has_no_tokenizer() -> None:
    assert load_tokenizer(None, NOWHERE) is None
    with pytest.raises(ValueError, match="no-such-org/no-such-tokenizer"):
        load_tokenizer("no-such-org/no-such-tokenizer", NOWHERE)


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(ran)!r}, 'w')\nclass Custom:\n    pass\n")
    config_file = tmp_path / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config |= {"auto_map": {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}, "tokenizer_class": "Custom"}
    config_file.write_text(json.dumps(config))
    with contextlib.suppress(ValueError):
        load(tmp_path)
    assert not ran.exists()


def test_smollm2_tokenizer_and_chat_template() -> None:
    tokenizer = load_tokenizer(None, resolve_model(smollm2_checkpoint(), "auto"))
    assert tokenizer is not None
    text = "Hello,  world! Ça va? 1234"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert tokenizer.wrapped.decode(prompt) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(prompt) == (
        "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\nuser\nHi\nassistant\n"
    )
