"""Models of the adapter on two engines: the real one, and a quick one for all that does not depend on the model."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import LLMResult

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_spans
from tests.helpers.alike import to_dicts
from tests.helpers.live_server import serving
from tests.helpers.tiny_models import QUESTION, TEMPLATE, tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def chat(engine: CocoaEngine) -> ChatCocoa:
    return ChatCocoa(engine=engine, max_tokens=12, risk_metadata="full")


@pytest.fixture(scope="session")
def answer(chat: ChatCocoa) -> AIMessage:
    return chat.invoke(QUESTION)


@pytest.fixture(scope="session")
def quick_engine() -> CocoaEngine:
    """Random weights; its answers to most prompts have several spans of both kinds."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return CocoaEngine(tiny_model("llama", seed=6), tokenizer, model_name="quick")


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


class EngineSpy:
    """Keeps what is asked of an engine from outside, and the streams it gives out."""

    def __init__(self, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.streams: list[Any] = []
        self._inside = threading.local()
        for name in ("chat", "stream_chat", "generate", "generate_batch", "stream"):
            monkeypatch.setattr(engine, name, self._watch(name, getattr(engine, name)))

    def _watch(self, name: str, method: Any) -> Any:
        def watched(prompt: Any, **options: Any) -> Any:
            if getattr(self._inside, "engine", False):
                return method(prompt, **options)
            self.calls.append((name, prompt))
            self._inside.engine = True
            try:
                result = method(prompt, **options)
            finally:
                self._inside.engine = False
            if name.startswith("stream"):
                self.streams.append(result)
            return result

        return watched

    def asked(self, name: str) -> list[Any]:
        """The prompts given to one method."""
        return [prompt for called, prompt in self.calls if called == name]


@pytest.fixture
def spy(quick_engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> EngineSpy:
    """On the quick engine."""
    return EngineSpy(quick_engine, monkeypatch)


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
