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
        branches: whether branches are opened at risk points. Otherwise the best token is chosen there too.
        samples: whether every token is drawn, if ``temperature`` is above 0.
        reads_back: whether the score also includes the PMI of the prompt and the candidate, for which the prompt is fed
            again after each candidate.
        repetition_penalty: the default repetition penalty. `None` uses the model's own.
    """

    name: ClassVar[str]
    branches: ClassVar[bool] = True
    samples: ClassVar[bool] = False
    reads_back: ClassVar[bool] = False
    repetition_penalty: ClassVar[float | None] = None

    @property
    def needs_own_passes(self) -> bool:
        """Whether the score of a given text needs forward passes of the method's own.

        Otherwise the text's log-probabilities and MLDS suffice, and :func:`cocoa_engine.rescore` computes the score.
        """
        return self.reads_back or isinstance(self, ContrastingMethod)

    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        """The score of a span, higher is better. Default: log p_S.

        Args:
            log_prob: log p_S in nats.
            mlds: the span's MLDS by the configured metric, at least 0.
            alpha: the weight of the MLDS penalty.
        """
        return log_prob

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


class SamplingMethod(DecodingMethod):
    """A method that draws every token, if ``temperature`` is above 0.

    The log-probabilities, entropies and margins of an answer remain those of the model's own distribution.
    """

    branches = False
    samples = True

    @abstractmethod
    def probabilities(self, logits: Tensor, config: CocoaConfig) -> Tensor:
        """The distributions to draw tokens from.

        Args:
            logits: the model's logits after the logits processors, ``[W, V]`` float32.
            config: the settings; ``temperature`` is above 0.

        Returns:
            ``[W, V]`` float64. Each row sums to 1; NaN for a row of logits that allows no token.
        """


class ContrastingMethod(DecodingMethod):
    """A method that contrasts the model's distribution with weaker distributions of the same model.

    The score of a span is the sum (or mean) of its tokens' contrasts. log p_S remains the model's own.
    """

    branches = False

    @abstractmethod
    def contrast(self, logits: Tensor, others: Tensor, config: CocoaConfig) -> Tensor:
        """The contrast of every token of the vocabulary; higher is better.

        Args:
            logits: the model's logits, ``[W, V]`` float32.
            others: the K sets of logits to contrast with, ``[K, W, V]`` float32: one for each early layer (DoLa), or
                one from the masked model (DeCoRe).
            config: the settings.

        Returns:
            ``[W, V]`` float32.
        """

    def plausible(self, logits: Tensor, config: CocoaConfig) -> Tensor | None:
        """Which tokens may be generated, ``[W, V]`` bool. `None` allows all tokens."""
        return None
