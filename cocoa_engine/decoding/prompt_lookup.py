"""Prompt lookup: guesses the next tokens as those that followed the last few tokens at their previous occurrence.

An answer about a given context repeats much of it. A guess costs one more row in a forward pass that is run anyway. A
guess is used only if decoding would have chosen the same token (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_INITIAL_ACCURACY = {3: 0.4, 2: 0.4, 1: 0.1}
"""Initial accuracy of guesses, by the number of matching tokens. Longer matches are tried first."""

_LONGEST = max(_INITIAL_ACCURACY)

_DECAY = 0.8
"""Weight of the previous accuracy in its exponential moving average."""

_USEFUL_SHARE = 0.8
"""Share of right guesses that save a pass if there are several branches. All of them wait for the slowest one."""


class Guess(NamedTuple):
    """Guessed next tokens, and the number of tokens before them that matched. Without a match: no tokens, and 0."""

    token_ids: tuple[int, ...]
    matched: int


class PromptLookup:
    """An index of every n-gram of 1 to 3 tokens in a growing sequence and in its branches.

    Args:
        token_ids: the sequence so far.
        most: the maximum number of tokens in a guess; 0 turns lookup off.

    Attributes:
        accuracy: the share of guesses that were right, by the number of matching tokens, as an exponential moving
            average.
    """

    def __init__(self, token_ids: Iterable[int], most: int) -> None:
        self._ids: list[int] = []
        # n-gram -> the tokens that contain its last occurrence, and the index after it
        self._follows: dict[tuple[int, ...], tuple[list[int], int]] = {}
        self._most = most
        self.accuracy = dict(_INITIAL_ACCURACY)
        if most:
            self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the sequence."""
        if not self._most:
            return
        start = len(self._ids)
        self._ids.extend(token_ids)
        self._index(self._ids, start)

    def index_branch(self, token_ids: Sequence[int], start: int) -> None:
        """Index a branch from one of its tokens on. Its rivals, and the sequence later, may continue as it does."""
        if self._most and start < len(token_ids):
            before = [*self._ids[-_LONGEST:], *token_ids[:start]][-_LONGEST:]
            self._index([*before, *token_ids[start:]], len(before))

    def _index(self, ids: list[int], start: int) -> None:
        for end in range(start, len(ids)):
            for size in _INITIAL_ACCURACY:  # the n-grams that end before this token
                if end >= size:
                    self._follows[tuple(ids[end - size : end])] = (ids, end)

    def guess(self, path: Sequence[int], count: int) -> Guess:
        """Guess up to ``count`` tokens after the sequence extended by ``path``."""
        last = [*self._ids[-_LONGEST:], *path]
        length, matched = len(last), 0
        end = length + min(count, self._most)
        while len(last) < end:
            size, ids, start = self._last_occurrence(last)
            if not size or size < matched:  # a shorter match is less often right
                break
            matched = matched or size
            last += ids[start : start + end - len(last)]
        return Guess(tuple(last[length:]), matched)

    def _last_occurrence(self, last: list[int]) -> tuple[int, list[int], int]:
        """The number of last tokens that occurred before, the tokens that contain them, and the index after them."""
        for size in _INITIAL_ACCURACY:
            if len(last) >= size and (found := self._follows.get(tuple(last[-size:]))):
                return size, *found
        return 0, [], 0

    def worth(self, matched: int, paths: int, cost: float) -> int:
        """The number of guessed tokens that are worth feeding.

        The n-th token saves a pass if it and the tokens before it are right, and if no other path takes longer.

        Args:
            matched: the number of tokens before the guess that matched.
            paths: the number of paths with guesses in the pass.
            cost: the cost of a further row in a pass of few rows, as a share of the cost of the first one.
        """
        count, needed = 0, cost if paths == 1 else cost * paths / _USEFUL_SHARE
        while count < self._most and self.accuracy[matched] ** (count + 1) >= needed:
            count += 1
        return count

    def check_guess(self, matched: int, right: bool) -> None:
        """Update the accuracy of guesses with ``matched`` matching tokens."""
        self.accuracy[matched] = _DECAY * self.accuracy[matched] + (1 - _DECAY) * right
