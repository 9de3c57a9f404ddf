"""Models of the adapter on two engines: the real one, and a quick one for all that does not depend on the model."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import LLMResult

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_spans
from tests.helpers.alike import to_dicts
from tests.helpers.live_server import serving
from tests.helpers.tiny_models import QUESTION, engine_for_schemas


@pytest.fixture(scope="session")
def chat(engine: CocoaEngine) -> ChatCocoa:
    return ChatCocoa(engine=engine, max_tokens=12, risk_metadata="full")


@pytest.fixture(scope="session")
def answer(chat: ChatCocoa) -> AIMessage:
    return chat.invoke(QUESTION)


@pytest.fixture(scope="session")
def quick_engine() -> CocoaEngine:
    """Random weights; its answers to most prompts have several spans of both kinds."""
    return engine_for_schemas()


@pytest.fixture(scope="session")
def quick_url(quick_engine: CocoaEngine) -> Iterator[str]:
    """The address of a server with the quick engine."""
    with serving(quick_engine) as url:
        yield url


@pytest.fixture(scope="session")
def quick_chat(request: pytest.FixtureRequest, quick_engine: CocoaEngine) -> ChatCocoa:
    """The quick model in this process, or behind a server; see ``also_remote``."""
    if getattr(request, "param", "here") == "here":
        return ChatCocoa(engine=quick_engine, max_tokens=12, risk_metadata="full")
    url = request.getfixturevalue("quick_url")
    return ChatCocoa(base_url=url, max_tokens=12, risk_metadata="full", timeout=60)


@pytest.fixture(scope="session")
def quick_answer(quick_chat: ChatCocoa) -> AIMessage:
    return quick_chat.invoke(QUESTION)


@pytest.fixture(scope="session")
def quick_llm(quick_engine: CocoaEngine) -> CocoaLLM:
    return CocoaLLM(engine=quick_engine, max_tokens=12)


@pytest.fixture
def spy(quick_engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What the quick engine is asked to decode: one of its ``method_calls`` for each answer, batch or stream."""
    spy = Mock(wraps=quick_engine)
    for name in ("generate", "generate_batch", "stream"):  # which chats call, too
        monkeypatch.setattr(quick_engine, name, getattr(spy, name))
    return spy


class LiveHandler(BaseCallbackHandler):
    """Keeps what a user's handler sees while an answer is made."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.spans: list[dict[str, Any]] = []
        self.ends = 0

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        self.tokens.append(token)
        self.spans += to_dicts(get_spans(chunk))

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.ends += 1


@pytest.fixture
def live() -> LiveHandler:
    return LiveHandler()
