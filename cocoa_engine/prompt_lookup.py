"""Guesses of the next tokens by prompt lookup: what followed the last few tokens when they came before.

An answer over a given context repeats much of it. A guess costs one more row in a forward pass that is run anyway; the
decode takes it only where it would have chosen that very token (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SIZES = (3, 2)  # tokens that must have come before, the longer match first


_AT_FIRST = 0.4
_MEMORY = 0.8
"""Of the accuracy so far, in the accuracy after another guess."""


class PromptLookup:
    """An index of every run of 2 or 3 tokens in a growing sequence, and in what it might have been.

    Args:
        token_ids: what is there already.
        most: guesses at a time, 0 for none.

    Attributes:
        accuracy: the share of guesses that were right, recent ones counting more.
    """

    def __init__(self, token_ids: Iterable[int], most: int) -> None:
        self._ids: list[int] = []
        # run -> where what follows it begins, the last time
        self._follows: dict[tuple[int, ...], tuple[list[int], int]] = {}
        self._most = most
        self.accuracy = _AT_FIRST
        if most:
            self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the sequence."""
        if not self._most:
            return
        start = len(self._ids)
        self._ids.extend(token_ids)
        self._index(self._ids, start)

    def note(self, token_ids: Sequence[int]) -> None:
        """Learn from a branch that was not kept: what it says, the sequence may yet say, too."""
        if self._most:
            before = self._ids[-_SIZES[0] :]
            self._index([*before, *token_ids], len(before))

    def _index(self, ids: list[int], start: int) -> None:
        for end in range(start, len(ids)):
            for size in _SIZES:  # the run before this token is now followed by something
                if end >= size:
                    self._follows[tuple(ids[end - size : end])] = (ids, end)

    def guess(self, path: Sequence[int], count: int) -> tuple[int, ...]:
        """At most ``count`` tokens that may follow the sequence and ``path``; none if nothing like it came before."""
        count = min(count, self._most)
        if count < 1:
            return ()
        last = [*self._ids[-_SIZES[0] :], *path][-_SIZES[0] :]
        for size in _SIZES:
            found = self._follows.get(tuple(last[-size:])) if len(last) >= size else None
            if found is not None:
                ids, start = found
                return tuple(ids[start : start + count])
        return ()

    def worth(self, paths: int, cost: float) -> int:
        """How many guesses to feed at the end of each of some paths that have to go on together.

        The n-th one saves a pass if it and those before it are right for every path.

        Args:
            cost: of a guess, as a share of a pass.
        """
        count = 0
        while count < self._most and self.accuracy ** ((count + 1) * paths) >= cost * paths:
            count += 1
        return count

    def judge(self, right: bool) -> None:
        """Learn whether a guessed token was right."""
        self.accuracy = _MEMORY * self.accuracy + (1 - _MEMORY) * right
