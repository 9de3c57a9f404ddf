"""The base classes of decoding methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # settings can be imported without torch
    from torch import Tensor

    from cocoa_engine.config import CocoaConfig
    from cocoa_engine.model.language_model import LanguageModel


class DecodingMethod(ABC):
    """A rule that ranks candidate spans.

    Attributes:
        name: the name in ``CocoaConfig(method=...)``.
        branches: whether risk points are branched. Otherwise the best token is taken.
        reads_back: whether the score also includes how well the prompt follows from a candidate.
        repetition_penalty: the default repetition penalty. None uses the model's own.
    """

    name: ClassVar[str]
    branches: ClassVar[bool] = True
    reads_back: ClassVar[bool] = False
    repetition_penalty: ClassVar[float | None] = None

    @abstractmethod
    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        """The score of a span, higher is better.

        Args:
            log_prob: log p_S in nats.
            mlds: the span's MLDS by the configured metric.
            alpha: the weight of the penalty.
        """

    def early_layers(self, config: CocoaConfig, model: LanguageModel) -> tuple[int, ...]:
        """The layers whose logits the method needs, as indices of ``hidden_states``.

        Raises:
            ConfigError: the settings name a layer that the model does not have.
        """
        return ()

    def masked_heads(self, config: CocoaConfig, model: LanguageModel) -> tuple[tuple[int, int], ...]:
        """The (layer, head) pairs to mask in a second pass, if the method also needs the logits of a masked model.

        Raises:
            ConfigError: the settings do not fit the model's heads.
            UnsupportedModelError: the model has no attention heads.
        """
        return ()


class ContrastingMethod(DecodingMethod):
    """A method that contrasts the model's distribution with weaker distributions of the same model.

    The score of a span is the sum (or mean) of its tokens' contrasts. log p_S remains the model's own.
    """

    branches = False

    @abstractmethod
    def contrast(self, logits: Tensor, others: Tensor, config: CocoaConfig) -> Tensor:
        """The contrast of every token, higher is better.

        Args:
            logits: the model's logits, ``[W, V]`` float32.
            others: the logits to contrast with, ``[K, W, V]`` float32.
            config: the settings.

        Returns:
            ``[W, V]`` float32.
        """

    def plausible(self, logits: Tensor, config: CocoaConfig) -> Tensor | None:
        """Which tokens may be generated, ``[W, V]`` bool. None allows all tokens."""
        return None

    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        """log p_S, the score of a span without contrasts."""
        return log_prob
