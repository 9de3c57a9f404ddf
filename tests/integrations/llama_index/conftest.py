"""The LLM under test and a listener."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher

from cocoa_engine import CocoaEngine
from cocoa_integrations.llama_index import CocoaLLM
from cocoa_integrations.llama_index.function_calling import CallsFunctions
from tests.helpers.llama_index_helpers import Listener
from tests.helpers.remote import serving


@pytest.fixture(scope="session")
def url(engine: CocoaEngine) -> Iterator[str]:
    """The address of a server with the shared engine."""
    with serving(engine) as url:
        yield url


@pytest.fixture
def llm(request: pytest.FixtureRequest, engine: CocoaEngine) -> CallsFunctions:
    """Short answers from the shared engine, in this process or behind a server; see ``also_remote``."""
    return llm_of(request, engine, max_new_tokens=8)


@pytest.fixture
def caller(request: pytest.FixtureRequest, engine: CocoaEngine) -> CallsFunctions:
    """Answers that are long enough for a tool call."""
    return llm_of(request, engine, max_new_tokens=50)


def llm_of(request: pytest.FixtureRequest, engine: CocoaEngine, **options: Any) -> CallsFunctions:
    """An LLM where the parameter of a fixture says."""
    if getattr(request, "param", "here") == "here":
        return CocoaLLM(engine=engine, risk_metadata="full", **options)
    from cocoa_integrations.llama_index import CocoaRemote

    return CocoaRemote(base_url=request.getfixturevalue("url"), risk_metadata="full", timeout=60, **options)


@pytest.fixture
def prompts(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every prompt that the engine gets during the test, special tokens included."""
    seen: list[str] = []

    def recorded(name: str) -> None:
        method = getattr(engine, name)

        def called(prompt: Sequence[int], **options: Any) -> Any:
            seen.append(engine.tokenizer.decode(list(prompt)))
            return method(prompt, **options)

        monkeypatch.setattr(engine, name, called)

    recorded("stream")
    recorded("generate")  # for answers of a server in one piece
    return seen


@pytest.fixture
def heard() -> Iterator[Listener]:
    """Every event sent during the test."""
    listener, root = Listener(), get_dispatcher()
    root.add_event_handler(listener)
    yield listener
    root.event_handlers.remove(listener)
