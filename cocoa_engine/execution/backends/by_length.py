"""Models whose rotary frequencies depend on the length of the sequence: LongRoPE, and NTK scaling by length.

Another length may give every earlier token other keys and values, in all layers. A cache is therefore used only for
lengths that have the frequencies of its own. Any other path is fed with its whole sequence, as a plain pass does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, ReadBack, StepOutput, TokenTree, joined
from cocoa_engine.execution.backends.unshared import Recompute
from cocoa_engine.model.configs import Frequencies
from cocoa_engine.model.hidden_states import CaptureSpec


class TreeByLength(TokenTree):
    """One sequence.

    Attributes:
        whole: its token ids, to be fed as a whole.
        cached: its keys and values, if the next token has the same frequencies.
        fed: the paths that they hold.
        read: by path, the tokens of the read-backs after it.
    """

    def __init__(self, backend: ByLength, prompt: Sequence[int], reserve_tokens: int, capture: CaptureSpec) -> None:
        super().__init__(prompt)
        self.backend, self.capture = backend, capture
        self.most = len(prompt) + reserve_tokens
        (self.whole,) = backend.whole.open([prompt], reserve_tokens, capture)
        self.cached: TokenTree | None = None
        self.fed: set[Path] = set()
        self.read: dict[Path, list[int]] = {}
        if self.is_alike(len(prompt) + 1):
            self.keeps_rest = self.open().keeps_rest

    def is_alike(self, length: int) -> bool:
        """Whether a length has the frequencies of the committed tokens."""
        return self.backend.frequencies(length) == self.backend.frequencies(self.committed)

    def open(self) -> TokenTree:
        """Make place for keys and values. They are still to be computed."""
        reserve_tokens = max(self.most - self.committed, 1)
        (tree,) = self.backend.cached.open([self.whole.token_ids], reserve_tokens, self.capture)
        tree.prompt_tokens = self.prompt_tokens
        self.cached, self.fed = tree, {()}
        return self.cached

    def holds(self, asked: Path | ReadBack) -> bool:
        """Whether a path or a read-back can be fed after the keys and values, and record that it will be."""
        if self.cached is None:
            return False
        if isinstance(asked, ReadBack):
            length = len(asked.after) + len(self.read.get(asked.after, ())) + len(asked.token_ids)
            return asked.after in self.fed and self.is_alike(self.committed + length)
        if asked[:-1] not in self.fed or not self.is_alike(self.committed + len(asked)):
            return False
        self.fed.add(asked)
        return True

    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        depth = len(path)
        if self.cached is not None and path in self.fed:
            self.cached.commit(path, keep_rest=keep_rest)
            self.fed = {fed[depth:] for fed in self.fed if keep_rest and fed[:depth] == path} | {()}
        else:
            self.close()
        self.whole.commit(path)
        self.committed += depth
        self.read = {}

    def close(self) -> None:
        if self.cached is not None:
            self.cached.close()
        self.cached, self.fed = None, set()


class ByLength(Backend[TreeByLength]):
    """Runs a model by a backend with a cache, and by whole sequences where the cache does not hold.

    Args:
        cached: the other backend.
        frequencies: see :func:`cocoa_engine.model.language_model.frequencies_of`.
    """

    def __init__(self, cached: Backend, frequencies: Frequencies) -> None:
        super().__init__(cached.model)
        self.cached, self.frequencies = cached, frequencies
        self.whole = Recompute(cached.model)
        self.name, self.paths_per_step = cached.name, cached.paths_per_step
        self.native, self.cost_of_a_row = cached.native, cached.cost_of_a_row

    @property
    def forward_name(self) -> str:
        return self.cached.forward_name

    def open(self, prompts: Sequence[Sequence[int]], reserve_tokens: int, capture: CaptureSpec) -> list[TreeByLength]:
        return [TreeByLength(self, prompt, reserve_tokens, capture) for prompt in prompts]

    def prefill_some(self, tree: TreeByLength, max_tokens: int | None = None) -> Tensor | None:
        tree.forward_passes += 1
        if tree.cached is None:
            return self.whole.prefill_some(tree.whole)
        logits = self.cached.prefill_some(tree.cached, max_tokens)
        tree.prompt_read = tree.cached.prompt_read
        return logits

    def step(self, requests: Sequence[tuple[TreeByLength, FeedRequest]]) -> list[StepOutput]:
        return [self._step(tree, asked) for tree, asked in requests]

    def _step(self, tree: TreeByLength, asked: FeedRequest) -> StepOutput:
        if tree.cached is None and tree.committed and tree.is_alike(tree.committed + 1):
            tree.open()  # the frequencies have changed, and stay
            self.prefill_some(tree)
        tree.whole.passages = tree.passages
        held: list[Any] = [each for each in asked if tree.holds(each)]
        parts: dict[int, StepOutput] = {}
        if held:
            assert tree.cached is not None
            tree.cached.keep_committed, tree.cached.passages = tree.keep_committed, tree.passages
            passes = tree.cached.forward_passes
            (output,) = self.cached.step([(tree.cached, held)])
            tree.forward_passes += tree.cached.forward_passes - passes
            start = 0
            for each in held:
                parts[id(each)] = output.rows(start, start := start + _width(each))
        for each in asked:
            rest: list[int] = []
            if isinstance(each, ReadBack):
                rest = tree.read.setdefault(each.after, [])
                rest += each.token_ids
            if id(each) not in parts:
                path = each.after if isinstance(each, ReadBack) else each
                parts[id(each)] = self.whole.feed(tree.whole, (*path, *rest), _width(each))
                tree.forward_passes += 1
        tree.fed_tokens += sum(map(_width, asked))
        return joined([parts[id(each)] for each in asked])


def _width(asked: Path | ReadBack) -> int:
    """Number of tokens to feed."""
    return len(asked.token_ids) if isinstance(asked, ReadBack) else 1
