"""Backends that feed each branch by itself: after a copy of the model's own cache, or as a whole sequence.

:class:`ByLength` is for models whose rotary frequencies depend on the length of the sequence: LongRoPE, and NTK scaling
by length. Another length may give every earlier token other keys and values, in all layers. A cache is therefore used
only for lengths that have the frequencies of its own. Any other path is fed with its whole sequence, as a plain pass
does.
"""

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, ReadBack, TokenTree, joined
from cocoa_engine.execution.forward.base import StepOutput
from cocoa_engine.execution.forward.source_attention import observed_attention, of_segments, probe_of
from cocoa_engine.model.configs import Frequencies
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel, capture, plain_modes

if TYPE_CHECKING:
    from transformers import Cache

_CACHE_NAMES = ("past_key_values", "cache_params", "state")


class UnsharedTree(TokenTree):
    """One sequence, and the cache of each live path, for a backend with caches."""

    def __init__(self, prompt: Sequence[int], capture: CaptureSpec) -> None:
        super().__init__(prompt, capture)
        self.caches: dict[Path, Cache | None] = {(): None}

    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        super().commit(path)
        self.caches = {(): self.caches.get(path)}

    def close(self) -> None:
        self.caches = {}


class _Unshared(Backend):
    def open(self, prompts: Sequence[Sequence[int]], reserve_tokens: int, capture: CaptureSpec) -> list[UnsharedTree]:
        return [UnsharedTree(prompt, capture) for prompt in prompts]

    def prefill_some(self, tree: Any, max_tokens: int | None = None) -> Tensor:
        return self.feed(tree, ()).logits[0]

    @plain_modes()  # texts to score come without the scheduler, and caches are copied between passes
    def step(self, requests: Sequence[tuple[Any, FeedRequest]]) -> list[StepOutput]:
        outputs = []
        for tree, asked in requests:
            outputs.append(joined(self._feed_all(tree, cast("Sequence[Path]", asked))))
            tree.fed_tokens += len(asked)
        return outputs

    def _feed_all(self, tree: Any, paths: Sequence[Path]) -> list[StepOutput]:
        return [self.feed(tree, path) for path in paths]

    @abstractmethod
    def feed(self, tree: Any, path: Path) -> StepOutput:
        """Feed a path, or the prompt if it is empty. The output is that of the last token."""

    def _run(
        self, tree: TokenTree, path: Path, token_ids: Sequence[int], rows: int, **inputs: Any
    ) -> tuple[StepOutput, Any]:
        """Run the model. The output is that of the last ``rows`` tokens; beside it is what the model returned."""
        probe = probe_of(tree.capture.source_heads, tree.prompt_tokens, tree.passages) if path else None
        with (
            self.model.exclusive(),
            capture(self.model, tree.capture, keep=slice(-rows, None)) as captured,
            observed_attention(self.model, probe, rows, tree.committed + len(path)),
        ):
            output = self.model.forward(
                torch.tensor([token_ids], device=self.model.device), logits_to_keep=rows, **inputs
            )
            tree.forward_passes += 1
            logits = output.logits[0, -rows:].float()
            early = captured.early_logits(self.model, logits.device)
            hidden = captured.stacked(logits.device)[:, 0]
        return StepOutput(logits, hidden, None if early is None else early[:, 0], of_segments([(probe, rows)])), output


class Recompute(_Unshared):
    """Runs the whole sequence in every step, for models with an unknown kind of cache."""

    name = "recompute"

    def feed(self, tree: TokenTree, path: Path, rows: int = 1) -> StepOutput:
        inputs = {"use_cache": False} if "use_cache" in self.model.forward_parameters else {}
        return self._run(tree, path, [*tree.token_ids, *path], rows, **inputs)[0]


class CopiedCache(_Unshared):
    """Copies the cache for each branch. For models with recurrent state (Mamba, hybrids), ALiBi or chunked attention.

    Raises:
        NotImplementedError: the model has no cache to copy.
    """

    name = "copied_cache"
    paths_per_step = 16  # each path may need its own cache

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.cache_name = next((name for name in _CACHE_NAMES if name in model.forward_parameters), "")
        if not self.cache_name:
            raise NotImplementedError("the model takes no cache")

    def _feed_all(self, tree: UnsharedTree, paths: Sequence[Path]) -> list[StepOutput]:
        children, outputs = Counter(path[:-1] for path in paths), []
        for path in paths:
            parent = path[:-1]
            children[parent] -= 1
            # the last child takes over its parent's cache, because only one step may extend a path
            shared = children[parent] or (tree.keep_committed and not parent)
            tree.caches[path] = copy.deepcopy(tree.caches[parent]) if shared else tree.caches.pop(parent)
            outputs.append(self.feed(tree, path))
        return outputs

    def feed(self, tree: UnsharedTree, path: Path) -> StepOutput:
        token_ids, start = ([path[-1]], tree.committed + len(path) - 1) if path else (tree.token_ids, 0)
        positions = torch.arange(start, start + len(token_ids), device=self.model.device)[None]
        cache = {} if tree.caches[path] is None else {self.cache_name: tree.caches[path]}
        output, returned = self._run(tree, path, token_ids, 1, position_ids=positions, use_cache=True, **cache)
        tree.caches[path] = getattr(returned, self.cache_name)
        return output


class TreeByLength(TokenTree):
    """One sequence. It is ``cached`` while the next token has the same frequencies."""

    def __init__(self, backend: "ByLength", prompt: Sequence[int], reserve_tokens: int, capture: CaptureSpec) -> None:
        super().__init__(prompt, capture)
        self.backend = backend
        self.most = len(prompt) + reserve_tokens
        self.cached: TokenTree | None = None
        self.fed: set[Path] = set()  # the paths that the cache holds
        self.read: dict[Path, list[int]] = {}  # by path, the tokens of the read-backs after it
        if self.is_alike(1):
            self.keeps_rest = self.open().keeps_rest

    def is_alike(self, more: int) -> bool:
        """Whether some more tokens leave the frequencies as they are. If so, fewer tokens do as well."""
        return self.backend.frequencies(self.committed + more) == self.backend.frequencies(self.committed)

    def open(self) -> TokenTree:
        """Make place for keys and values. They are still to be computed."""
        reserve_tokens = max(self.most - self.committed, 1)
        (self.cached,) = self.backend.cached.open([self.token_ids], reserve_tokens, self.capture)
        self.cached.prompt_tokens, self.fed = self.prompt_tokens, {()}
        return self.cached

    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        if self.cached is not None and path in self.fed:
            self.cached.commit(path, keep_rest=keep_rest)
            rest = [fed[len(path) :] for fed in self.fed if keep_rest and fed[: len(path)] == path]
            self.fed = {(), *rest}
        else:
            self.close()
        super().commit(path)
        self.read = {}

    def close(self) -> None:
        if self.cached is not None:
            self.cached.close()
        self.cached, self.fed = None, set()


class ByLength(Backend[TreeByLength]):
    """Runs a model by a backend with a cache, and by whole sequences where the cache does not hold."""

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
        held: list[bool] = []  # whether the cache holds what is before it, and will hold it
        for entry in asked:
            if isinstance(entry, ReadBack):
                rest = tree.read.setdefault(entry.after, [])
                rest += entry.token_ids
                fed.append(((*entry.after, *rest), len(entry.token_ids)))
                held.append(entry.after in tree.fed and tree.is_alike(len(fed[-1][0])))
            else:
                fed.append((entry, 1))
                held.append(entry[:-1] in tree.fed and tree.is_alike(len(entry)))
                tree.fed |= {entry} if held[-1] else set()
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
