"""Hugging Face's own ``generate``, the baseline that the engine's speed is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.model.tokenizer import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    **options: Any,
) -> list[list[int]]:
    """Answer prompts in one left-padded batch, without sampling.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        prompts: the token ids of each prompt.
        max_new_tokens: the maximum number of new tokens per prompt.
        **options: further options of ``generate``, such as ``num_beams`` (default 1).

    Returns:
        The new tokens of each prompt, up to and including its end token.
    """
    eos = eos_token_ids(model, Tokens(tokenizer))
    width = max(map(len, prompts))
    pad = min(eos, default=0)
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    settings: dict[str, Any] = {"do_sample": False, "num_beams": 1, "pad_token_id": pad, "tokenizer": tokenizer}
    settings["eos_token_id"] = sorted(eos) or None
    with torch.no_grad():
        output = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **{**settings, **options})
    return [_up_to_end(row, eos) for row in output[:, width:].tolist()]


def _up_to_end(token_ids: list[int], eos: frozenset[int]) -> list[int]:
    for number, token_id in enumerate(token_ids):
        if token_id in eos:
            return token_ids[: number + 1]
    return token_ids
