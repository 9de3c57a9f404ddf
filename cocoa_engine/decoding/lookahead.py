"""Speculation past the best finished branch, for ``span_boundary="own"``.

With this boundary branches end one by one, and without lookahead most passes would feed only the longest branch. The
best finished branch is likely to be kept, so the branches of its next risk point are fed ahead. If those are finished
too, the branches after the best of them follow, and so on. On eight prompts, the embedded model takes 1.04 passes per
token with lookahead and 1.72 without (``python -m benchmarks.lookahead``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import Branch, branch_mlds
from cocoa_engine.decoding.distributions import TokenOutput
from cocoa_engine.decoding.next_tokens import NextTokens
from cocoa_engine.decoding.span_scoring import best_candidate, log_probs_and_scores
from cocoa_engine.execution.backends import Path


class Lookahead:
    """Chooses the branches of later risk points to feed ahead.

    Args:
        config: the settings of the decode.
        eos: token ids that end the text.
    """

    def __init__(self, config: CocoaConfig, eos: Collection[int]) -> None:
        self._config, self._eos = config, eos

    def leaves(
        self, finished: Sequence[Branch], known: Mapping[Path, TokenOutput], tokens_left: int, free: int
    ) -> list[Path]:
        """The paths to feed ahead. Each risk point is included with all its growing branches or not at all.

        Args:
            finished: the branches of the current risk point that have reached their boundary while others still grow.
            known: the outputs since the last commit, by path.
            tokens_left: the number of tokens that may still be added to the answer.
            free: the maximum number of paths.
        """
        leaves: list[Path] = []
        base: Path = ()
        while finished:
            con, f = branch_mlds(finished)
            log_probs, ended = [branch.log_probs for branch in finished], [bool(branch.ended) for branch in finished]
            scores = [score for _, score in log_probs_and_scores(self._config, log_probs, ended, con, f)]
            best = finished[best_candidate(self._config, scores, ended)]
            base = (*base, *best.token_ids)
            if best.ended or best.next is None:
                break
            growing, finished = self._foreseen(best, base, known, tokens_left)
            if len(leaves) + len(growing) > free:
                break
            leaves += growing
        return leaves

    def _foreseen(
        self, parent: Branch, base: Path, known: Mapping[Path, TokenOutput], tokens_left: int
    ) -> tuple[list[Path], list[Branch]]:
        """The branches of the risk point after ``base``: the next paths to feed, and the branches already complete."""
        assert parent.next is not None
        candidates = self._competing(parent.next)
        growing: list[Path] = []
        finished: list[Branch] = []
        longest = min(self._config.max_span_tokens, tokens_left - len(base))
        for rank in range(len(candidates.token_ids)):
            branch = Branch(parent.track)
            branch.add_token(candidates, rank)
            while longest > 0:
                path = (*base, *branch.token_ids)
                output = known.get(path)
                if output is None:
                    growing.append(path)
                    break
                branch.add_output(output)
                branch.next, branch.ended = output.next, "eos" if path[-1] in self._eos else None
                following = None if output.next is None else self._competing(output.next)
                at_end = branch.ended or len(branch.token_ids) == longest
                if at_end or following is None or len(following.token_ids) > 1:
                    finished.append(branch)
                    break
                branch.add_token(following)
        return growing, finished

    def _competing(self, following: NextTokens) -> NextTokens:
        return following.competing(self._config.gamma, self._config.max_candidates)
