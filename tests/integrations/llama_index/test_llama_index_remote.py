"""The LLM of a server gives what the same LLM in this process gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from llama_index.core.base.llms.types import ThinkingBlock, ToolCallBlock
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool

from cocoa_engine import CocoaEngine, ConfigError, PromptError
from cocoa_engine.errors import IncompleteAnswerError, UnsupportedFeatureError
from cocoa_integrations.llama_index import (
    CocoaLLM,
    CocoaRiskEvent,
    CocoaSpanEvent,
    MissingRiskWarning,
    RiskQueryEngine,
    argument_risks,
    collect_risk,
    field_risks,
    get_risk,
)
from cocoa_integrations.llama_index.retrieved import Retrieval, add_nodes
from cocoa_integrations.server import create_app
from tests.helpers.alike import close
from tests.helpers.in_threads import wait_until
from tests.helpers.inside import sequences_running
from tests.helpers.llama_index_helpers import Listener
from tests.helpers.reasoning_models import OPENS, PLAIN, READS_REASONING
from tests.helpers.remote import Recording, listening, same_ids, serving
from tests.helpers.reports import to_dicts, without_run
from tests.helpers.served import speaker
from tests.helpers.structured import PATHS, Order, engine_for_schemas

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


async def test_events_and_collectors_receive_everything(quick: CocoaEngine, url: str, heard: Listener) -> None:
    expected = get_risk(CocoaLLM(engine=quick, max_new_tokens=12, risk_metadata="full").chat(HELLO)).to_dict()
    heard.events.clear()
    here, there = here_and_there(quick, url, risk_metadata="none")
    with collect_risk() as reports:
        for llm in (here, there):
            assert "cocoa_risk" not in llm.chat(HELLO).additional_kwargs
            assert "cocoa_risk" not in [*llm.stream_chat(HELLO)][-1].additional_kwargs
            _ = [one async for one in await llm.astream_chat(HELLO)]
            await llm.achat(HELLO)
    assert len(reports) == 8
    assert all(close(report, expected) for report in without_run(to_dicts(reports)))
    events = heard.of(CocoaRiskEvent)
    assert [event.report for event in events] == to_dicts(reports)
    assert len({event.span_id for event in events}) == 8
    spans = heard.of(CocoaSpanEvent)
    texts = [span["text"] for span in expected["spans"]]
    assert [event.span.text for event in spans] == texts * 8
    assert [event.number for event in spans] == [*range(len(texts))] * 8
    assert [event.generation is None for event in events] == [False] * 4 + [True] * 4
    assert all("risk" in event.model_dump_json() for event in events)


def test_a_stream_that_is_left_ends_at_the_server_and_is_not_reported(
    quick: CocoaEngine, url: str, heard: Listener
) -> None:
    stream = CocoaLLM(base_url=url, max_tokens=1000).stream_chat(HELLO)
    next(iter(stream))
    stream.close()
    wait_until(lambda: sequences_running(quick) == 0)
    assert heard.of(CocoaSpanEvent)
    assert heard.of(CocoaRiskEvent) == []


async def test_completions_continue_the_text(quick: CocoaEngine, url: str) -> None:
    here, there = here_and_there(quick, url, top_logprobs=2)
    text = HELLO[0].content or ""
    answer, completed = here.complete(text), there.complete(text)
    assert (completed.text, get_risk(completed).to_dict()) == (answer.text, get_risk(answer).to_dict())
    assert completed.logprobs is not None
    assert answer.logprobs is not None
    assert len(completed.logprobs) == len(answer.logprobs)
    assert (await there.acomplete(text)).text == answer.text
    for last in ([*there.stream_complete(text)][-1], [one async for one in await there.astream_complete(text)][-1]):
        assert (last.text, get_risk(last).to_dict()) == (answer.text, get_risk(answer).to_dict())


async def test_the_reasoning_is_where_it_is_in_this_process() -> None:
    engine = speaker("the red loaf</think>\n\nyes and no", template=OPENS)
    with serving(engine) as url:
        here, there = here_and_there(engine, url, max_new_tokens=60)
        assert_same(here.chat(HELLO), there.chat(HELLO))
        own, remote = [*here.stream_chat(HELLO)], [*there.stream_chat(HELLO)]
    assert_same(own[-1], remote[-1])
    for responses in (own, remote):
        thoughts = [one.additional_kwargs.get("thinking_delta", "") for one in responses]
        assert "".join(thoughts) == "the red loaf"
    [thinking] = [block for block in remote[-1].message.blocks if isinstance(block, ThinkingBlock)]
    assert thinking.num_tokens
    assert remote[-1].message.content == "yes and no"


def test_a_conversation_is_the_same_prompt() -> None:
    engine = speaker("yes", template=READS_REASONING)
    messages = [
        ChatMessage("Where?"),
        ChatMessage(
            role=MessageRole.CHATBOT,
            blocks=[
                ThinkingBlock(content="red loaf"),
                ToolCallBlock(tool_call_id="1", tool_name="look_up", tool_kwargs={"place": "it"}),
            ],
        ),
        ChatMessage("nine", role=MessageRole.TOOL, additional_kwargs={"tool_call_id": "1"}),
    ]
    seen: list[str] = []
    for name in ("generate", "stream"):
        method = getattr(engine, name)

        def recorded(prompt: Any, method: Any = method, **options: Any) -> Any:
            seen.append(engine.decode(prompt))
            return method(prompt, **options)

        setattr(engine, name, recorded)
    with serving(engine) as url:
        for llm in here_and_there(engine, url, system_prompt="yes and no"):
            llm.chat(messages)
    assert seen[0] == seen[1]
    assert "<think>red loaf</think>" in seen[0]
    assert "yes and no" in seen[0]


@pytest.mark.slow
def test_objects_have_the_risk_of_each_field(quick: CocoaEngine, url: str) -> None:
    here, there = here_and_there(quick, url, max_new_tokens=250)
    about = [ChatMessage("An order of tea and milk.")]
    own, remote = (llm.as_structured_llm(Order).chat(about) for llm in (here, there))
    assert isinstance(remote.raw, Order)
    assert remote.raw == own.raw
    assert {*PATHS} <= {*field_risks(remote)}
    assert close(field_risks(own), field_risks(remote))
    schema = {"type": "json_schema", "json_schema": {"name": "order", "schema": Order.model_json_schema()}}
    assert_same(here.chat(about, response_format=schema), there.chat(about, response_format=schema))


def look_up(place: str) -> str:
    """Look a place up."""
    return place


LOOK_UP = FunctionTool.from_defaults(look_up)


@pytest.mark.slow
async def test_calls_of_tools_are_the_same(quick: CocoaEngine) -> None:
    engine = speaker('<tool_call>\n{"name": "look_up", "arguments": {"place": "the red loaf"}}\n</tool_call>')
    with serving(engine) as url:
        here, there = here_and_there(engine, url, max_new_tokens=120)
        own, remote = (llm.chat_with_tools([LOOK_UP], user_msg="Where?") for llm in (here, there))
        assert_same(own, remote)
        [call] = there.get_tool_calls_from_response(remote)
        assert (call.tool_name, call.tool_kwargs) == ("look_up", {"place": "the red loaf"})
        assert [*argument_risks(remote)] == [call.tool_id]
        last = [*there.stream_chat_with_tools([LOOK_UP], user_msg="Where?")][-1]
        assert there.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs
        stream = await there.astream_chat_with_tools([LOOK_UP], user_msg="Where?")
        assert_same([*here.stream_chat_with_tools([LOOK_UP], user_msg="Where?")][-1], [one async for one in stream][-1])
        for limit in (30, 50):
            here, hasty = here_and_there(engine, url, max_new_tokens=limit)
            cut = hasty.chat_with_tools([LOOK_UP], user_msg="Where?")
            written = "".join(span["text"] for span in get_risk(cut).to_dict()["spans"])
            assert cut.message.content == written.removeprefix("<tool_call>\n")  # shown, not dropped
            assert_same(here.chat_with_tools([LOOK_UP], user_msg="Where?"), cut)
            assert not [block for block in cut.message.blocks if isinstance(block, ToolCallBlock)]
        with pytest.raises(IncompleteAnswerError, match="max_tokens"):
            hasty.chat_with_tools([LOOK_UP], user_msg="Where?", tool_required=True)


# What is sent.


def test_only_what_is_given_is_sent(url: str, sent: list[Any], server: Recording, monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    monkeypatch.setenv("OPENAI_API_BASE", "http://127.0.0.1:9/v1")
    CocoaLLM(base_url=url, timeout=60).chat([ChatMessage("Hi")], max_tokens=1)
    [body] = sent
    assert body == {
        "model": "cocoa",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": False,
        "cocoa": {"max_new_tokens": 1, "report": "message"},
    }
    assert server.headers[0]["authorization"] == "Bearer none"
    CocoaLLM(base_url=url, max_tokens=1, api_key="k", default_headers={"x-team": "a"}).complete("Hi")
    assert (server.headers[1]["authorization"], server.headers[1]["x-team"]) == ("Bearer k", "a")


def test_settings_are_sent_by_name_and_those_of_a_call_take_precedence(url: str, sent: list[Any]) -> None:
    llm = CocoaLLM(base_url=url, model="x", max_tokens=3, alpha=1.0, temperature=0.5, seed=3, stop="z")
    llm.chat(HELLO, alpha=2.0, max_new_tokens=2, method="cocoa", candidates=True, top_p=None)
    [body] = sent
    assert body["cocoa"] == {
        "alpha": 2.0, "method": "cocoa", "temperature": 0.5, "seed": 3, "stop": ["z"], "candidates": True,
        "max_new_tokens": 2, "report": "message",
    }  # fmt: skip
    assert body["model"] == "x"
    answer = llm.chat(HELLO, max_tokens=12, candidates=True, temperature=0.0)
    assert any(len(span.get("rivals", ())) > 1 for span in get_risk(answer).to_dict()["spans"])
    logged = llm.chat(HELLO, top_logprobs=2).logprobs
    assert logged is not None
    assert all(len(one) >= 2 for one in logged)


def nodes_of(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(id_=text, text=f" {text}\n")) for text in texts]


async def test_retrieved_nodes_in_the_messages_are_sent_as_sources(url: str, sent: list[Any], heard: Listener) -> None:
    llm = CocoaLLM(base_url=url, timeout=60, max_tokens=3)
    question = [ChatMessage("the red loaf", role=MessageRole.SYSTEM), ChatMessage("yes and no")]
    with Retrieval():
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


async def test_nodes_that_the_template_of_the_server_changes_are_left_out(heard: Listener) -> None:
    engine = speaker("yes and no", template=PLAIN.replace("message.content", "message.content | upper"))
    app = Recording(create_app(engine))
    with listening(app) as url, Retrieval():
        add_nodes(nodes_of("red loaf"))
        llm = CocoaLLM(base_url=url, timeout=60, max_tokens=6, max_retries=0)
        question = [ChatMessage("the red loaf")]
        assert llm.chat(question).message.content
        assert [*llm.stream_chat(question)]
        assert (await llm.achat(question)).message.content
        assert [one async for one in await llm.astream_chat(question)]
        assert [body["cocoa"].get("source") for body in app.bodies] == [["red loaf"], None] * 4
        assert not any(
            "passage_attention" in one for event in heard.of(CocoaRiskEvent) for one in event.report["spans"]
        )
        app.bodies.clear()
        with pytest.raises(openai.BadRequestError, match="above the server's limit"):
            llm.chat(question, max_candidates=1000)
        assert len(app.bodies) == 1  # not again


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
        ({"alpha": -1.0}, "alpha"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"decore_heads": "heads.json"}, "decore_heads names a file of the server's machine"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "the same option|given twice"),
        ({"risk_metadata": "all"}, "risk_metadata"),
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


def test_a_busy_server_is_asked_again_after_its_time(url: str, sent: list[Any], server: Recording) -> None:
    server.refusals = [(429, {"retry-after-ms": "30"}), (429, {"retry-after-ms": "30"})]
    assert get_risk(CocoaLLM(base_url=url, max_tokens=2).chat(HELLO)).to_dict()
    assert len(sent) == 3
    server.refusals = [(429, {})]
    with pytest.raises(openai.RateLimitError, match="try later"):
        CocoaLLM(base_url=url, max_retries=0).chat(HELLO)


async def test_errors_of_the_server_are_those_of_openai_with_its_message(quick: CocoaEngine, url: str) -> None:
    llm = CocoaLLM(base_url=url, timeout=60)
    with pytest.raises(openai.BadRequestError, match="above the server's limit"):
        llm.chat(HELLO, max_candidates=1000)
    with pytest.raises(openai.BadRequestError, match="context window"):
        await llm.achat([ChatMessage("word " * 5000)])
    with serving(quick, api_keys=("secret",)) as guarded:
        with pytest.raises(openai.AuthenticationError):
            CocoaLLM(base_url=guarded).chat(HELLO)
        assert get_risk(CocoaLLM(base_url=guarded, api_key="secret", max_tokens=2).chat(HELLO)).to_dict()


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "gpu-box:8000"}, "base_url takes the address of a server"),
        ({"base_url": "http://a/v1", "dtype": "bfloat16"}, "dtype would have no effect"),
    ],
)
def test_an_address_is_checked_and_excludes_options_of_loading(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CocoaLLM(**options)
    with pytest.raises(UnsupportedFeatureError, match="needs the engine"):
        _ = CocoaLLM(base_url="http://a/v1").engine
