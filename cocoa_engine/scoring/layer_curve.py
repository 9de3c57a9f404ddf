"""How each layer disagrees about one span of an answer: what the two MLDS are means of."""

from __future__ import annotations

import torch

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.request import wanted_states
from cocoa_engine.equations import disagreement
from cocoa_engine.model.hidden_states import CaptureSpec, capture
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.results import LayerCurve
from cocoa_engine.spans import Span


def layer_curve(model: LanguageModel, before: list[int], span: Span, config: CocoaConfig) -> LayerCurve:
    """Feed a span once after all that precedes it, and compare its mean states layer by layer.

    Args:
        before: the prompt's tokens and those of the spans before.
        config: its window and final layer.
    """
    wanted = wanted_states(model, config)
    token_ids = torch.tensor([[*before, *span.token_ids]], device=model.device)
    inputs = {"use_cache": False} if "use_cache" in model.forward_parameters else {}
    every = CaptureSpec(0, model.num_layers, config.final_layer)
    with model.exclusive(), capture(model, every, keep=slice(len(before), None)) as captured:
        model.forward(token_ids, logits_to_keep=1, **inputs)
        layers = captured.stacked(model.device)[:-1, 0].mean(dim=1)  # [L + 1, d]
    return LayerCurve(
        text=span.text,
        consecutive=disagreement(layers[:-1], layers[1:]).tolist(),
        to_final=disagreement(layers[:-1], layers[-1].expand_as(layers[:-1])).tolist(),
        middle_layers=(wanted.first, wanted.last),
        final_layer=config.final_layer,
    )
