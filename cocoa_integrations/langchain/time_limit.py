"""The ``timeout`` option: a stopping criterion that raises an error instead of stopping."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import StoppingCriteria

from cocoa_engine.errors import GenerationTimeoutError


class TimeLimit(StoppingCriteria):
    """Raises an error when the time limit is exceeded. The engine calls it after every step.

    If it stopped the answer instead, a truncated answer would look like a complete one, and no fallback would run.

    Args:
        seconds: the time limit, from the construction of this object.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``False`` for every row, [B]: no row is stopped.

        Raises:
            GenerationTimeoutError: the time limit is exceeded.
        """
        if time.monotonic() > self.deadline:
            raise GenerationTimeoutError(
                f"no complete answer within {self.seconds:g} s; raise timeout or lower max_new_tokens"
            )
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
