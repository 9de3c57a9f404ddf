"""Speculation: tokens fed ahead of the decode loop, in forward passes that are run anyway.

The loop requests tokens by their paths and does not depend on the pass in which they were fed. If a pass has free rows,
this module fills them with tokens that the loop is likely to request next:

- guesses by prompt lookup, in the prompt, the answer and all branches,
- the next tokens of branches that earlier guesses have taken ahead of the others,
- tokens past the best finished branch (``lookahead.py``).

A wrong guess costs a row. Guesses never change which token is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cocoa_engine.decoding.branch import Branch
from cocoa_engine.decoding.distributions import TokenOutput
from cocoa_engine.decoding.lookahead import Lookahead
from cocoa_engine.decoding.prompt_lookup import PromptLookup
from cocoa_engine.decoding.rules import Rules
from cocoa_engine.execution.backends import Path

FREE_LEAVES = 8
"""Number of leaves that one pass feeds at little more than the cost of one, for all sequences in the pass together.

With weights in blocks they cost more; fewer guesses are worth feeding there."""

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
        self._lookahead = Lookahead(rules.config, rules.eos) if rules.config.span_boundary == "own" else None
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
        finished: Sequence[Branch],
        known: Mapping[Path, TokenOutput],
        tokens_left: int,
    ) -> list[Path]:
        """The paths to feed ahead, in addition to those that must be fed.

        Args:
            missing: the paths that must be fed.
            growing: those of the requested paths that another token may follow.
            finished: branches that have reached their boundary while others still grow.
            known: the outputs since the last commit, by path.
            tokens_left: the number of tokens that may still be added to the answer.
        """
        free = self._free_rows() - len(missing)
        if not self.enabled or free < 1:
            return []
        ahead = self._lookahead.leaves(finished, known, tokens_left, free) if self._lookahead else []
        ahead += self._fed_ahead(growing, known, tokens_left)[: free - len(ahead)]
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
