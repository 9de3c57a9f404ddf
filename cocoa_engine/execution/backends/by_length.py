"""Models whose rotary frequencies depend on the length of the sequence: LongRoPE, and NTK scaling by length.

Another length may give every earlier token other keys and values, in all layers. A cache is therefore used only for
lengths that have the frequencies of its own. Any other path is fed with its whole sequence, as a plain pass does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

from torch import Tensor

from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, ReadBack, TokenTree, joined
from cocoa_engine.execution.backends.unshared import Recompute
from cocoa_engine.execution.forward.base import StepOutput
from cocoa_engine.model.configs import Frequencies
from cocoa_engine.model.hidden_states import CaptureSpec


class TreeByLength(TokenTree):
    """One sequence.

    Attributes:
        cached: its keys and values, if the next token has the same frequencies.
        read: by path, the tokens of the read-backs after it.
    """

    def __init__(self, backend: ByLength, prompt: Sequence[int], reserve_tokens: int, capture: CaptureSpec) -> None:
        super().__init__(prompt, capture)
        self.backend = backend
        self.most = len(prompt) + reserve_tokens
        self.cached: TokenTree | None = None
        self.read: dict[Path, list[int]] = {}
        if self.is_alike(1):
            self.keeps_rest = self.open().keeps_rest

    def is_alike(self, more: int) -> bool:
        """Whether some more tokens leave the frequencies as they are. If so, fewer tokens do as well."""
        return self.backend.frequencies(self.committed + more) == self.backend.frequencies(self.committed)

    def open(self) -> TokenTree:
        """Make place for keys and values. They are still to be computed."""
        reserve_tokens = max(self.most - self.committed, 1)
        (self.cached,) = self.backend.cached.open([self.token_ids], reserve_tokens, self.capture)
        self.cached.prompt_tokens = self.prompt_tokens
        return self.cached

    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        if self.cached is not None and self.is_alike(len(path)):
            self.cached.commit(path, keep_rest=keep_rest)
        else:
            self.close()
        super().commit(path)
        self.read = {}

    def close(self) -> None:
        if self.cached is not None:
            self.cached.close()
        self.cached = None


class ByLength(Backend[TreeByLength]):
    """Runs a model by a backend with a cache, and by whole sequences where the cache does not hold.

    Args:
        cached: the other backend.
        frequencies: see :func:`cocoa_engine.model.configs.frequencies_of`.
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
        if tree.cached is None:
            return self.whole.prefill_some(tree)
        tree.forward_passes += 1
        logits = self.cached.prefill_some(tree.cached, max_tokens)
        tree.prompt_read = tree.cached.prompt_read
        return logits

    def step(self, requests: Sequence[tuple[TreeByLength, FeedRequest]]) -> list[StepOutput]:
        return [self._step(tree, asked) for tree, asked in requests]

    def _step(self, tree: TreeByLength, asked: FeedRequest) -> StepOutput:
        if tree.cached is None and tree.committed and tree.is_alike(1):
            tree.open()  # the frequencies have changed, and stay
            self.prefill_some(tree)
        fed: list[tuple[Path, int]] = []  # each with the number of tokens at its end to feed
        for each in asked:
            if isinstance(each, ReadBack):
                rest = tree.read.setdefault(each.after, [])
                rest += each.token_ids
                fed.append(((*each.after, *rest), len(each.token_ids)))
            else:
                fed.append((each, 1))
        held = [tree.cached is not None and tree.is_alike(len(path)) for path, _ in fed]
        if tree.cached is not None and any(held):
            tree.cached.keep_committed, tree.cached.passages = tree.keep_committed, tree.passages
            passes, in_cache = tree.cached.forward_passes, list[Any](compress(asked, held))
            (output,) = self.cached.step([(tree.cached, in_cache)])
            tree.forward_passes += tree.cached.forward_passes - passes
        parts, start = [], 0
        for (path, length), is_held in zip(fed, held, strict=True):
            if is_held:
                parts.append(output.rows(start, start := start + length))
            else:
                parts.append(self.whole.feed(tree, path, length))
            tree.fed_tokens += length
        return joined(parts)
