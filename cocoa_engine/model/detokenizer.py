"""Incremental detokenization, with stop texts, multi-byte characters and the text offsets of each span."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Decodes tokens as they arrive. :meth:`fork` makes a copy for a branch.

    Only a short window of tokens is decoded at each step. A character whose bytes are spread over several tokens
    appears with its last byte.

    Args:
        decode: token ids to text.
        stops: texts that end the sequence.

    Attributes:
        text: the decoded text, complete characters only.
        stop_at: the offset of the first stop text, or `None`. Once it is set, further tokens are ignored.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._window: list[int] = []  # the last tokens whose text is complete, then the tokens after them
        self._length = 0  # the number of tokens in the window whose text is complete
        self._shown = ""  # the part of the window's text that is already in ``text``
        self.text = ""
        self.stop_at: int | None = None

    def fork(self) -> Detokenizer:
        """An independent copy."""
        copy = Detokenizer(self._decode, self._stops)
        copy._window, copy._shown, copy._length = list(self._window), self._shown, self._length
        copy.text, copy.stop_at = self.text, self.stop_at
        return copy

    def push(self, token_id: int) -> None:
        """Add one token."""
        if self.stop_at is not None:
            return
        self._window.append(token_id)
        text = self._decode(self._window)
        complete = text.rstrip(_INCOMPLETE)
        if len(complete) <= len(self._shown):
            return
        self._add(complete[len(self._shown) :])
        self._shown = complete
        # The text of a token can depend on the previous token (a leading space is dropped at the start of a text). So
        # the window always begins with tokens whose text is known, and only the new part of its text is added.
        if complete == text:
            self._window = self._window[self._length :]
            self._length = len(self._window)
            self._shown = self._decode(self._window)

    def pending(self) -> str:
        """The text of trailing bytes that do not form a complete character yet, usually U+FFFD."""
        return "" if self.stop_at is not None else self._decode(self._window)[len(self._shown) :]

    def safe_length(self) -> int:
        """The length of the text that is final. An end that could be the beginning of a stop text is not final."""
        if self.stop_at is not None:
            return self.stop_at
        length = len(self.text)
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self.text)), 0, -1):
                if self.text.endswith(stop[:size]):
                    length = min(length, len(self.text) - size)
                    break
        return length

    def _add(self, text: str) -> None:
        before = len(self.text)
        self.text += text
        found = (self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops)
        self.stop_at = min((at for at in found if at >= 0), default=None)


class SpanTexts:
    """Returns the text and offsets of each span as soon as they are final.

    A span whose end could be the beginning of a stop text is held back, so that no text has to be withdrawn.
    """

    def __init__(self) -> None:
        self._shown = 0

    def ready(self, track: Detokenizer, ends: Sequence[int], finished: bool) -> list[tuple[int, int, str]]:
        """``(start, end, text)`` of the spans not returned before whose text is final.

        Args:
            track: the text so far.
            ends: for each span decided so far, the offset in the text at which its complete characters end.
            finished: whether decoding has ended. Then every span is final, and the last one includes the text of bytes
                that never formed a complete character.
        """
        text, ends = track.text, list(ends)
        cut = track.safe_length()
        if finished:
            if track.stop_at is None:
                text += track.pending()
                cut = len(text)
            ends[-1:] = [len(text)]
        spans = []
        while self._shown < len(ends) and (finished or ends[self._shown] <= cut):
            start = min(ends[self._shown - 1] if self._shown else 0, cut)
            end = min(ends[self._shown], cut)
            spans.append((start, end, text[start:end]))
            self._shown += 1
        return spans
