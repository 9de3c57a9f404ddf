"""Speculation: tokens fed ahead of the decode loop, in forward passes that are run anyway.

The loop requests tokens by their paths and does not depend on the pass in which they were fed. If a pass has free rows,
this module fills them with tokens that the loop is likely to request next: guesses by prompt lookup, the next tokens of
branches that earlier guesses have taken ahead of the others, and tokens past the best finished branch
(``lookahead.py``). A wrong guess costs a row. Guesses never change which token is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cocoa_engine.decoding.branch import Branch
from cocoa_engine.decoding.distributions import TokenOutput
from cocoa_engine.decoding.lookahead import Lookahead
from cocoa_engine.decoding.prompt_lookup import PromptLookup
from cocoa_engine.decoding.rules import Rules
from cocoa_engine.execution.backends import Path

COST_OF_A_ROW = 0.08
"""Cost of one more row in a pass of few rows, as a share of the pass's duration.

Measured on CPUs: 0.02 where memory is slow, 0.16 where the weights come from a cache. A value between them loses little
in either case."""

FreeRows = Callable[[], int]
"""Returns the number of leaves of this sequence that the next forward pass can feed at little extra cost."""


class Speculation:
    """Chooses what to feed ahead.

    Args:
        prompt: token ids.
        rules: the request's rules.
        draft_tokens: the maximum number of guessed tokens fed after each leaf.
        free_rows: see :data:`FreeRows`.

    Attributes:
        enabled: whether tokens are fed ahead. `False` if the sequence's tree cannot keep them, or if the method reads
            the prompt back.
    """

    def __init__(self, prompt: Sequence[int], rules: Rules, draft_tokens: int, free_rows: FreeRows) -> None:
        self.enabled = False
        self._lookahead = Lookahead(rules.config, rules.eos) if rules.config.span_boundary == "own" else None
        self._lookup = PromptLookup(prompt, draft_tokens)
        self._free_rows = free_rows
        self._eos = rules.eos
        # path -> the token guessed after it and the number of matching tokens, until the guess is checked
        self._guesses: dict[Path, tuple[int, int]] = {}

    def check_guesses(self, paths: Sequence[Path]) -> None:
        """Update the accuracy of guesses from the paths that the loop requests."""
        for parent in {path[:-1] for path in paths} & self._guesses.keys():
            token_id, matched = self._guesses.pop(parent)
            self._lookup.check_guess(matched, (*parent, token_id) in paths)

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
        self._lookup.extend(taken)

    def index_dropped(self, token_ids: Sequence[int]) -> None:
        """Index a dropped branch, because the answer may still continue with its tokens."""
        self._lookup.index_dropped(token_ids)

    def _fed_ahead(self, paths: Sequence[Path], known: Mapping[Path, TokenOutput], tokens_left: int) -> list[Path]:
        """For paths whose continuation has been fed ahead already: the next path to feed at the end of each."""
        leaves = []
        for path in paths:
            start = path
            while (output := known.get(path)) and output.next and path[-1] not in self._eos and len(path) < tokens_left:
                path = (*path, output.next.best)
            if path != start and path not in known:
                leaves.append(path)
        return leaves

    def _guess(self, path: Path, leaves: int, free: int, tokens_left: int) -> tuple[int, ...]:
        """The tokens to feed after a path by prompt lookup. Also records the first guess that is not fed."""
        left = tokens_left - len(path)
        if path[-1] in self._eos or left < 1:
            return ()
        guess, matched = self._lookup.guess(path, left)
        if not guess:
            return ()
        count = min(free, self._lookup.worth(matched, leaves, COST_OF_A_ROW))
        for depth, token_id in enumerate(guess[: max(count, 1)]):
            self._guesses[path + guess[:depth]] = token_id, matched
        return guess[:count]
