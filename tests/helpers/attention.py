"""The attention of a model on its prompt, from its attention weights and from an answer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cocoa_engine import Generation


@torch.no_grad()
def attention_weights(model: Any, token_ids: list[int]) -> Sequence[Tensor]:
    """The weights of each layer, ``[1, heads, t, t]``."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        weights: Sequence[Tensor] = model(torch.tensor([token_ids]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(usual)
    return weights


def mass_on_prompt(weights: Sequence[Tensor], heads: Sequence[tuple[int, int]], prompt_tokens: int) -> list[float]:
    """The mean mass of some heads on the prompt after its first token, for each token after the prompt."""
    masses = [weights[layer][0, head, prompt_tokens:, 1:prompt_tokens].sum(-1) for layer, head in heads]
    values: list[float] = torch.stack(masses).mean(dim=0).tolist()
    return values


def source_attention(generation: Generation) -> list[float]:
    """The source attention of each token of an answer."""
    return [value for span in generation.spans for value in span.token_source_attention]
