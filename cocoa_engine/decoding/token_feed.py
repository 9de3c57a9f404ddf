"""The model's output for each path that was fed."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from cocoa_engine.decoding.distributions import Distributions, TokenOutput, logits_of
from cocoa_engine.decoding.speculation import Speculation
from cocoa_engine.execution.backends import FeedRequest, Path, ReadBack, StepOutput, TokenTree

Feeding = Generator[Sequence[Path], StepOutput | list[TokenOutput], list[TokenOutput]]
"""A generator that yields paths to feed, and receives the output of the pass or one :class:`TokenOutput` per path. It
returns the outputs of the requested paths."""

_READ_AT_ONCE = 128
"""Number of prompt tokens in one read-back pass, for all candidates together."""


class TokenFeed:
    """The outputs of all tokens fed after the committed ones.

    Args:
        distributions: converts the output of a pass to :class:`TokenOutput`.
        speculation: chooses the tokens to feed ahead.

    Attributes:
        last: the output for the last committed token, for :meth:`read_back`.
    """

    def __init__(self, distributions: Distributions, speculation: Speculation) -> None:
        self._distributions = distributions
        self._speculation = speculation
        self._known: dict[Path, TokenOutput] = {}
        self.last: TokenOutput | None = None

    def feed(self, paths: Sequence[Path], growing: Sequence[Path], tokens_left: int) -> Feeding:
        """The outputs of some paths. Paths that have not been fed are fed now; free rows of the pass feed others ahead.

        Args:
            paths: the paths whose outputs are needed.
            growing: those of ``paths`` that another token may follow.
            tokens_left: the number of tokens that may still follow the committed ones.
        """
        self._speculation.observe(paths, growing, self._known, tokens_left)
        missing = [path for path in paths if path not in self._known]
        if missing:
            fed = [*missing, *self._speculation.ahead(missing, growing, self._known, tokens_left)]
            step = yield fed
            outputs = step if isinstance(step, list) else self._distributions.outputs(step)
            self._known.update(zip(fed, outputs, strict=True))
        return [self._known[path] for path in paths]

    def output(self, path: Path) -> TokenOutput:
        """The output of a path that was fed after the committed tokens."""
        return self._known[path]

    def commit(self, tree: TokenTree, taken: Path, likely: Sequence[int]) -> None:
        """Commit a path. Outputs after it are kept only if one of the ``likely`` tokens has been fed ahead.

        Args:
            tree: the sequence.
            taken: the path to commit; it must have been fed.
            likely: the tokens that the loop may request next.
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
        """PMI(S; x) = log p(x | x, y, S) - log p(x | x, y) of each branch S, with prompt x and committed answer y.

        The prompt is fed again after every branch and after the committed tokens. The generator yields what to feed,
        receives the outputs, and returns one value in nats for each branch.

        Args:
            prompt: token ids of x.
            branches: the paths of the branches; they must have been fed.
        """
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
            target_ids = targets[start + 1 : end + 1].to(log_probs.device)[None, :, None].expand(len(chains), -1, 1)
            found = log_probs.gather(2, target_ids).double().sum(dim=(1, 2)).tolist()
            totals = [total + more for total, more in zip(totals, found, strict=True)]
        return [total - totals[0] for total in totals[1:]]
