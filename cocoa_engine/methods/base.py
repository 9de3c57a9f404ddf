"""What a decoding method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # settings are read without loading torch
    from torch import Tensor

    from cocoa_engine.config import CocoaConfig
    from cocoa_engine.model.language_model import LanguageModel


class DecodingMethod(ABC):
    """One way to rank candidate spans.

    Attributes:
        name: the name a user gives as ``CocoaConfig(method=...)``.
        branches: whether a risk point is branched at all; a method that does not takes the best token.
        reads_back: whether candidates are ranked by how well the prompt follows from them, too.
        repetition_penalty: the one of its paper, for open generation; none is the model's own.
    """

    name: ClassVar[str]
    branches: ClassVar[bool] = True
    reads_back: ClassVar[bool] = False
    repetition_penalty: ClassVar[float | None] = None

    @abstractmethod
    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        """Score of a span, higher is better; ``log_prob`` is log p_S in nats, ``mlds`` the chosen metric."""

    def early_layers(self, config: CocoaConfig, model: LanguageModel) -> tuple[int, ...]:
        """The layers whose states it wants as logits, as indices of ``hidden_states``.

        Raises:
            ConfigError: the settings name a layer that the model does not have.
        """
        return ()

    def masked_heads(self, config: CocoaConfig, model: LanguageModel) -> tuple[tuple[int, int], ...]:
        """The (layer, head) pairs without which it wants the model's logits, too.

        Raises:
            ConfigError: the settings do not fit the model's heads.
            UnsupportedModelError: the model has no heads.
        """
        return ()


class ContrastingMethod(DecodingMethod):
    """One that takes each token by the model's distribution against another, weaker one of the same model.

    A span's score is then the sum (or mean) of its tokens' contrasts; log p_S stays the model's own.
    """

    branches = False

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
