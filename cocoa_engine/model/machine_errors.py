"""Errors of the machine, which say nothing about the model or its settings."""

from __future__ import annotations

import torch

from cocoa_engine.errors import CocoaError

MACHINE_ERRORS: tuple[type[Exception], ...] = (MemoryError, torch.OutOfMemoryError)
"""Too little memory, and faults of the accelerator. Earlier versions of torch raise a RuntimeError for the latter."""

if hasattr(torch, "AcceleratorError"):
    MACHINE_ERRORS += (torch.AcceleratorError,)

PASSED_ON: tuple[type[Exception], ...] = (CocoaError, *MACHINE_ERRORS)
"""Errors that are not converted where all others are taken as the fault of a model or its settings."""
