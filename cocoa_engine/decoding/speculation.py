"""Speculation: tokens fed ahead of the decode loop, in forward passes that are run anyway.

The loop asks for tokens by their paths and does not depend on the pass in which they were fed. Where a pass has free
rows, this module fills them with tokens that the loop is likely to ask for next: guesses by prompt lookup, and what
follows in branches that earlier guesses brought ahead of others, or that have ended and lead (``lookahead.py``). A
wrong guess costs a row; no guess changes which token is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cocoa_engine.decoding.branch import Branch
from cocoa_engine.decoding.distributions import TokenOutput
from cocoa_engine.decoding.lookahead import Lookahead
from cocoa_engine.decoding.prompt_lookup import PromptLookup
from cocoa_engine.decoding.rules import Rules
from cocoa_engine.execution.backends import Path

COST_OF_A_ROW = 0.04
"""By how much another row lengthens a pass of few rows, as a share of the pass; measured on a CPU."""

FreeRows = Callable[[], int]
"""How many leaves of this sequence the next forward pass takes at no extra cost."""


class Speculation:
    """Chooses what to feed ahead.

    Args:
        prompt: token ids.
        rules: of the request.
        draft_tokens: guesses fed after each leaf, at most.
        free_rows: see :data:`FreeRows`.

    Attributes:
        enabled: off where the sequence's tree cannot keep tokens that were fed ahead.
    """

    def __init__(self, prompt: Sequence[int], rules: Rules, draft_tokens: int, free_rows: FreeRows) -> None:
        self.enabled = False
        self._lookahead = Lookahead(rules.config, rules.eos) if rules.config.span_boundary == "own" else None
        self._lookup = PromptLookup(prompt, draft_tokens)
        self._free_rows = free_rows
        self._eos = rules.eos
        # a path -> the token guessed to follow it and how many tokens matched, until it is known
        self._guesses: dict[Path, tuple[int, int]] = {}

    def judge(self, paths: Sequence[Path]) -> None:
        """Learn which guesses were right, from the paths that the loop asks for."""
        for parent in {path[:-1] for path in paths} & self._guesses.keys():
            token_id, matched = self._guesses.pop(parent)
            self._lookup.judge(matched, (*parent, token_id) in paths)

    def ahead(
        self,
        missing: Sequence[Path],
        growing: Sequence[Path],
        finished: Sequence[Branch],
        known: Mapping[Path, TokenOutput],
        tokens_left: int,
    ) -> list[Path]:
        """Paths to feed beside those that must be fed.

        Args:
            missing: the paths that must be fed.
            growing: of the paths that the loop asks for, those that another token may follow.
            finished: branches that have ended while others grow.
            known: what was fed since the last commit.
            tokens_left: how many tokens the answer may still have.
        """
        free = self._free_rows() - len(missing)
        if not self.enabled or free < 1:
            return []
        ahead = self._lookahead.leaves(finished, known, tokens_left, free) if self._lookahead else []
        ahead += self._beyond(growing, known, tokens_left)[: free - len(ahead)]
        leaves = [*(path for path in missing if path in growing), *ahead]
        for path in leaves:
            tokens = self._guess(path, len(leaves), free - len(ahead), tokens_left)
            ahead += [path + tokens[: depth + 1] for depth in range(len(tokens))]
        return ahead

    def commit(self, taken: Path) -> None:
        """Go on from the end of a path."""
        depth = len(taken)
        self._guesses = {path[depth:]: guess for path, guess in self._guesses.items() if path[:depth] == taken}
        self._lookup.extend(taken)

    def note(self, token_ids: Sequence[int]) -> None:
        """Learn from a branch that was not kept: the answer may still say what it says."""
        self._lookup.note(token_ids)

    def _beyond(self, paths: Sequence[Path], known: Mapping[Path, TokenOutput], tokens_left: int) -> list[Path]:
        """The next tokens of the branches that were fed beyond these paths already, which so stay ahead of others."""
        leaves = []
        for path in paths:
            start = path
            while (output := known.get(path)) and output.next and path[-1] not in self._eos and len(path) < tokens_left:
                path = (*path, output.next.best)
            if path != start and path not in known:
                leaves.append(path)
        return leaves

    def _guess(self, path: Path, leaves: int, free: int, tokens_left: int) -> tuple[int, ...]:
        """The tokens to feed after a path by prompt lookup; a guess that is not fed is noted too, to learn from it."""
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
