"""DeCoRe-entropy, "Decoding by Contrasting Retrieval Heads" (Gema et al., 2024): contrast with a masked model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocoa_engine import equations
from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.methods.base import ContrastingMethod
from cocoa_engine.methods.retrieval_heads import heads_per_layer, masked_heads

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
        num_heads = heads_per_layer(model)
        if not num_heads:
            raise UnsupportedModelError(f"{model.architecture} has no attention heads for DeCoRe to mask.")
        return masked_heads(config.decore_heads, config.decore_masked_heads, model.num_layers, num_heads, model)

    def contrast(self, logits: Tensor, others: Tensor, config: CocoaConfig) -> Tensor:
        return equations.decore_contrast(logits, others[0])
