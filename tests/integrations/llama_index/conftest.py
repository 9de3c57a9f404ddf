"""The LLM under test and a listener."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher

from cocoa_engine import CocoaEngine, SpanStream
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.llama_index_helpers import Listener


@pytest.fixture
def llm(engine: CocoaEngine) -> CocoaLLM:
    """Short answers from the shared engine."""
    return CocoaLLM(engine=engine, max_new_tokens=8, risk_metadata="full")


@pytest.fixture
def prompts(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every prompt that the engine gets during the test, special tokens included."""
    seen: list[str] = []
    stream = engine.stream

    def recorded(prompt: Sequence[int], **options: Any) -> SpanStream:
        seen.append(engine.tokenizer.decode(list(prompt)))
        return stream(prompt, **options)

    monkeypatch.setattr(engine, "stream", recorded)
    return seen


@pytest.fixture
def heard() -> Iterator[Listener]:
    """Every event sent during the test."""
    listener, root = Listener(), get_dispatcher()
    root.add_event_handler(listener)
    yield listener
    root.event_handlers.remove(listener)
