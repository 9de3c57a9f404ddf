"""What the decode loop asks of a backend: grow a tree of tokens, keep one path of it, drop the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from torch import Tensor

from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.language_model import LanguageModel

Path = tuple[int, ...]
"""Tokens after the committed ones; the last is the one to feed, all before it have been fed."""


class ReadBack(NamedTuple):
    """Tokens to feed one after the other from the end of a fed path: a long text that nothing grows from.

    The next reading of the same path goes on where this one ends; a commit drops them all. Only trees that
    ``keeps_rest`` take them.
    """

    after: Path
    token_ids: Sequence[int]


FeedRequest = Sequence[Path] | Sequence[ReadBack]
"""What a step is to feed of one sequence."""


class StepOutput(NamedTuple):
    """What one forward pass says of W fed tokens."""

    logits: Tensor  # [W, V], the next token's
    hidden: Tensor  # [N + 1, W, d] float32: middle layers m..n, then the final one, of the fed tokens
    others: Tensor | None = None  # [K, W, V] float32: of the early layers, or of the model with heads masked


class TokenTree(ABC):
    """One sequence: its committed tokens and, at a risk point, the branches that grow from their end.

    Attributes:
        keep_committed: set it before branches are fed if :meth:`drop_branches` is to be called; off, the last branch
            may take over what is held of the committed tokens, which saves a copy where they are not shared.
        prompt_read: tokens of the prompt that were fed, where it is fed in pieces.
    """

    keeps_rest: ClassVar[bool] = False
    """Whether tokens can be fed ahead: a path may be extended in several steps, its continuations outlive a commit."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.keep_committed = False
        self.committed = len(prompt)
        self.cached_tokens = 0
        self.prompt_read = 0
        self.forward_passes = 0
        self.fed_tokens = 0

    @abstractmethod
    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        """Make a fed path part of the committed sequence and drop every other branch.

        Args:
            keep_rest: keep what was fed after the path, where the tree can.
        """

    def drop_branches(self) -> None:
        """Go back to the committed tokens; what the branches held is free for others. Needs ``keep_committed``."""
        self.commit(())

    @abstractmethod
    def close(self) -> None:
        """Free what the sequence holds. Safe to call twice."""


class Backend(ABC):
    """A way to run the model over token trees.

    A path is extended in one step only, unless its tree ``keeps_rest``: after ``(a, b)`` was fed, ``(a, c)`` may not
    follow in a later step.

    Attributes:
        name: for the record.
        max_sequences: how many sequences one step takes; none is any number.
        paths_per_step: the most paths that many branches are best fed by at once; what a step needs grows with them.
    """

    name: ClassVar[str]
    max_sequences: int | None = 1
    paths_per_step: ClassVar[int] = 128  # of float32 logits, 128 x 128k are 64 MiB

    @property
    def native(self) -> bool:
        """Whether our own kernels run the model."""
        return False

    @property
    def masks_heads(self) -> bool:
        """Whether heads can be masked."""
        return False

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    @property
    def forward_name(self) -> str:
        """What runs the model; ``"plain"`` is its own modules as they are."""
        return "plain"

    @abstractmethod
    def open(self, prompts: Sequence[Sequence[int]], room: int, wanted: CaptureSpec) -> list[TokenTree]:
        """Trees for some prompts that are decoded together.

        Args:
            room: tokens beyond its prompt, dropped branches included, that a tree is likely to hold at any time.
            wanted: the hidden states every step returns.
        """

    def prefill(self, tree: TokenTree) -> Tensor:
        """Feed the prompt; returns ``[V]``, the first token's logits. No hidden states are captured."""
        while (logits := self.prefill_some(tree)) is None:
            pass
        return logits

    @abstractmethod
    def prefill_some(self, tree: TokenTree, most: int | None = None) -> Tensor | None:
        """Feed the next tokens of the prompt, at most ``most`` where the backend can; none until its end is fed."""

    @abstractmethod
    def step(self, requests: Sequence[tuple[TokenTree, FeedRequest]]) -> list[StepOutput]:
        """Feed the last token of each path, or each reading; one output per request, its rows in their order."""
