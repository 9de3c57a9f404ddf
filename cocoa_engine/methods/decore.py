"""DeCoRe-entropy, "Decoding by Contrasting Retrieval Heads" (Gema et al., 2024): contrast with a masked model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocoa_engine import equations
from cocoa_engine.errors import ConfigError, UnsupportedModelError
from cocoa_engine.methods.base import ContrastingMethod
from cocoa_engine.methods.retrieval_heads import heads_of_model

if TYPE_CHECKING:
    from torch import Tensor

    from cocoa_engine.config import CocoaConfig
    from cocoa_engine.model.language_model import LanguageModel


class Decore(ContrastingMethod):
    """contrast = log softmax((1 + a) log p - a log p_masked), with a the entropy of p in nats.

    The authors normalise in multiple choice only. Normalising does not change which token is best. It matters only for
    logits processors that depend on more than the order of the scores, such as a repetition penalty.

    p_masked is the distribution of the same model with its retrieval heads masked: their query is zero, so they attend
    uniformly. The prompt is prefilled once, unmasked. From its last token on, the masked model has its own keys and
    values.
    """

    name = "decore"

    def masked_heads(self, config: CocoaConfig, model: LanguageModel) -> tuple[tuple[int, int], ...]:
        if not model.num_heads:
            raise UnsupportedModelError(f"{model.architecture} has no attention heads for DeCoRe to mask.")
        heads = heads_of_model(config.decore_heads, model)
        if heads is None:
            raise ConfigError(
                'method="decore" needs the model\'s retrieval heads. Find them once with `cocoa heads NAME`, or pass a '
                "file of them as decore_heads."
            )
        return heads.best(config.decore_masked_heads)

    def contrast(self, logits: Tensor, others: Tensor, config: CocoaConfig) -> Tensor:
        return equations.decore_contrast(logits, others[0])
