"""Span statistics that depend on the text before the span: tokens copied from the prompt, and the preceding tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from cocoa_engine.spans import Preceding

LONGEST = 3
"""Maximum length of a copied run. Longer runs are not told apart, because three tokens rarely match by chance."""

NEAR = 4
"""Number of tokens before a span that are averaged."""


class AnswerHistory:
    """The tokens of a growing answer, and their statistics.

    Args:
        prompt: token ids of the prompt.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._last: tuple[int, ...] = ()
        self._log_probs: list[float] = []
        self._entropies: list[float] = []
        self._copied: list[int] = []

    def extend(
        self, token_ids: Sequence[int], log_probs: Sequence[float], entropies: Sequence[float]
    ) -> tuple[list[int], Preceding]:
        """Add the t tokens of a span.

        Args:
            token_ids: the span's token ids.
            log_probs, entropies: their statistics, as in :class:`~cocoa_engine.spans.Measured`.

        Returns:
            For each token, the length of the longest run of answer tokens that ends with it and occurs in the prompt
            (at most :data:`LONGEST`; 0 if the prompt does not contain the token); and the statistics of the text before
            the span.
        """
        before = preceding(self._log_probs, self._entropies, self._copied)
        copied = [self._run(token_id) for token_id in token_ids]
        self._log_probs.extend(log_probs)
        self._entropies.extend(entropies)
        self._copied.extend(copied)
        return copied, before

    def _run(self, token_id: int) -> int:
        self._last = (*self._last, token_id)[-LONGEST:]
        sizes = range(len(self._last), 0, -1)
        return next((size for size in sizes if self._last[-size:] in self._runs[size - 1]), 0)

    @cached_property
    def _runs(self) -> list[set[tuple[int, ...]]]:
        """All n-grams of the prompt, by length from 1 to ``LONGEST``."""
        return [set(zip(*(self._prompt[at:] for at in range(size)), strict=False)) for size in range(1, LONGEST + 1)]


def preceding(log_probs: Sequence[float], entropies: Sequence[float], copied: Sequence[int]) -> Preceding:
    """The statistics of the text before a span.

    Args:
        log_probs, entropies, copied: one entry for each token before the span. ``copied`` is the first result of
            :meth:`AnswerHistory.extend`.
    """
    near = copied[-NEAR:]
    if not near:
        return Preceding()
    return Preceding(
        tokens=len(copied),
        log_prob=sum(log_probs[-NEAR:]) / len(near),
        entropy=sum(entropies[-NEAR:]) / len(near),
        copied=sum(run > 0 for run in near) / len(near),
        copied_run=sum(near) / len(near),
    )
