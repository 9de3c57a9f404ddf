"""Ending the work of an async call that nobody waits for any more: a thread cannot be cancelled, a decode can."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from transformers import StoppingCriteria


class Cancellation(StoppingCriteria):
    """Breaks off once ``cancelled`` is set; the engine asks it after every step, before the next forward pass."""

    def __init__(self) -> None:
        self.cancelled = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """No row is to stop, [B]; or the error.

        Raises:
            CancelledError: in the worker thread, where nobody hears it.
        """
        if self.cancelled:
            raise asyncio.CancelledError
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
