"""A tiny model that says a given text, and is less sure of each span than of the one before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from cocoa_engine import CocoaEngine
from tests.helpers.reasoning_models import Says

RIVALS = 4
"""The most candidates beside the right one. The risk, 1 - p, of the first spans is about 0, 0.47, 0.64, 0.73, 0.78."""


class Wavers(Says):
    """Like ``Says``, with another candidate more at each span."""

    def for_prompt(self, prompt: Sequence[int]) -> Wavers:
        """The engine calls it for each request."""
        return type(self)(*self._made_of, len(prompt))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self._prompt_length is not None
        at = input_ids.shape[1] - self._prompt_length
        if not (at < len(self._token_ids) and at % self._every == 0):
            return super().__call__(input_ids, scores)
        forced = torch.full_like(scores, -torch.inf)
        token_id = self._token_ids[at]
        for rival in range(min(at // self._every, RIVALS)):
            forced[:, (token_id + 1 + rival) % 256] = math.log(0.9)
        forced[:, token_id] = 0.0
        return forced


def wavering(engine: CocoaEngine, text: str, every: int = 3) -> dict[str, Any]:
    """Options for a call that answers with a text."""
    processor = Wavers(engine, text, every)
    return {"logits_processor": [processor], "alpha": 0.0, "max_new_tokens": 400, "max_span_tokens": every}
