"""Speculation past the best finished branch, for ``span_boundary="own"``.

There branches end one by one, and most passes would feed the longest branch alone. The best of the finished branches is
likely to be kept, so the branches of its next risk point are fed ahead; where those are finished too, those that follow
the best of them, and so on. Eight prompts of the embedded model take 1.06 passes per token with it and 1.71 without
(``python -m benchmarks.lookahead``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import Branch, branch_mlds
from cocoa_engine.decoding.distributions import TokenOutput
from cocoa_engine.decoding.next_tokens import NextTokens
from cocoa_engine.decoding.span_scoring import log_prob_and_score
from cocoa_engine.execution.backends import Path


class Lookahead:
    """Foresees risk points.

    Args:
        config: the settings of the decode.
        eos: tokens that nothing follows.
    """

    def __init__(self, config: CocoaConfig, eos: Collection[int]) -> None:
        self._config, self._eos = config, eos

    def leaves(
        self, finished: Sequence[Branch], known: Mapping[Path, TokenOutput], tokens_left: int, free: int
    ) -> list[Path]:
        """The paths to feed ahead: those of whole risk points, at most ``free``.

        Args:
            finished: the branches of this risk point that have ended while others grow.
            known: what was fed since the last commit.
            tokens_left: how many tokens the answer may still have.
        """
        leaves: list[Path] = []
        base: Path = ()
        while finished:
            con, f = branch_mlds(finished)
            scores = [
                log_prob_and_score(self._config, branch.log_probs, con[number], f[number])[1]
                for number, branch in enumerate(finished)
            ]
            best = finished[scores.index(max(scores))]
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
        """The branches of the risk point after ``base``: what of them is not fed yet, and those that are complete."""
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
                branch.add_states(output.hidden)
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
