"""DeCoRe-entropy, "Decoding by Contrasting Retrieval Heads" (Gema et al., 2024): the model against itself, masked."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.methods.base import ContrastingMethod
from cocoa_engine.methods.retrieval_heads import masked_heads

if TYPE_CHECKING:
    from torch import Tensor

    from cocoa_engine.config import CocoaConfig
    from cocoa_engine.model.language_model import LanguageModel


class Decore(ContrastingMethod):
    """contrast = log softmax((1 + a) log p - a log p_masked), with a the entropy of p in nats.

    The authors normalise in multiple choice only. No token is taken otherwise for it, unless a logits processor reads
    more than the order of the scores, as a repetition penalty does: it finds log-probabilities here.

    p_masked is the same model with its retrieval heads masked: their query is zero, so that they attend uniformly. From
    the prompt's last token on the masked model has keys and values of its own; the prompt is read once, unmasked.
    """

    name = "decore"

    def masked_heads(self, config: CocoaConfig, model: LanguageModel) -> tuple[tuple[int, int], ...]:
        num_heads = getattr(model.config, "num_attention_heads", None)
        if num_heads is None:
            raise UnsupportedModelError(f"{type(model.model).__name__} has no attention heads for DeCoRe to mask.")
        return masked_heads(config.decore_heads, config.decore_masked_heads, model.num_layers, num_heads)

    def contrast(self, logits: Tensor, others: Tensor, config: CocoaConfig) -> Tensor:
        log_p, masked = logits.log_softmax(-1), others[0].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1, keepdim=True)  # [W, 1]
        contrast = (1 + entropy) * log_p - entropy * masked
        return contrast.masked_fill(logits == -inf, -inf).log_softmax(-1)
