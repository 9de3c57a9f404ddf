"""LLMs on two engines, as for LangChain: a quick one, and the real one where answers must make sense. A listener."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.live_server import serving
from tests.helpers.llama_index_helpers import Listener
from tests.helpers.reasoning_models import PLAIN
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import endless_tokenizer, tiny_model


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> CocoaEngine:
    """Random weights and known heads; answers have several spans, and none is empty. Some modules take another one."""
    tokenizer = endless_tokenizer()
    tokenizer.chat_template = PLAIN
    model = tiny_model("llama", seed=10, max_position_embeddings=8192)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    heads = heads_file(tmp_path_factory.mktemp("heads"), model, [(1, 0), (3, 2)])
    return CocoaEngine(model, tokenizer, config=CocoaConfig(decore_heads=heads), model_name="quick")


@pytest.fixture(scope="session")
def real_url(block_engine: CocoaEngine) -> Iterator[str]:
    """The address of a server with the real model."""
    with serving(block_engine) as url:
        yield url


@pytest.fixture
def llm(request: pytest.FixtureRequest, engine: CocoaEngine) -> CocoaLLM:
    """Short answers from the module's engine, in this process or behind a server; see ``also_remote``."""
    return llm_of(request, engine, "url", max_new_tokens=8)


@pytest.fixture
def caller(request: pytest.FixtureRequest, block_engine: CocoaEngine) -> CocoaLLM:
    """Answers of the real model that are long enough for a tool call."""
    return llm_of(request, block_engine, "real_url", max_new_tokens=50)


def llm_of(request: pytest.FixtureRequest, engine: CocoaEngine, url: str, **options: Any) -> CocoaLLM:
    """An LLM where the parameter of a fixture says; ``url`` is the fixture of the server's address."""
    if getattr(request, "param", "here") == "here":
        return CocoaLLM(engine=engine, risk_metadata="full", **options)
    return CocoaLLM(base_url=request.getfixturevalue(url), risk_metadata="full", timeout=60, **options)


@pytest.fixture
def prompts(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every prompt that the engine gets during the test, special tokens included."""
    seen: list[str] = []

    def called(method: Any, prompt: Sequence[int], **options: Any) -> Any:
        seen.append(engine.tokenizer.decode(list(prompt)))
        return method(prompt, **options)

    for name in ("stream", "generate"):  # which a server calls for answers in one piece
        monkeypatch.setattr(engine, name, partial(called, getattr(engine, name)))
    return seen


@pytest.fixture
def heard() -> Iterator[Listener]:
    """Every event sent during the test."""
    listener, root = Listener(), get_dispatcher()
    root.add_event_handler(listener)
    yield listener
    root.event_handlers.remove(listener)
