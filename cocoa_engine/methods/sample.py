"""Plain sampling: every token is drawn from the model's distribution, as ``generate(do_sample=True)`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocoa_engine.methods.base import SamplingMethod

if TYPE_CHECKING:
    from torch import Tensor

    from cocoa_engine.config import CocoaConfig


class Sample(SamplingMethod):
    """p(w) = softmax(logits / temperature), restricted to the ``top_k`` tokens, then to those of ``top_p``.

    Both restrictions are those of transformers, in its order. Both MLDS are still measured.
    """

    name = "sample"

    def probabilities(self, logits: Tensor, config: CocoaConfig) -> Tensor:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        logits = logits.double()
        scores = (logits - logits.amax(-1, keepdim=True)) / config.temperature  # <= 0: dividing cannot give +inf
        warpers = [TopKLogitsWarper(config.top_k)] if config.top_k else []
        if config.top_p < 1:
            warpers.append(TopPLogitsWarper(config.top_p))
        for warper in warpers:
            scores = warper(None, scores)  # the token ids are not used
        return scores.softmax(-1)
