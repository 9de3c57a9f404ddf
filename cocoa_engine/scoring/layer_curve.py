"""The disagreement of every layer about one span of an answer. Both MLDS are means of these values."""

from __future__ import annotations

import torch

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.equations import disagreement, mean_pooled
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.execution.session import Session
from cocoa_engine.model.hidden_states import CaptureSpec, capture
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.prompts import Prompt, prompt_ids
from cocoa_engine.process_exit import at_work
from cocoa_engine.results import Generation, LayerCurve
from cocoa_engine.spans import Span


@at_work
def of_generation(session: Session, prompt: Prompt, generation: Generation, span: Span | int) -> LayerCurve:
    """The curve of one span of an answer; see :meth:`CocoaEngine.layer_profile`.

    Args:
        session: the model and its backend.
        prompt: the prompt of the answer.
        generation: the answer.
        span: one of the answer's spans, or its index.

    Raises:
        ConfigError: the answer has no such span.
        PromptError: the prompt and the answer's prompt have different lengths in tokens.
    """
    spans = generation.spans
    number = span if isinstance(span, int) else spans.index(span) if span in spans else len(spans)
    if not -len(spans) <= number < len(spans):
        raise ConfigError(f"the answer has no such span: give one of its spans, or a number below {len(spans)}.")
    before = prompt_ids(session.model, session.tokens, prompt)
    if len(before) != generation.usage.prompt_tokens:
        raise PromptError(
            f"the answer's prompt had {generation.usage.prompt_tokens} tokens, this one has {len(before)}; give the "
            "same prompt (for a chat, its messages, or the result of engine.encode_chat with the same template_kwargs)."
        )
    number %= len(spans)
    earlier = [token_id for one in spans[:number] for token_id in one.token_ids]
    return layer_curve(session.model, before + earlier, spans[number], generation.config)


def layer_curve(model: LanguageModel, before: list[int], span: Span, config: CocoaConfig) -> LayerCurve:
    """Feed a span once after the tokens before it, and compare its mean-pooled states layer by layer.

    Args:
        model: the model.
        before: the tokens of the prompt and of earlier spans.
        span: the span.
        config: the settings; ``middle_layers`` and ``final_layer`` are used.
    """
    spec = capture_spec(model, config)
    token_ids = torch.tensor([[*before, *span.token_ids]], device=model.device)
    inputs = {"use_cache": False} if "use_cache" in model.forward_parameters else {}
    every = CaptureSpec(0, model.num_layers, config.final_layer)
    with model.exclusive(), capture(model, every, keep=slice(len(before), None)) as captured:
        model.forward(token_ids, logits_to_keep=1, **inputs)
        layers = mean_pooled(captured.stacked(model.device)[:-1, 0])  # [L + 1, d]
    return LayerCurve(
        text=span.text,
        consecutive=disagreement(layers[:-1], layers[1:]).tolist(),
        to_final=disagreement(layers[:-1], layers[-1].expand_as(layers[:-1])).tolist(),
        middle_layers=(spec.first, spec.last),
        final_layer=config.final_layer,
    )
