"""The model of these tests."""

from __future__ import annotations

import pytest

from cocoa_engine import CocoaEngine


@pytest.fixture(scope="session")
def engine(block_engine: CocoaEngine) -> CocoaEngine:
    """The real model with its weights in blocks."""
    return block_engine
