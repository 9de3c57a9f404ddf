"""Guesses of next tokens by prompt lookup, and what an answer has copied from its prompt."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from cocoa_engine.spans import Preceding

LONGEST = 3  # of a copied run; longer runs are not told apart, because three tokens rarely match by chance
NEAR = 4  # tokens before a span that are averaged


class AnswerHistory:
    """The tokens of a growing answer after a prompt, and their statistics."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._last: tuple[int, ...] = ()
        self._log_probs: list[float] = []
        self._entropies: list[float] = []
        self._copied: list[int] = []

    def extend(
        self, token_ids: Sequence[int], log_probs: Sequence[float], entropies: Sequence[float]
    ) -> tuple[list[int], Preceding]:
        """Add the tokens of a span. Returns its ``token_copied``, and the statistics of the text before it."""
        before, copied = preceding(self._log_probs, self._entropies, self._copied), []
        for token_id in token_ids:
            self._last = (*self._last, token_id)[-LONGEST:]
            sizes = range(len(self._last), 0, -1)
            copied.append(next((size for size in sizes if self._last[-size:] in self._runs[size - 1]), 0))
        self._log_probs.extend(log_probs)
        self._entropies.extend(entropies)
        self._copied.extend(copied)
        return copied, before

    @cached_property
    def _runs(self) -> list[set[tuple[int, ...]]]:
        """All n-grams of the prompt, by length from 1 to ``LONGEST``."""
        return [set(zip(*(self._prompt[at:] for at in range(size)), strict=False)) for size in range(1, LONGEST + 1)]


def preceding(log_probs: Sequence[float], entropies: Sequence[float], copied: Sequence[int]) -> Preceding:
    """The statistics of the text before a span, from those of its tokens."""
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


_INITIAL_ACCURACY = {3: 0.4, 2: 0.4, 1: 0.1}  # of guesses, by matching tokens; longer matches are tried first
_LONGEST = max(_INITIAL_ACCURACY)
_DECAY = 0.8  # weight of the previous accuracy in its exponential moving average
_USEFUL_SHARE = 0.8  # of right guesses save a pass if there are several branches, which wait for the slowest one


class Guess(NamedTuple):
    """Guessed next tokens, and the number of tokens before them that matched: 0 without a guess."""

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
            sizes = (size for size in _INITIAL_ACCURACY if len(last) >= size and tuple(last[-size:]) in self._follows)
            size = next(sizes, 0)
            if not size or size < matched:  # a shorter match is less often right
                break
            matched = matched or size
            ids, start = self._follows[tuple(last[-size:])]
            last += ids[start : start + end - len(last)]
        return Guess(tuple(last[length:]), matched)

    def worth(self, matched: int, paths: int, cost: float) -> int:
        """The number of guessed tokens that are worth feeding.

        The n-th token saves a pass if it and the tokens before it are right, and if no other path takes longer.

        Args:
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
