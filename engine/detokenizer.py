"""From token ids to text as they arrive: whole characters only, and nothing that a stop string may yet take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
_MAX_HALF = 3
"""Bytes, and so tokens, of a character that is not all there, at most."""
_MAX_PENDING = 16
"""A character is at most 4 bytes, so at most 4 tokens: after this many the bytes are simply not valid text."""


class IncrementalDetokenizer:
    """Text of one request's output, token by token.

    Tokens are decoded in a small window that starts a few tokens back, at one that has text, since how a token reads
    can depend on what stands before it. A character whose bytes are not all there yet decodes to U+FFFD at the very
    end, once or once for each byte, and is held back until the rest arrives. So is the longest end of the text that a
    stop string starts with. text is what may be shown; once a stop string is complete, `stopped` is True and text ends
    before it.

    decode: ids to text, special tokens left out.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._window_start = 0
        self._window_read = 0
        """Tokens up to here are wholly in self._settled."""
        self._num_half = 0
        """Newest tokens since the text last ended in a whole character."""
        self._settled = ""
        self.text = ""
        self.stopped = False

    def append(self, token_id: int) -> None:
        """Take one more token."""
        if self.stopped:
            return
        self._token_ids.append(token_id)
        known = self._decode(self._token_ids[self._window_start : self._window_read])
        window = self._decode(self._token_ids[self._window_start :])
        fresh = window[len(known) :]
        pending = len(self._token_ids) - self._window_read
        self._num_half = self._num_half + 1 if fresh.endswith(_REPLACEMENT) else 0
        if not fresh and pending > _MAX_PENDING:
            del self._token_ids[self._window_read :]  # special tokens: they have no text of their own
        elif fresh and (not fresh.endswith(_REPLACEMENT) or pending > _MAX_PENDING):
            searched = len(self._settled)
            self._settled += fresh
            self._window_start, self._window_read = self._window_read, len(self._token_ids)
            self._show(self._settled, searched)
        else:
            self._show(self._settled + _without_half(fresh, self._num_half), len(self._settled))

    def finish(self) -> None:
        """No more tokens: release what was held back for a stop string that never came. Half characters stay out."""
        if self.stopped:
            return
        known = self._decode(self._token_ids[self._window_start : self._window_read])
        window = self._decode(self._token_ids[self._window_start :])
        self.text = self._settled + _without_half(window[len(known) :], self._num_half)

    def _show(self, text: str, searched: int) -> None:
        """Set text to what may be shown of `text`, of which no stop string ends before character `searched`."""
        reach = max((len(stop) for stop in self._stop), default=1) - 1
        found = [at for stop in self._stop if (at := text.find(stop, max(0, searched - reach))) >= 0]
        if found:
            self.text = text[: min(found)]
            self.stopped = True
            return
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self.text = text[: len(text) - held]


def _without_half(text: str, num_tokens: int) -> str:
    """text without the half character that it may end with, as it has done for so many tokens.

    Where its bytes follow others, byte fallback reads those as U+FFFD too; in more tokens it stands behind what is no
    text, of which some is kept.
    """
    whole = text.rstrip(_REPLACEMENT)
    return whole if num_tokens <= _MAX_HALF else text[: max(len(whole), len(text) - _MAX_HALF)]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of stop that text ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
