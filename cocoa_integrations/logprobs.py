"""Token log-probabilities in the shape of OpenAI's ``logprobs``, which white-box scorers read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cocoa_engine import CocoaEngine, Span
from cocoa_engine.model.detokenizer import TextTrack


class TokenLogprobs:
    """The tokens of an answer's text, span by span.

    The texts of all tokens concatenate to the answer's text, and their ``bytes`` to its UTF-8: a token that holds a
    part of a character has no text, and the one that completes it has it whole. End tokens and what a stop text cut
    off are not in the text, and so not listed.
    """

    def __init__(self, engine: CocoaEngine) -> None:
        self._track = TextTrack(engine.decode)
        self._special = frozenset(engine.tokenizer.all_special_ids)

    def of(self, span: Span) -> list[dict[str, Any]]:
        """The entries of the next span: ``token``, ``logprob``, ``bytes`` and ``top_logprobs`` (empty)."""
        entries = []
        shown = 0  # characters of the span's text that its tokens so far account for
        for number, (token_id, log_prob) in enumerate(zip(span.token_ids, span.token_log_probs, strict=True)):
            before = len(self._track.text)
            self._track.push(token_id)
            piece = self._track.text[before:]
            if number == len(span.token_ids) - 1 and shown + len(piece) < len(span.text):
                piece = span.text[shown:]  # the answer ends in bytes that make no character
            text = piece[: len(span.text) - shown]
            shown += len(text)
            if text or (not piece and token_id not in self._special):
                entries.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
        return entries


def openai_logprobs(spans: Iterable[Span], engine: CocoaEngine) -> dict[str, Any]:
    """``{"content": [...]}`` of a whole answer."""
    tokens = TokenLogprobs(engine)
    return {"content": [entry for span in spans for entry in tokens.of(span)]}
