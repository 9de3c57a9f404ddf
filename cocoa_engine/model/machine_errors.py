"""Errors of the machine, which say nothing about the model or its settings."""

from __future__ import annotations

import torch

MACHINE_ERRORS: tuple[type[Exception], ...] = (MemoryError, torch.OutOfMemoryError)
"""Too little memory, and faults of the accelerator. Earlier versions of torch raise a RuntimeError for the latter."""

if hasattr(torch, "AcceleratorError"):
    MACHINE_ERRORS += (torch.AcceleratorError,)
