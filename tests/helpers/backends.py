"""Backends made by hand, and what plain forward passes give in their place."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from cocoa_engine import Generation
from cocoa_engine.execution.backends import Chosen, build
from cocoa_engine.execution.forward.linears import LinearBackend
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.language_model import LanguageModel
from tests.helpers.alike import near

PROMPTS = [[5, 9, 40, 77, 12, 150, 3], [200, 201], list(range(30, 60))]
WANTED = CaptureSpec(2, 4, "post_norm")


def made(model: PreTrainedModel, kind: str, linear_backend: LinearBackend) -> Chosen:
    return Chosen(build(kind, LanguageModel(model), linear_backend), "set by the test", linear_backend)


def same(a: Generation, b: Generation) -> bool:
    return a.token_ids == b.token_ids and all(
        (x.kind, x.text, x.chosen) == (y.kind, y.text, y.chosen)
        and x.score == near(y.score)
        and [c.token_ids for c in x.candidates] == [c.token_ids for c in y.candidates]
        for x, y in zip(a.spans, b.spans, strict=True)
    )


def plain(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]
