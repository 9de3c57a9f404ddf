"""The ``timeout`` option: a stopping criterion that gives up instead of stopping."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import StoppingCriteria

from cocoa_engine.errors import GenerationTimeoutError


class TimeLimit(StoppingCriteria):
    """Raises once the time is over; the engine asks it after every step.

    A stopping criterion that merely stopped would pass a cut-off answer as a finished one, and no fallback would start.

    Args:
        seconds: the time allowed, from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """No row is to stop, [B]; or the error.

        Raises:
            GenerationTimeoutError: the time is over.
        """
        if time.monotonic() > self.deadline:
            raise GenerationTimeoutError(
                f"no complete answer within {self.seconds:g} s; raise timeout or lower max_new_tokens"
            )
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
