"""Paths to feed ahead of the loop: guesses by prompt lookup, and the continuation of a leading branch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from cocoa_engine.decoding.distributions import TokenOutput
from cocoa_engine.decoding.request import Rules
from cocoa_engine.execution.backends import Path
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


FreeRows = Callable[[], int]
"""Returns the number of leaves of this sequence that the next forward pass can feed at little extra cost."""


class Speculation:
    """Chooses what to feed ahead.

    Args:
        prompt: token ids.
        rules: the request's rules.
        draft_tokens: the maximum number of guessed tokens fed after each leaf.
        free_rows: see :data:`FreeRows`.
        cost_of_a_row: the cost of a further row in a pass of few rows, as a share of the cost of the first one.

    Attributes:
        enabled: whether tokens are fed ahead. `False` if the sequence's tree cannot keep them, or if the method reads
            the prompt back.
    """

    def __init__(
        self, prompt: Sequence[int], rules: Rules, draft_tokens: int, free_rows: FreeRows, cost_of_a_row: float
    ) -> None:
        self.enabled = False
        self._lookup = PromptLookup(prompt, draft_tokens)
        self._free_rows, self._cost_of_a_row = free_rows, cost_of_a_row
        self._eos = rules.eos
        # path -> the token guessed after it and the number of matching tokens, until the guess is checked
        self._guesses: dict[Path, tuple[int, int]] = {}
        self._indexed: dict[int, int] = {}  # first token of a branch -> the number of its tokens that are indexed

    def observe(
        self, paths: Sequence[Path], growing: Sequence[Path], known: Mapping[Path, TokenOutput], tokens_left: int
    ) -> None:
        """Learn from what the loop requests: update the accuracy of guesses, and index the tokens of branches.

        The arguments are those of :meth:`ahead`; ``paths`` are all paths that the loop requests.
        """
        for parent in {path[:-1] for path in paths} & self._guesses.keys():
            token_id, matched = self._guesses.pop(parent)
            self._lookup.check_guess(matched, (*parent, token_id) in paths)
        if not self.enabled or (len(growing) == 1 and len(growing[0]) == 1):
            return  # the tokens of a greedy run are indexed when they are committed
        for path in growing:
            end = self._reached(path, known, tokens_left)
            self._lookup.index_branch(end, self._indexed.get(end[0], 0))
            self._indexed[end[0]] = len(end)

    def ahead(
        self,
        missing: Sequence[Path],
        growing: Sequence[Path],
        known: Mapping[Path, TokenOutput],
        tokens_left: int,
    ) -> list[Path]:
        """The paths to feed ahead, in addition to those that must be fed.

        Args:
            missing: the paths that must be fed.
            growing: those of the requested paths that another token may follow.
            known: the outputs since the last commit, by path.
            tokens_left: the number of tokens that may still be added to the answer.
        """
        free = self._free_rows() - len(missing)
        if not self.enabled or free < 1:
            return []
        ahead = self._fed_ahead(growing, known, tokens_left)[:free]
        leaves = [*(path for path in missing if path in growing), *ahead]
        for path in leaves:
            tokens = self._guess(path, len(leaves), free - len(ahead), tokens_left)
            ahead += [path + tokens[: depth + 1] for depth in range(len(tokens))]
        return ahead

    def commit(self, taken: Path) -> None:
        """Continue after a committed path: drop the guesses of other paths and index its tokens."""
        depth = len(taken)
        self._guesses = {path[depth:]: guess for path, guess in self._guesses.items() if path[:depth] == taken}
        self._indexed.clear()
        self._lookup.extend(taken)

    def _fed_ahead(self, paths: Sequence[Path], known: Mapping[Path, TokenOutput], tokens_left: int) -> list[Path]:
        """For paths whose continuation has been fed ahead already: the next path to feed at the end of each."""
        ends = [self._reached(path, known, tokens_left) for path in paths]
        return [end for path, end in zip(paths, ends, strict=True) if end != path and end not in known]

    def _reached(self, path: Path, known: Mapping[Path, TokenOutput], tokens_left: int) -> Path:
        """A path with the tokens after it that have been fed ahead already, and the next one."""
        while (output := known.get(path)) and output.next and path[-1] not in self._eos and len(path) < tokens_left:
            path = (*path, output.next.best)
        return path

    def _guess(self, path: Path, leaves: int, free: int, tokens_left: int) -> tuple[int, ...]:
        """The tokens to feed after a path by prompt lookup. Also records the first guess that is not fed."""
        left = tokens_left - len(path)
        if path[-1] in self._eos or left < 1:
            return ()
        guess, matched = self._lookup.guess(path, min(left, max(free, 1)))
        if not guess:
            return ()
        end = next((depth for depth, token_id in enumerate(guess, 1) if token_id in self._eos), len(guess))
        guess = guess[:end]
        count = min(free, self._lookup.worth(matched, leaves, self._cost_of_a_row))
        for depth, token_id in enumerate(guess[: max(count, 1)]):
            self._guesses[path + guess[:depth]] = token_id, matched
        return guess[:count]
