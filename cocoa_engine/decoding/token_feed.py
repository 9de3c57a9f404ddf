"""What the decode loop is told of tokens: each is fed once, in the loop's own order or ahead of it."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from cocoa_engine.decoding.branch import Branch
from cocoa_engine.decoding.distributions import Distributions, TokenOutput, logits_of
from cocoa_engine.decoding.speculation import Speculation
from cocoa_engine.execution.backends import FeedRequest, Path, ReadBack, StepOutput, TokenTree

Feeding = Generator[Sequence[Path], StepOutput | list[TokenOutput], list[TokenOutput]]
"""Yields paths to feed; is sent what the pass said of them, or outputs that were made of it already."""

_READ_AT_ONCE = 128
"""Tokens of the prompt, read back after all candidates, in one pass."""


class TokenFeed:
    """The outputs of all tokens that were fed after the committed ones.

    Attributes:
        last: of the last committed token, for reading back.
    """

    def __init__(self, distributions: Distributions, speculation: Speculation) -> None:
        self._distributions = distributions
        self._speculation = speculation
        self._known: dict[Path, TokenOutput] = {}
        self.last: TokenOutput | None = None

    def feed(
        self, paths: Sequence[Path], growing: Sequence[Path], finished: Sequence[Branch], tokens_left: int
    ) -> Feeding:
        """The outputs of some paths. Those that were not fed before are fed now, and others ahead in free rows.

        Args:
            growing: of the paths, those that another token may follow.
            finished: branches that have ended while others grow.
            tokens_left: how many tokens the answer may still have.
        """
        self._speculation.judge(paths)
        missing = [path for path in paths if path not in self._known]
        if missing:
            fed = [*missing, *self._speculation.ahead(missing, growing, finished, self._known, tokens_left)]
            step = yield fed
            outputs = step if isinstance(step, list) else self._distributions.outputs(step)
            self._known.update(zip(fed, outputs, strict=True))
        return [self._known[path] for path in paths]

    def commit(self, tree: TokenTree, taken: Path, likely: Sequence[int]) -> None:
        """Keep a path, and what was fed after it as far as the loop may ask for it.

        Args:
            likely: tokens that the loop may ask for next.
        """
        depth = len(taken)
        useful = any((*taken, token_id) in self._known for token_id in likely)
        self.last = self._known[taken]
        self._known = {
            path[depth:]: output
            for path, output in self._known.items()
            if useful and len(path) > depth and path[:depth] == taken
        }
        tree.commit(taken, keep_rest=useful)
        self._speculation.commit(taken)

    def read_back(
        self, prompt: Sequence[int], branches: Sequence[Path]
    ) -> Generator[FeedRequest, StepOutput, list[float]]:
        """PMI(S; x) of each branch S: the prompt x is fed once more after it, and after what it grew from."""
        chains = [(), *branches]
        assert self.last is not None
        before = [self.last, *(self._known[path] for path in branches)]
        targets = torch.tensor(prompt)
        totals = [float(logits_of(output).log_softmax(-1)[prompt[0]]) for output in before]
        width = max(1, _READ_AT_ONCE // len(chains))
        for start in range(0, len(prompt) - 1, width):
            end = min(start + width, len(prompt) - 1)
            step = yield [ReadBack(chain, prompt[start:end]) for chain in chains]
            log_probs = step.logits.log_softmax(-1).view(len(chains), end - start, -1)
            wanted = targets[start + 1 : end + 1].to(log_probs.device)[None, :, None].expand(len(chains), -1, 1)
            found = log_probs.gather(2, wanted).double().sum(dim=(1, 2)).tolist()
            totals = [total + more for total, more in zip(totals, found, strict=True)]
        return [total - totals[0] for total in totals[1:]]
