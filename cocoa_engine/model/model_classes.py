"""Imports transformers' model classes."""

from __future__ import annotations

import sys

from cocoa_engine.garbage import collector_paused
from cocoa_engine.optional import quiet_torchao


def import_model_classes() -> None:
    """Import them before something of transformers does, which would let torchao write to stderr."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with quiet_torchao(), collector_paused():
        import transformers.modeling_utils  # noqa: F401
