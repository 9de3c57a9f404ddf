"""What a decoding method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # settings are read without loading torch
    from torch import Tensor

    from cocoa_engine.config import CocoaConfig


class DecodingMethod(ABC):
    """One way to rank candidate spans.

    Attributes:
        name: the name a user gives as ``CocoaConfig(method=...)``.
        branches: whether a risk point is branched at all; a method that does not takes the best token.
        reads_back: whether candidates are ranked by how well the prompt follows from them, too.
    """

    name: ClassVar[str]
    branches: ClassVar[bool] = True
    reads_back: ClassVar[bool] = False

    @abstractmethod
    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        """Score of a span, higher is better; ``log_prob`` is log p_S in nats, ``mlds`` the chosen metric."""


class ContrastingMethod(DecodingMethod):
    """One that takes each token by the model's distribution against another, weaker one of the same model.

    A span's score is then the sum (or mean) of its tokens' contrasts; log p_S stays the model's own.

    Attributes:
        repetition_penalty: the one of its paper, for open generation.
    """

    branches = False
    repetition_penalty: ClassVar[float] = 1.0

    @abstractmethod
    def contrast(self, logits: Tensor, others: Tensor, config: CocoaConfig) -> Tensor:
        """The contrast of every token, higher is better.

        Args:
            logits: ``[W, V]`` float32, the model's.
            others: ``[K, W, V]`` float32, those it is held against.

        Returns:
            ``[W, V]`` float32.
        """

    def plausible(self, logits: Tensor, config: CocoaConfig) -> Tensor | None:
        """``[W, V]``, which tokens may be taken in generation; none is all."""
        return None

    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        """log p_S: what is left where nothing was contrasted."""
        return log_prob
