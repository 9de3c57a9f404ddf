"""The LLM under test and a listener."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index_helpers import Listener

from cocoa_engine import CocoaEngine
from cocoa_integrations.llama_index import CocoaLLM


@pytest.fixture
def llm(engine: CocoaEngine) -> CocoaLLM:
    """Short answers from the shared engine."""
    return CocoaLLM(engine=engine, max_new_tokens=8)


@pytest.fixture
def heard() -> Iterator[Listener]:
    """Every event sent during the test."""
    listener, root = Listener(), get_dispatcher()
    root.add_event_handler(listener)
    yield listener
    root.event_handlers.remove(listener)
