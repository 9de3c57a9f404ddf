"""Statistics of a span that depend on the text before it: what it repeats of the prompt, and the preceding tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from cocoa_engine.spans import Preceding

LONGEST = 3
"""Longer runs count as this length: a run of three tokens hardly ever repeats by chance."""

NEAR = 4
"""How many tokens before a span are averaged."""


class AnswerHistory:
    """A growing answer to a prompt.

    Args:
        prompt: token ids.
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
        """Add the tokens of a span, with their statistics as in :class:`~cocoa_engine.spans.Measured`, ``[t]``.

        Returns:
            For each token, how many of the answer's tokens up to and including it stand in a row in the prompt (at most
            :data:`LONGEST`; 0 if the prompt does not contain the token). And the statistics of the text before the
            span.
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
        """Every run of 1, 2, .. ``LONGEST`` tokens of the prompt."""
        return [set(zip(*(self._prompt[at:] for at in range(size)), strict=False)) for size in range(1, LONGEST + 1)]


def preceding(log_probs: Sequence[float], entropies: Sequence[float], copied: Sequence[int]) -> Preceding:
    """The statistics of the text before a span, from those of all tokens before it."""
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
