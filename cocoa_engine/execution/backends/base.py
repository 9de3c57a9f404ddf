"""The interface of backends: extend a tree of tokens, commit one path of it, drop the rest."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypeVar

from cocoa_engine.execution.forward.base import COST_OF_A_ROW, StepOutput
from cocoa_engine.execution.forward.source_attention import SourceProbe, is_observable
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel

Path = tuple[int, ...]
"""Token ids after the committed ones. To feed a path is to feed its last token; the tokens before it have been fed."""


class ReadBack(NamedTuple):
    """A long text, such as the prompt, to feed after a fed path. No branch grows from it.

    The next read-back of the same path continues where this one ends. A commit drops all read-backs. Only trees with
    ``keeps_rest`` support read-backs.
    """

    after: Path
    token_ids: Sequence[int]


FeedRequest = Sequence[Path] | Sequence[ReadBack]
"""What one step feeds to one sequence."""


def joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """The rows of several outputs of one tree."""
    logits, hidden, *optional = zip(*outputs, strict=True)
    others, masses = (
        None if part[0] is None else torch.cat(part, dim) for part, dim in zip(optional, (1, 0), strict=True)
    )
    return StepOutput(torch.cat(logits), torch.cat(hidden, dim=1), others, masses)


class TokenTree(ABC):
    """One sequence: its committed tokens and, at a risk point, the branches that extend them.

    Attributes:
        keep_committed: set it to ``True`` before branches are fed if ``commit(())`` will drop them all. Otherwise the
            last branch may take over the cache of the committed tokens, which saves a copy.
        token_ids: the committed tokens, the prompt included; ``committed`` is their number.
        prompt_tokens: number of tokens of the prompt, whose attention mass is the source attention.
        cached_tokens: number of tokens whose keys and values came from another sequence.
        prompt_read: number of prompt tokens fed so far, if the prompt is fed in chunks.
        forward_passes: number of forward passes.
        fed_tokens: number of tokens fed after the prompt.
        passages: positions of passages of the prompt whose attention mass is measured. Set it before the first step.
        probe: takes the attention of every step instead of the source attention, if the backend masks heads.
    """

    keeps_rest: bool = False
    """Whether tokens can be fed ahead: several steps may extend a path, and its continuations survive a commit."""

    def __init__(self, prompt: Sequence[int], capture: CaptureSpec) -> None:
        self.keep_committed = False
        self.capture = capture
        self.passages: Sequence[range] = ()
        self.probe: SourceProbe | None = None
        self.token_ids = list(prompt)
        self.committed = self.prompt_tokens = len(prompt)
        self.cached_tokens = self.prompt_read = self.forward_passes = self.fed_tokens = 0

    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        """Make a fed path part of the committed sequence and drop every other branch.

        Args:
            keep_rest: keep what was fed after the path, if the tree supports it.
        """
        self.token_ids += path
        self.committed += len(path)

    @abstractmethod
    def close(self) -> None:
        """Free the sequence's memory. Safe to call twice."""


TreeT = TypeVar("TreeT", bound=TokenTree, default=Any)


class Backend(ABC, Generic[TreeT]):
    """Runs the model over token trees of one type.

    Without ``keeps_rest`` only one step may extend a path: after ``(a, b)`` has been fed, ``(a, c)`` may not follow in
    a later step.

    Attributes:
        name: identifies the backend in :class:`cocoa_engine.ModelInfo`.
        native: whether the native kernels run the model.
        cost_of_a_row: the cost of a further token in a pass of few tokens, as a share of the cost of the first one.
        masks_heads: whether attention heads can be masked.
        max_sequences: most sequences in one step; ``None`` for no limit.
        paths_per_step: most paths to feed at once. The memory of a step grows with the number of paths.
    """

    name: str
    max_sequences: int | None = 1
    paths_per_step: int = 128  # 128 x 128k float32 logits take 64 MiB
    native = False
    cost_of_a_row = COST_OF_A_ROW
    masks_heads = False

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    @property
    def sees_attention(self) -> bool:
        """Whether source attention can be measured. An attention that masks heads sees them."""
        return self.masks_heads or is_observable(self.model)

    @property
    def forward_name(self) -> str:
        """Name of the forward pass; ``"plain"`` stands for the model's unchanged modules."""
        return "plain"

    @abstractmethod
    def open(self, prompts: Sequence[Sequence[int]], reserve_tokens: int, capture: CaptureSpec) -> list[TreeT]:
        """Create trees for prompts that are decoded together.

        ``reserve_tokens`` is the expected maximum of a tree's tokens beyond its prompt, dropped branches included.
        """

    def prefill(self, tree: TreeT) -> Tensor:
        """Feed the prompt and return the logits after it, ``[V]``. No hidden states are captured."""
        while (logits := self.prefill_some(tree)) is None:
            pass
        return logits

    @abstractmethod
    def prefill_some(self, tree: TreeT, max_tokens: int | None = None) -> Tensor | None:
        """Feed the next tokens of the prompt, at most ``max_tokens`` if the backend supports it.

        The result is ``None``, or the logits ``[V]`` after the prompt once all of it has been fed.
        """

    @abstractmethod
    def step(self, requests: Sequence[tuple[TreeT, FeedRequest]]) -> list[StepOutput]:
        """Feed the last token of each path, or each read-back. One output per request, with its rows in order."""
