"""DoLa, "Decoding by Contrasting Layers" (Chuang et al., ICLR 2024): the final layer against an early exit."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING

from cocoa_engine import equations
from cocoa_engine.errors import ConfigError
from cocoa_engine.methods.base import ContrastingMethod

if TYPE_CHECKING:
    from torch import Tensor

    from cocoa_engine.config import CocoaConfig
    from cocoa_engine.model.language_model import LanguageModel


class Dola(ContrastingMethod):
    """contrast(w) = log p_N(w) - log p_l(w), where p_l = softmax(lm_head(h[l])), without the final norm.

    At each token, layer l is the candidate layer whose p_l is farthest from p_N by the Jensen-Shannon divergence
    1/2 KL(M || p_N) + 1/2 KL(M || p_l), M = (p_N + p_l) / 2, with the arguments in the order of the authors' code. Only
    tokens with p_N(w) >= r max p_N are allowed, with r = ``dola_relative_top`` (default 0.1). The repetition penalty is
    applied after the contrast.
    """

    name = "dola"
    repetition_penalty = 1.2

    def early_layers(self, config: CocoaConfig, model: LanguageModel) -> tuple[int, ...]:
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
        return early_layers(config.dola_layers, model.num_layers, tied)

    def contrast(self, logits: Tensor, others: Tensor, config: CocoaConfig) -> Tensor:
        return equations.dola_contrast(logits, others)

    def plausible(self, logits: Tensor, config: CocoaConfig) -> Tensor:
        below = log(config.dola_relative_top) if config.dola_relative_top > 0 else -inf
        return logits >= logits.amax(-1, keepdim=True) + below  # logits are log p plus a constant


def early_layers(asked: str, num_layers: int, tied_embeddings: bool) -> tuple[int, ...]:
    """The candidate layers, as indices of ``hidden_states``: ``"high"``, ``"low"`` or those such as ``"16,18,20"``.

    Raises:
        ConfigError: a layer is not below the model's last layer.
    """
    if asked == "high":
        return tuple(range(num_layers // 2 if num_layers <= 40 else num_layers - 20, num_layers, 2))
    if asked == "low":
        # with tied embeddings, layer 0 predicts the input token itself
        first = 2 if tied_embeddings else 0
        return tuple(range(first, num_layers // 2 if num_layers <= 40 else 20, 2)) or (first,)
    layers = tuple(sorted({int(layer) for layer in asked.split(",")}))
    if not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ConfigError(f"dola_layers={asked!r}: the model has layers 0 to {num_layers - 1} before its last.")
    return layers
