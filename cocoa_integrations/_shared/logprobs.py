"""Token log-probabilities in the format of OpenAI's ``logprobs``, which uncertainty scorers read."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from cocoa_engine import CocoaEngine, Span

UNLIKELY = -9999.0
"""What OpenAI's ``logprobs`` have instead of minus infinity."""


class TokenLogprobs:
    """Lists the tokens of an answer, span by span.

    The token texts concatenate to the text of the answer, and their ``bytes`` to its UTF-8 encoding. A token that holds
    only part of a character has an empty text; the token that completes the character has all of it. End tokens, and
    tokens that a stop text cut off, are not part of the text and are not listed.

    Args:
        engine: the engine whose tokens they are.
        special: list special tokens too, such as an end token, by their names.
    """

    def __init__(self, engine: CocoaEngine, *, special: bool = False) -> None:
        self._engine = engine
        self._lists_special = special
        self._track = engine.detokenizer()
        self._special = frozenset(engine.tokenizer.all_special_ids)

    def of(self, span: Span) -> list[dict[str, Any]]:
        """The entries of the next span: ``token``, ``logprob``, ``bytes`` and ``top_logprobs``.

        ``top_logprobs`` has the most probable tokens of the distribution that the token was chosen from, most probable
        first, as many as the setting ``top_logprobs`` says. Special tokens among them have their name and no bytes.
        """
        entries = []
        shown = 0  # characters of the span's text that the tokens so far cover
        rivals: Sequence[Sequence[tuple[int, float]]] = span.top_log_probs or [()] * len(span.token_ids)
        for entry in map(self.token, span.token_ids, span.token_log_probs, rivals):
            text = entry["token"][: len(span.text) - shown]
            if entry["bytes"] is None:  # a special token
                entries += [entry] if self._lists_special else []
            elif text or not entry["token"]:
                shown += len(text)
                entries.append({**entry, "token": text, "bytes": list(text.encode())})
        return entries

    def of_answer(self, spans: Iterable[Span]) -> list[dict[str, Any]]:
        """The entries of all spans of an answer; see :meth:`of`."""
        return [entry for span in spans for entry in self.of(span)]

    def token(self, token_id: int, log_prob: float | None, top: Sequence[tuple[int, float]] = ()) -> dict[str, Any]:
        """The entry of the next token of a text that is not divided into spans, such as a prompt."""
        entry = {"top_logprobs": [self._rival(*token) for token in top]}
        before = len(self._track.text)
        self._track.push(token_id)
        piece = self._track.text[before:]
        is_special = not piece and token_id in self._special
        return {**(self._named(token_id, log_prob) if is_special else _entry(piece, log_prob)), **entry}

    def _rival(self, token_id: int, log_prob: float) -> dict[str, Any]:
        """The entry of a token that could have come next."""
        if token_id in self._special:
            return self._named(token_id, log_prob)
        track = self._track.fork()
        before = len(track.text)
        track.push(token_id)
        return _entry(track.text[before:], log_prob)

    def _named(self, token_id: int, log_prob: float | None) -> dict[str, Any]:
        """The entry of a special token."""
        return {**_entry(self._engine.tokenizer.convert_ids_to_tokens(token_id), log_prob), "bytes": None}


def _entry(text: str, log_prob: float | None) -> dict[str, Any]:
    if log_prob is not None and not math.isfinite(log_prob):
        log_prob = UNLIKELY
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
