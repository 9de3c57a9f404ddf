"""What the adapters attach to real answers is what the types declare, no key more or less."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from pydantic import TypeAdapter

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, RiskMiddleware, context_lift
from cocoa_integrations.llama_index import CocoaLLM as LlamaCocoa
from cocoa_integrations.llama_index import RiskRetryQueryEngine
from docs._generate.metadata_keys import METADATA, entry_types
from tests.helpers.reasoning_models import reasoning_engine, saying

QUESTION = "Who wrote Dune?"


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, TypeAdapter[Any]]]:
    """A validator of each metadata key that refuses further keys."""
    kinds = entry_types()
    for kind in kinds:
        monkeypatch.setitem(kind.model_config, "extra", "forbid")
    for _ in kinds:  # a type has the form that the types in it had when it was made
        for kind in kinds:
            kind.model_rebuild(force=True)
    yield {key: TypeAdapter(kind) for key, kind in METADATA.items()}
    monkeypatch.undo()
    for _ in kinds:
        for kind in kinds:
            kind.model_rebuild(force=True)


def _check(declared: dict[str, TypeAdapter[Any]], *holders: dict[str, Any]) -> set[str]:
    """Validates the metadata of some holders and returns the keys that had values."""
    seen = set()
    for holder in holders:
        json.dumps({key: holder.get(key) for key in declared}, allow_nan=False)
        for key in declared.keys() & holder.keys():
            declared[key].validate_python(holder[key], strict=True)
            seen.add(key)
    return seen


def test_langchain(engine: CocoaEngine, declared: dict[str, TypeAdapter[Any]]) -> None:
    chat = ChatCocoa(engine=engine, max_tokens=12)
    message = chat.invoke(QUESTION)
    assert _check(declared, message.additional_kwargs, message.response_metadata) == {"cocoa_risk"}
    message = chat.invoke(f"Dune is by Frank Herbert. {QUESTION}", risk_metadata="full")
    lifted = context_lift(chat, message, f"Dune is by Frank Herbert. {QUESTION}", QUESTION)
    for one in (message, lifted):
        assert _check(declared, one.additional_kwargs, one.response_metadata) == {"cocoa_spans", "cocoa_risk"}
    *chunks, last = list(chat.stream(QUESTION))
    assert _check(declared, *(chunk.additional_kwargs for chunk in chunks)) == {"cocoa_spans"}
    assert _check(declared, last.response_metadata) == {"cocoa_risk"}
    text = CocoaLLM(engine=engine, max_tokens=8).generate([QUESTION]).generations[0][0]
    assert _check(declared, text.generation_info) == {"cocoa_spans", "cocoa_risk"}
    middleware = RiskMiddleware(0.0, retry_with={"alpha": 1.0}, on_risk="mark")
    agent = create_agent(ChatCocoa(engine=engine, max_tokens=6), tools=[], middleware=[middleware])
    state = agent.invoke({"messages": [("user", QUESTION)]})
    assert len(state["cocoa_risks"][0]["attempts"]) == 2
    assert _check(declared, state) == {"cocoa_risks"}


def test_reasoning_and_tool_calls(engine: CocoaEngine, declared: dict[str, TypeAdapter[Any]]) -> None:
    thinker = reasoning_engine()
    options = saying(thinker, "Well.</think>\n\nHello!")
    message = ChatCocoa(engine=thinker, **options).invoke(QUESTION, risk_metadata="full")
    assert message.response_metadata["cocoa_risk"]["reasoning"]["spans"]
    assert _check(declared, message.additional_kwargs, message.response_metadata) == {"cocoa_spans", "cocoa_risk"}
    *_, last = LlamaCocoa(engine=thinker).stream_chat([ChatMessage(content=QUESTION)], **options)
    assert _check(declared, last.additional_kwargs, last.raw) == {"cocoa_risk"}  # type: ignore[arg-type]

    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return city

    chat = ChatCocoa(engine=engine, max_tokens=8).bind_tools([get_weather], tool_choice="any")
    report = chat.invoke("What is the weather in Lyon?").response_metadata["cocoa_risk"]
    assert [call["error"] is None for call in report["tool_calls"]] == [False]  # it is cut off
    assert _check(declared, {"cocoa_risk": report}) == {"cocoa_risk"}


class _Fixed(BaseRetriever):
    similarity_top_k = 1

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text="Dune is by Frank Herbert."), score=1.0)]


def test_llama_index(engine: CocoaEngine, declared: dict[str, TypeAdapter[Any]]) -> None:
    llm = LlamaCocoa(engine=engine, max_new_tokens=8)
    answer = llm.complete(QUESTION, risk_metadata="full")
    assert _check(declared, answer.additional_kwargs, answer.raw) == {"cocoa_spans", "cocoa_risk"}
    *chunks, last = list(llm.stream_complete(QUESTION))
    assert _check(declared, *(chunk.additional_kwargs for chunk in chunks)) == {"cocoa_spans"}
    assert _check(declared, last.additional_kwargs, last.raw) == {"cocoa_risk"}
    retrying = RiskRetryQueryEngine(_Fixed(), llm, threshold=0.0, max_tries=2, context_lift=True)
    metadata = retrying.query(QUESTION).metadata
    assert len(metadata["cocoa_tries"]) == 2
    assert _check(declared, metadata) == {"cocoa_risk", "cocoa_reports", "cocoa_tries"}
