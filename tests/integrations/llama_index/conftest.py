"""The LLM under test and a listener."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher

from cocoa_engine import CocoaEngine, SpanStream
from cocoa_integrations.llama_index import CocoaLLM
from cocoa_integrations.llama_index.function_calling import CallsFunctions
from tests.helpers.llama_index_helpers import Listener
from tests.helpers.remote import serving


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked ``also_remote`` run with the model in this process, and with the same model behind a server."""
    import os
    marked = metafunc.definition.get_closest_marker("also_remote") is not None
    if (marked or os.environ.get("ALL_REMOTE")) and "llm" in metafunc.fixturenames:
        metafunc.parametrize("llm", ["here", "remote"] if not os.environ.get("ALL_REMOTE") else ["remote"], indirect=True)


@pytest.fixture(scope="session")
def url(engine: CocoaEngine) -> Iterator[str]:
    """The address of a server with the shared engine."""
    with serving(engine) as url:
        yield url


@pytest.fixture
def llm(request: pytest.FixtureRequest, engine: CocoaEngine) -> CallsFunctions:
    """Short answers from the shared engine, in this process or behind a server."""
    if getattr(request, "param", "here") == "here":
        return CocoaLLM(engine=engine, max_new_tokens=8, risk_metadata="full")
    from cocoa_integrations.llama_index import CocoaRemote

    url = request.getfixturevalue("url")
    return CocoaRemote(base_url=url, max_new_tokens=8, risk_metadata="full", timeout=60)


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
