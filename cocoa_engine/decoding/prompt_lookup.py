"""Guesses of the next tokens by prompt lookup: what followed the last few tokens at their last occurrence.

An answer about a given context repeats much of it. A guess costs one more row in a forward pass that is run anyway. The
decode takes a guess only where it would have chosen that very token (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_AT_FIRST = {3: 0.4, 2: 0.4, 1: 0.1}
"""Initial accuracy by the number of matching tokens; longer matches are tried first."""

_LONGEST = max(_AT_FIRST)

_MEMORY = 0.8
"""Weight of the accuracy so far when another guess is judged."""

_OF_USE = 0.5
"""How often a right guess for one of several branches saves a pass: the branch must be kept and the others finished."""


class Guess(NamedTuple):
    """Tokens that may follow, and how many tokens before them matched; empty and 0 without a match."""

    token_ids: tuple[int, ...]
    matched: int


class PromptLookup:
    """An index of every run of 1 to 3 tokens in a growing sequence, and in the branches that were not kept.

    Args:
        token_ids: the sequence so far.
        most: guesses at a time; 0 turns lookup off.

    Attributes:
        accuracy: the share of guesses that were right, by the number of matching tokens; recent guesses weigh more.
    """

    def __init__(self, token_ids: Iterable[int], most: int) -> None:
        self._ids: list[int] = []
        # run -> the position after its last occurrence
        self._follows: dict[tuple[int, ...], tuple[list[int], int]] = {}
        self._most = most
        self.accuracy = dict(_AT_FIRST)
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
        """Learn from a branch that was not kept: the sequence may still say what it says."""
        if self._most:
            before = self._ids[-_LONGEST:]
            self._index([*before, *token_ids], len(before))

    def _index(self, ids: list[int], start: int) -> None:
        for end in range(start, len(ids)):
            for size in _AT_FIRST:  # the run before this token is now followed by something
                if end >= size:
                    self._follows[tuple(ids[end - size : end])] = (ids, end)

    def guess(self, path: Sequence[int], count: int) -> Guess:
        """At most ``count`` tokens that may follow the sequence and ``path``."""
        count = min(count, self._most)
        if count < 1:
            return Guess((), 0)
        last = [*self._ids[-_LONGEST:], *path][-_LONGEST:]
        for size in _AT_FIRST:
            found = self._follows.get(tuple(last[-size:])) if len(last) >= size else None
            if found is not None:
                ids, start = found
                return Guess(tuple(ids[start : start + count]), size)
        return Guess((), 0)

    def worth(self, matched: int, paths: int, cost: float) -> int:
        """How many tokens of a guess are worth feeding.

        The n-th token saves a pass if it and those before it are right, and its path is the one that is kept.

        Args:
            matched: how many tokens of the guess matched.
            paths: how many paths have guesses fed.
            cost: of a token, as a share of a pass.
        """
        count, needed = 0, cost if paths == 1 else cost * paths / _OF_USE
        while count < self._most and self.accuracy[matched] ** (count + 1) >= needed:
            count += 1
        return count

    def judge(self, matched: int, right: bool) -> None:
        """Learn whether a guessed token was right."""
        self.accuracy[matched] = _MEMORY * self.accuracy[matched] + (1 - _MEMORY) * right
