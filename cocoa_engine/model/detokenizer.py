"""Incremental detokenization, with stop texts, multi-byte characters and the text offsets of each span."""

import codecs
from collections.abc import Sequence
from copy import copy

from cocoa_engine.model.tokenizer import REPLACEMENT, Tokens


class Detokenizer:
    """Decodes tokens as they arrive. :meth:`fork` makes a copy for a branch.

    Only a short window of tokens is decoded at each step. A character whose bytes are spread over several tokens
    appears with its last byte. Bytes that are not text, and never will be, appear as U+FFFD.

    Args:
        tokens: the tokenizer.
        stops: texts that end the sequence.

    Attributes:
        text: the decoded text, without a character whose last bytes are still to come.
        stop_at: the offset of the stop text that was complete first, or `None`.
    """

    def __init__(self, tokens: Tokens, stops: Sequence[str] = ()) -> None:
        self._tokens = tokens
        self._stops = tuple(stops)
        self._window: list[int] = []  # the last tokens whose text is complete, then the tokens after them
        self._length = 0  # the number of tokens in the window whose text is complete
        self._shown = ""  # the part of the window's text that is already in ``text``
        self.text = ""
        self.stop_at: int | None = None
        self._stopped = 0  # the length of the text when a stop text was complete

    def fork(self) -> "Detokenizer":
        """An independent copy."""
        fork = copy(self)
        fork._window = list(self._window)
        return fork

    def push(self, token_id: int) -> None:
        """Add one token."""
        self._window.append(token_id)
        text = self._tokens.decode(self._window)
        complete = self._complete(text)
        if len(complete) <= len(self._shown):
            return
        before = len(self.text)
        self.text += complete[len(self._shown) :]
        if self.stop_at is None:
            places = (self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops)
            self.stop_at = min((place for place in places if place >= 0), default=None)
            self._stopped = len(self.text)
        self._shown = complete
        # The text of a token can depend on the previous token (a leading space is dropped at the start of a text). So
        # the window always begins with tokens whose text is known, and only the new part of its text is added.
        if complete == text:
            self._window = self._window[self._length :]
            self._length = len(self._window)
            self._shown = self._tokens.decode(self._window)

    def stops_at(self, length: int) -> bool:
        """Whether the text of this length has a stop text. It must have been the text after a token."""
        return self.stop_at is not None and length >= self._stopped

    def safe_length(self) -> int:
        """The length of the text that is final. An end that could be the beginning of a stop text is not final."""
        if self.stop_at is not None:
            return self.stop_at
        length = len(self.text)
        for stop in self._stops:
            sizes = (size for size in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:size]))
            length = min(length, len(self.text) - next(sizes, 0))
        return length

    def _complete(self, text: str) -> str:
        """The text of the window without a character whose last bytes are still to come."""
        if not text.endswith(REPLACEMENT):
            return text
        parts = [self._tokens.bytes_of(token_id) for token_id in self._window[self._length :]]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return text.rstrip(REPLACEMENT)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(b"".join(whole))
        begun = len(decoder.getstate()[0])
        while begun and begun >= len(whole[-1]):  # one byte may be one U+FFFD, or all of them
            begun -= len(whole.pop())
        before = self._window[: self._length + len(whole)]
        return text[:-1] if begun else text if len(whole) == len(parts) else self._tokens.decode(before)


def decoded(tokens: Tokens, token_ids: Sequence[int]) -> str:
    """The text of tokens, without a character that they begin and do not complete."""
    track = Detokenizer(tokens)
    for token_id in token_ids:
        track.push(token_id)
    return track.text


class SpanTexts:
    """Returns the text and offsets of each span as soon as they are final.

    A span whose end could be the beginning of a stop text is held back, so that no text has to be withdrawn.
    """

    def __init__(self) -> None:
        self._shown = 0

    def ready(self, track: Detokenizer, ends: Sequence[int], finished: bool) -> list[tuple[int, int, str]]:
        """``(start, end, text)`` of new spans whose text is final. ``ends`` are where their whole characters end."""
        text = track.text
        cut = len(text) if finished and track.stop_at is None else track.safe_length()
        spans = []
        while self._shown < len(ends) and (finished or ends[self._shown] <= cut):
            start = min(ends[self._shown - 1] if self._shown else 0, cut)
            end = min(ends[self._shown], cut)
            spans.append((start, end, text[start:end]))
            self._shown += 1
        return spans
