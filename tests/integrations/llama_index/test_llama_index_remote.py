"""The LLM of a server gives what the same LLM in this process gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode

from cocoa_engine import CocoaEngine, ConfigError, PromptError
from cocoa_integrations.llama_index import (
    CocoaLLM,
    CocoaRiskEvent,
    MissingRiskWarning,
    RiskQueryEngine,
    get_risk,
)
from cocoa_integrations.llama_index.answers import Answers
from cocoa_integrations.llama_index.retrieved import add_nodes
from cocoa_integrations.server import create_app
from tests.helpers.alike import close
from tests.helpers.llama_index_helpers import Listener
from tests.helpers.remote import Recording, listening, same_ids
from tests.helpers.structured import engine_for_schemas

HELLO = [ChatMessage("Who invented the telephone?")]


@pytest.fixture(scope="module")
def quick() -> CocoaEngine:
    return engine_for_schemas()


@pytest.fixture(scope="module")
def server(quick: CocoaEngine) -> Recording:
    return Recording(create_app(quick))


@pytest.fixture(scope="module")
def url(server: Recording) -> Iterator[str]:
    with listening(server) as url:
        yield url


@pytest.fixture
def sent(server: Recording) -> list[Any]:
    """The requests of the test."""
    server.bodies.clear()
    server.headers.clear()
    return server.bodies


def here_and_there(engine: CocoaEngine, url: str, **options: Any) -> tuple[CocoaLLM, CocoaLLM]:
    """The same LLM in this process and behind its server."""
    options = {"max_new_tokens": 12, "risk_metadata": "full", **options}
    return CocoaLLM(engine=engine, **options), CocoaLLM(base_url=url, timeout=60, **options)


def assert_same(here: Any, there: Any) -> None:
    """Every key of the reports, and whatever else the responses have in common."""
    own, remote = get_risk(here).to_dict(), get_risk(there).to_dict()
    assert list(own) == list(remote)
    for key in own:
        assert close(same_ids(own)[key], same_ids(remote)[key]), key
    assert here.additional_kwargs.keys() == there.additional_kwargs.keys()
    assert close(here.additional_kwargs.get("cocoa_spans"), there.additional_kwargs.get("cocoa_spans"))
    kept = [same_ids(one.raw["cocoa_risk"]) for one in (here, there)]
    assert close(kept[0], kept[1])
    for key in ("model_name", "finish_reason"):
        assert here.raw[key] == there.raw[key]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert here.raw["usage"][key] == there.raw["usage"][key]
    assert (here.message.role, here.message.content, here.delta) == (
        there.message.role,
        there.message.content,
        there.delta,
    )
    assert [_plain(block) for block in here.message.blocks] == [_plain(block) for block in there.message.blocks]


def _plain(block: Any) -> dict[str, Any]:
    return {name: value for name, value in block.model_dump().items() if name != "tool_call_id"}


# What comes back.


@pytest.mark.parametrize("settings", [{}, {"alpha": 8.0, "gamma": 0.05}, {"max_risk": 0.3}])
async def test_the_report_is_that_of_the_model_in_this_process(
    quick: CocoaEngine, url: str, settings: dict[str, Any]
) -> None:
    here, there = here_and_there(quick, url, **settings)
    assert_same(here.chat(HELLO), there.chat(HELLO))
    assert_same(await here.achat(HELLO), await there.achat(HELLO))
    own, remote = [*here.stream_chat(HELLO)], [*there.stream_chat(HELLO)]
    assert [(one.delta, one.message.content) for one in own] == [(one.delta, one.message.content) for one in remote]
    assert [one.additional_kwargs.get("cocoa_spans") for one in own[:-1]] == [
        one.additional_kwargs.get("cocoa_spans") for one in remote[:-1]
    ]
    assert_same(own[-1], remote[-1])
    assert_same(own[-1], [one async for one in await there.astream_chat(HELLO)][-1])


# What is sent.


def nodes_of(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(id_=text, text=f" {text}\n")) for text in texts]


async def test_retrieved_nodes_in_the_messages_are_sent_as_sources(url: str, sent: list[Any], heard: Listener) -> None:
    llm = CocoaLLM(base_url=url, timeout=60, max_tokens=3)
    question = [ChatMessage("the red loaf", role=MessageRole.SYSTEM), ChatMessage("yes and no")]
    with Answers(lift=False):
        llm.chat(question)
        add_nodes(nodes_of("yes", "loaf yes", "it", "red loaf"))
        llm.chat(question)
        _ = [*llm.stream_chat(question)]
        await llm.achat(question)
        _ = [one async for one in await llm.astream_chat(question)]
        llm.complete("yes")
        add_nodes(nodes_of(*(f"{number:03}" for number in range(300))))
        llm.chat([ChatMessage("yes " + " ".join(f"{number:03}" for number in range(300)))])
    named = ["yes", "red loaf"]  # not one that begins in a message and ends in the next
    assert [body["cocoa"].get("source") for body in sent[:-1]] == [None, *[named] * 4, ["yes"]]
    assert sent[-1]["cocoa"]["source"] == ["yes", *(f"{number:03}" for number in range(255))]  # what a server takes
    counts = [
        {len(one.get("passage_attention", ())) for one in event.report["spans"]} for event in heard.of(CocoaRiskEvent)
    ]
    assert counts == [{0}, *[{2}] * 4, {1}, {256}]


def test_the_context_window_is_that_of_the_server(quick: CocoaEngine, url: str, sent: list[Any]) -> None:
    llm = CocoaLLM(base_url=url)
    assert llm.metadata.context_window == quick.context_window
    assert llm.metadata.is_chat_model
    assert llm.metadata.is_function_calling_model
    assert llm.metadata.num_output == 256
    assert len(sent) == 1  # asked once
    assert CocoaLLM(base_url=url, context_window=100).metadata.context_window == 100
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alhpa": 1.0}, r"unknown option 'alhpa' \(did you mean 'alpha'\?\)"),
        ({"decore_heads": "heads.json"}, "decore_heads names a file of the server's machine"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "the same option|given twice"),
    ],
)
def test_options_are_checked_before_anything_is_sent(
    url: str, sent: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CocoaLLM(base_url=url, **options)
    if "max_tokens" not in options:
        with pytest.raises(ConfigError, match=message):
            CocoaLLM(base_url=url).chat(HELLO, **options)
    with pytest.raises(PromptError, match="empty"):
        CocoaLLM(base_url=url).chat([ChatMessage("")])
    assert sent == []


# Errors, and what needs the model.


def test_context_lift_needs_the_model_in_this_process(url: str) -> None:
    class Asking(CustomQueryEngine):
        llm: Any

        def custom_query(self, query_str: str) -> Any:
            return self.llm.chat([ChatMessage(query_str)]).message.content

    engine = RiskQueryEngine(Asking(llm=CocoaLLM(base_url=url, max_tokens=12)), context_lift=True)
    with pytest.warns(MissingRiskWarning, match="no context lift and no citations"):
        response = engine.query("Hi")
    assert response.metadata is not None
    assert response.metadata["cocoa_risk"]["spans"]


@pytest.mark.parametrize("form", [lambda llm: pickle.loads(pickle.dumps(llm)), copy.deepcopy, copy.copy])
def test_other_forms_ask_the_same_server(url: str, sent: list[Any], form: Any) -> None:
    form(CocoaLLM(base_url=url, timeout=60, max_tokens=2, api_key="k")).chat(HELLO)
    assert sent[0]["cocoa"] == {"max_new_tokens": 2, "report": "message"}


def test_of_two_nodes_with_one_id_the_first_counts() -> None:
    with (answers := Answers(lift=False)):
        add_nodes([*nodes_of("yes", "no"), NodeWithScore(node=TextNode(id_="yes", text="it"))])
    assert [node.text for node in answers.nodes or ()] == [" yes\n", " no\n"]
