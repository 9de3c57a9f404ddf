"""Many texts fed as branches of one tree, after a prompt that is prefilled once.

Tokens of a common prefix are fed once. Texts are fed in groups. A group is fed in steps, each with at most as many
tokens as the backend feeds at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import torch
from torch import Tensor

from cocoa_engine.cancellation import Cancellation
from cocoa_engine.execution.backends import Backend, Path, StepOutput, TokenTree
from cocoa_engine.model.hidden_states import CaptureSpec


@contextmanager
def opened(
    backend: Backend,
    prompt: Sequence[int],
    reserve_tokens: int,
    capture: CaptureSpec,
    passages: Sequence[range] = (),
) -> Iterator[TokenTree]:
    """Open a tree whose branches can be dropped, and close it at the end of the block."""
    (tree,) = backend.open([prompt], reserve_tokens, capture)
    tree.keep_committed = True
    tree.passages = passages
    try:
        yield tree
    finally:
        tree.close()


@dataclass(frozen=True)
class Step:
    """W tokens of a group that were fed at once.

    Attributes:
        rows: the indices of the tokens among the group's distinct prefixes.
        output: the model's output for each token.
        token_ids: ``[W]``.
        parents: ``[W]``, the row of :attr:`logits` that predicts each token.
        before: ``[V]``, the logits before the step's first path; `None` after an empty prompt.
        forward_passes: the number of forward passes of the step.
    """

    rows: range
    output: StepOutput
    token_ids: Tensor
    parents: Tensor
    before: Tensor | None
    forward_passes: int

    @cached_property
    def logits(self) -> Tensor:
        """``[W + 1, V]``: before the step, then after each of its tokens."""
        assert self.before is not None
        return torch.cat([self.before[None], self.output.logits])


class TextGroup:
    """Texts that are fed together.

    Attributes:
        numbers: the indices of the texts.
        rows: for each index, the rows of the text's tokens among the group's distinct prefixes.
    """

    def __init__(
        self,
        backend: Backend,
        tree: TokenTree,
        texts: dict[int, list[int]],
        first: Tensor | None,
        rows_per_step: int,
        cancellation: Cancellation,
    ) -> None:
        self._cancellation = cancellation
        self._backend, self._tree, self._first, self._width = backend, tree, first, rows_per_step
        self._paths = prefixes(texts.values())
        self._ranks = {path: rank for rank, path in enumerate(self._paths)}
        self.numbers = list(texts)
        self.rows = {number: [self._ranks[path] for path in prefixes([text])] for number, text in texts.items()}

    def steps(self) -> Iterator[Step]:
        """Feed the group step by step."""
        ranks, before = self._ranks, self._first
        for start in range(0, len(self._paths), self._width):
            fed = self._paths[start : start + self._width]
            self._cancellation.check()
            passes_before = self._tree.forward_passes
            output = self._backend.step([(self._tree, fed)])[0]
            # Only a group of one text takes several steps, so a step's first path extends the last path before it.
            parents = [ranks[path[:-1]] - start + 1 if path[:-1] in ranks else 0 for path in fed]
            device = output.logits.device
            yield Step(
                rows=range(start, start + len(fed)),
                output=output,
                token_ids=torch.tensor([path[-1] for path in fed]).to(device),
                parents=torch.tensor(parents).to(device),
                before=before,
                forward_passes=self._tree.forward_passes - passes_before,
            )
            before = output.logits[-1]

    def passes(self, step: Step, number: int) -> int:
        """The number of a step's forward passes that fed tokens of one text.

        A backend feeds a step in one pass, or each path in a pass of its own.
        """
        return min(step.forward_passes, len(self.within(step, number)))

    def within(self, step: Step, number: int) -> list[int]:
        """The rows of a step's output that belong to one text."""
        return [row - step.rows.start for row in self.rows[number] if row in step.rows]


class TextTree:
    """Feeds texts after a prompt: ``with TextTree(...) as tree: for group in tree.groups(): ...``.

    Args:
        backend: the backend that runs the model.
        prompt: token ids. May be empty if :attr:`Step.logits` is not used.
        texts: the token ids of each text, at least one.
        capture: the hidden states that every step returns.
        rows_per_step: the maximum number of tokens in a step. Default: the backend's ``paths_per_step``.
        passages: the positions of passages of the prompt whose attention mass is measured.
        cancellation: ends the work.

    Attributes:
        prompt_passes: the number of forward passes of the prompt.
    """

    def __init__(
        self,
        backend: Backend,
        prompt: Sequence[int],
        texts: Sequence[list[int]],
        capture: CaptureSpec,
        *,
        rows_per_step: int | None = None,
        passages: Sequence[range] = (),
        cancellation: Cancellation | None = None,
    ) -> None:
        self._passages, self._cancellation = passages, cancellation or Cancellation()
        self._backend, self._prompt, self._texts, self._capture = backend, prompt, texts, capture
        self._width = rows_per_step or backend.paths_per_step
        self._numbers = list(groups(texts, self._width))
        self.prompt_passes = 0

    def __enter__(self) -> TextTree:
        reserve = max(len(prefixes(self._texts[number] for number in group)) for group in self._numbers)
        with ExitStack() as stack:  # closes the tree if the prompt cannot be prefilled
            self._tree = stack.enter_context(
                opened(self._backend, self._prompt, reserve, self._capture, self._passages)
            )
            self._first = self._backend.prefill(self._tree) if self._prompt else None
            self._stack = stack.pop_all()
        self.prompt_passes = self._tree.forward_passes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def groups(self) -> Iterator[TextGroup]:
        """Iterate over the groups. The tokens of a group are dropped when the next group is requested."""
        for numbers in self._numbers:
            texts = {number: self._texts[number] for number in numbers}
            yield TextGroup(self._backend, self._tree, texts, self._first, self._width, self._cancellation)
            self._tree.drop_branches()


def groups(texts: Sequence[list[int]], limit: int) -> Iterator[list[int]]:
    """Group texts by common prefixes, with at most ``limit`` distinct tokens in a group.

    A longer text is a group by itself. Yields the indices of each group's texts.
    """
    group: list[int] = []
    size = 0
    for number in sorted(range(len(texts)), key=texts.__getitem__):
        text = texts[number]
        # in sorted order, no earlier text shares a longer prefix than the one just before
        new = len(text) - (_common_start(texts[group[-1]], text) if group else 0)
        if group and size + new > limit:
            yield group
            group, size, new = [], 0, len(text)
        group.append(number)
        size += new
    yield group


def _common_start(a: list[int], b: list[int]) -> int:
    """The length of the common prefix."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def prefixes(texts: Iterable[Sequence[int]]) -> list[Path]:
    """Every distinct non-empty prefix of the texts, each after its own prefixes."""
    return list(dict.fromkeys(tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)))
