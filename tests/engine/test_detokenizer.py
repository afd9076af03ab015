"""Text as it arrives: whole characters, stop strings over token edges (case E5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import IncrementalDetokenizer


def byte_decode(token_ids) -> str:
    """One byte a token, as the hardest byte-level vocabulary would have it."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def pieces_decoder(pieces):
    return lambda token_ids: "".join(pieces[i] for i in token_ids)


def feed(pieces, stop):
    detokenizer = IncrementalDetokenizer(pieces_decoder(pieces), stop)
    shown = []
    for i in range(len(pieces)):
        detokenizer.append(i)
        shown.append(detokenizer.text)
    return detokenizer, shown


def test_e5_a_stop_string_over_token_edges_is_cut_and_never_shown():
    detokenizer, shown = feed(["x", "E", "ND!y"], ["END"])
    assert shown == ["x", "x", "x"]
    assert detokenizer.stopped
    detokenizer.finish()
    assert detokenizer.text == "x"


def test_e5_a_held_back_start_is_released_when_it_was_no_stop():
    _, shown = feed(["EN", "x"], ["END"])
    assert shown == ["", "ENx"]


def test_a_held_back_start_is_released_at_the_end():
    detokenizer, shown = feed(["a", "EN"], ["END"])
    assert shown[-1] == "a"
    detokenizer.finish()
    assert detokenizer.text == "aEN"
    assert not detokenizer.stopped


def test_the_earliest_of_several_stop_strings_counts():
    detokenizer, _ = feed(["one STOP two END"], ["END", "STOP"])
    assert detokenizer.text == "one "


def test_a_stop_string_that_starts_inside_another_is_found():
    detokenizer, shown = feed(["ab", "ab", "ac"], ["abac"])
    assert detokenizer.stopped
    assert shown[-1] == "ab"


@pytest.mark.parametrize("text", ["héllo", "日本語", "👩‍👩‍👧", "a😀b"])
def test_half_characters_are_never_shown(text):
    detokenizer = IncrementalDetokenizer(byte_decode)
    for byte in text.encode():
        detokenizer.append(byte)
        assert "\ufffd" not in detokenizer.text
        assert text.startswith(detokenizer.text)
    assert detokenizer.text == text


def test_a_character_cut_by_the_end_stays_out():
    detokenizer = IncrementalDetokenizer(byte_decode)
    for byte in "ab😀".encode()[:-1]:
        detokenizer.append(byte)
    detokenizer.finish()
    assert detokenizer.text == "ab"


def fallback_decode(token_ids) -> str:
    """One byte a token, as SentencePiece's byte fallback reads a run of them: U+FFFD for each unless all are text."""
    data = bytes(token_ids)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(data)


@pytest.mark.parametrize("text", ["héllo", "日本語", "a😀b"])
def test_half_characters_of_byte_fallback_are_never_shown(text):
    detokenizer = IncrementalDetokenizer(fallback_decode)
    for byte in text.encode():
        detokenizer.append(byte)
        assert "\ufffd" not in detokenizer.text
    assert detokenizer.text == text


def test_a_character_of_byte_fallback_cut_by_the_end_stays_out():
    detokenizer = IncrementalDetokenizer(fallback_decode)
    for byte in "ab😀".encode()[:-1]:
        detokenizer.append(byte)
    detokenizer.finish()
    assert detokenizer.text == "ab"


@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_space_after_tokens_without_text_stays(count):
    """SentencePiece strips the first space of what it decodes, so a window must not start at a special token."""
    calls = []

    def decode(token_ids):
        calls.append(len(token_ids))
        return "".join(["", " Hello", " world"][token] for token in token_ids).removeprefix(" ")

    detokenizer = IncrementalDetokenizer(decode)
    for token in [0] * count + [1] + [0] * count + [2, 0]:
        detokenizer.append(token)
    assert detokenizer.text == "Hello world"
    assert max(calls) <= 40


def test_half_characters_after_tokens_without_text_are_never_shown():
    def decode(token_ids):
        return fallback_decode(token for token in token_ids if token < 256)

    detokenizer = IncrementalDetokenizer(decode)
    for token in [256, 256, *"é日".encode(), 256, 256, 256, *"😀日".encode()]:
        detokenizer.append(token)
        assert "\ufffd" not in detokenizer.text
    assert detokenizer.text == "é日😀日"


@pytest.mark.parametrize("decode", [byte_decode, fallback_decode])
def test_bytes_that_are_no_text_are_shown_meanwhile(decode):
    detokenizer, shown = IncrementalDetokenizer(decode), [""]
    for byte in b"ab" + b"\xff" * 12:
        detokenizer.append(byte)
        assert detokenizer.text.startswith(shown[-1])
        shown.append(detokenizer.text)
    assert shown[-1].startswith("ab" + "\ufffd" * 9)


def test_bytes_that_are_no_text_do_not_pile_up():
    calls = []

    def decode(token_ids):
        calls.append(len(token_ids))
        return byte_decode(token_ids)

    detokenizer = IncrementalDetokenizer(decode)
    for _ in range(200):
        detokenizer.append(0xFF)
    assert max(calls) <= 40
    assert len(detokenizer.text) > 150


# A literal U+FFFD at the very end cannot be told from half a character, and is held back like one.
TEXT = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30)


@given(TEXT, st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_text_grows_and_ends_as_the_whole_decodes(text, stop):
    detokenizer = IncrementalDetokenizer(byte_decode, stop)
    shown = ""
    for byte in text.encode():
        detokenizer.append(byte)
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
    detokenizer.finish()
    whole = text
    found = [whole.find(s) for s in stop if s in whole]
    if not found:
        assert detokenizer.text == whole
        return
    # Text is searched as it arrives, so the stop string that is complete first decides; it is cut at its start.
    first_end = min(whole.find(s) + len(s) for s in stop if s in whole)
    complete = [whole.find(s) for s in stop if s in whole and whole.find(s) + len(s) == first_end]
    assert detokenizer.text == whole[: min(complete)]
