"""Text to token ids and back, by the tokenizer a checkpoint brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.models.checkpoint import ModelSource, resolve_directory
from engine.transformers_guard import import_transformers

_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "tekken.json",
)


class Tokenizer:
    """A Transformers tokenizer, reduced to what the engine needs. `wrapped` is the original."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def encode(self, text: str) -> list[int]:
        """Ids of the text, with the special tokens the tokenizer puts around a prompt.

        Raises ValueError for half a surrogate pair, which Python's str may hold and Unicode text may not.
        """
        _check_unicode(text)
        return list(self.wrapped.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, as the model wrote it; special tokens, and ids that have no token, are left out."""
        return self.wrapped.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    @property
    def has_chat_template(self) -> bool:
        return getattr(self.wrapped, "chat_template", None) is not None

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of a conversation as the chat template lays it out, ending where the assistant's answer begins.

        conversation: {"role", "content"} messages. options go to the template, such as enable_thinking=False, and may
        set add_generation_prompt. Raises ValueError if there is no template or it refuses the conversation.
        """
        if not self.has_chat_template:
            raise ValueError("the tokenizer has no chat template")
        if isinstance(conversation, str) or not all(isinstance(message, Mapping) for message in conversation):
            raise ValueError(
                f"a conversation must be a list of messages with role and content, got {conversation!r:.100}"
            )
        options = {"add_generation_prompt": True, **options}
        try:
            text = self.wrapped.apply_chat_template(
                [dict(message) for message in conversation], tokenize=False, **options
            )
        except Exception as error:  # a template computes, so it may raise anything
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        _check_unicode(text)
        # The template writes the special tokens itself.
        return list(self.wrapped.encode(text, add_special_tokens=False))


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds the lone surrogate {text[error.start]!r} at character {error.start}, which is no "
            "Unicode text"
        ) from error


def load_tokenizer(tokenizer: str | Path | None, source: ModelSource) -> Tokenizer | None:
    """The tokenizer in a directory or of a hub id; None: the model's own. Never runs code that comes with it.

    Returns None for a bare configuration without tokenizer: there is nowhere to look. Raises ValueError, naming the
    place, if no tokenizer can be loaded from it.
    """
    if tokenizer is None and source.path is None:
        return None
    place = source.path if tokenizer is None else resolve_directory(tokenizer, with_weights=False)
    assert place is not None
    auto_tokenizer = import_transformers().AutoTokenizer
    try:
        if not any(file for pattern in _VOCABULARY_FILES for file in place.glob(pattern)):
            # Transformers would make an empty tokenizer of the model's type and say nothing.
            raise FileNotFoundError(f"none of {', '.join(_VOCABULARY_FILES)} is there")
        wrapped = auto_tokenizer.from_pretrained(str(place), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ValueError(
            f"no tokenizer can be loaded from {place}: {error}; pass tokenizer=, or skip_tokenizer_init=True to work "
            "with token ids only"
        ) from error
    return Tokenizer(wrapped)
