"""Where answers over HTTP have their risk: the schema that clients, the page and the remote adapters read."""

from __future__ import annotations

from typing import Any

import pytest

from cocoa_engine import Generation
from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.alike import near
from tests.helpers.reports import wire_report
from tests.helpers.served import HELLO, Exchange, Speaker, chat, chunks, gated, happens, post, speaker

LIMIT = 24


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return speaker()


@pytest.fixture(scope="module")
def expected(tiny: Speaker) -> Generation:
    generation = tiny.chat(HELLO, max_new_tokens=LIMIT)
    assert sum(span.kind == "risk_point" for span in generation.spans) > 1
    return generation


async def test_the_report_is_the_adapters_in_both_places(tiny: Speaker, expected: Generation) -> None:
    [choice] = (await chat(tiny, max_tokens=LIMIT))["choices"]
    assert choice["message"]["cocoa_risk"] == wire_report(expected)
    assert choice["message"]["cocoa_risk"]["verdict"] == expected.verdict
    assert choice["logprobs"] == {"content": None, "refusal": None, "cocoa_risk": wire_report(expected)}


async def test_each_chunk_has_its_span_and_the_last_one_the_report(tiny: Speaker, expected: Generation) -> None:
    report = wire_report(expected)
    first, *spans, last = [event["choices"][0] for event in await chunks(tiny, max_tokens=LIMIT)]
    assert first["logprobs"] is None
    for choice, span in zip(spans, report["spans"], strict=True):
        text = {"content": span["text"]} if span["text"] else {}
        assert choice["delta"] == {**text, "cocoa_spans": [span]}
        assert choice["logprobs"] == {"content": None, "refusal": None, "cocoa_spans": [span]}
    assert last["delta"] == {"cocoa_risk": report}
    assert last["logprobs"] == {"content": None, "refusal": None, "cocoa_risk": report}
    # openai-python's .stream() adds up the spans of a delta by their index
    assert [span["index"] for choice in spans for span in choice["delta"]["cocoa_spans"]] == list(range(len(spans)))


@pytest.mark.parametrize(
    ("asked", "in_message", "logprobs"),
    [
        ({}, True, "risk"),
        ({"logprobs": None}, True, "risk"),
        ({"logprobs": False}, True, "null"),
        ({"logprobs": True}, True, "both"),
        ({"cocoa": {"report": "message"}}, True, "null"),
        ({"cocoa": {"report": "message"}, "logprobs": True}, True, "tokens"),
        ({"cocoa": {"report": "logprobs"}}, False, "risk"),
        ({"cocoa": {"report": "logprobs"}, "logprobs": False}, False, "null"),
        ({"cocoa": {"report": "none"}}, False, "null"),
        ({"cocoa": {"report": "none"}, "logprobs": True}, False, "tokens"),
    ],
)
async def test_where_the_risk_is(tiny: Speaker, asked: dict[str, Any], in_message: bool, logprobs: str) -> None:
    def check(message: dict[str, Any], found: Any, key: str, content: bool) -> None:
        assert (key in message) == in_message
        if logprobs == "null":
            assert found is None
            return
        assert (key in found) == (logprobs in ("risk", "both"))
        assert bool(found["content"]) == (content and logprobs in ("tokens", "both"))

    answer = await chat(tiny, max_tokens=LIMIT, **asked)
    [choice] = answer["choices"]
    check(choice["message"], choice["logprobs"], "cocoa_risk", True)
    known = in_message or logprobs in ("risk", "both")
    assert ("cocoa_max_risk" in answer["usage"]["completion_tokens_details"]) == known
    _, *spans, last = [event["choices"][0] for event in await chunks(tiny, max_tokens=LIMIT, **asked)]
    for choice in spans:
        check(choice["delta"], choice["logprobs"], "cocoa_spans", True)
    check(last["delta"], last["logprobs"], "cocoa_risk", False)


async def test_a_server_can_leave_risk_out_of_logprobs(tiny: Speaker) -> None:
    settings = ServerSettings(risk_in_logprobs=False)
    [choice] = (await chat(tiny, settings, max_tokens=LIMIT))["choices"]
    assert choice["logprobs"] is None
    assert "cocoa_risk" in choice["message"]


async def test_candidates_on_demand(tiny: Speaker, expected: Generation) -> None:
    answer = await chat(tiny, max_tokens=LIMIT, cocoa={"candidates": True})
    entries = answer["choices"][0]["message"]["cocoa_risk"]["spans"]
    events = await chunks(tiny, max_tokens=LIMIT, cocoa={"candidates": True})
    streamed = [span for event in events for span in event["choices"][0]["delta"].get("cocoa_spans", ())]
    for found in (entries, streamed):
        for entry, span in zip(found, expected.spans, strict=True):
            assert entry["candidates"] == len(span.candidates)
            assert [rival["text"] for rival in entry["rivals"]] == [one.text for one in span.candidates]
            for rival, candidate in zip(entry["rivals"], span.candidates, strict=True):
                assert set(rival) == {"text", "log_prob", "con_mlds", "f_mlds", "score", "is_greedy"}
                assert rival["log_prob"] == candidate.log_prob
                assert rival["score"] == candidate.score
    assert "rivals" not in (await chat(tiny, max_tokens=4))["choices"][0]["message"]["cocoa_risk"]["spans"][0]


@pytest.mark.parametrize(
    ("body", "reason", "wire"),
    [
        ({"max_tokens": 5}, "length", "length"),
        ({"max_tokens": 400, "stop": "p"}, "stop", "stop"),
        ({"max_tokens": 400}, "eos", "stop"),
        ({"max_tokens": 400, "cocoa": {"max_risk": 0.1}}, "risk", "content_filter"),
    ],
)
async def test_finish_reasons(body: dict[str, Any], reason: str, wire: str) -> None:
    engine = speaker("A short sentence that is spoken.")
    [choice] = (await chat(engine, **body))["choices"]
    assert (choice["finish_reason"], choice["message"]["cocoa_risk"]["finish_reason"]) == (wire, reason)
    last = (await chunks(engine, **body))[-1]["choices"][0]
    assert (last["finish_reason"], last["delta"]["cocoa_risk"]["finish_reason"]) == (wire, reason)
    assert choice["message"]["cocoa_risk"]["spans"][-1]["reaches_max_risk"] == (reason == "risk")


async def test_the_highest_risk_is_a_header_and_in_the_usage(tiny: Speaker, expected: Generation) -> None:
    response = await post(create_app(tiny), {"messages": HELLO, "max_tokens": LIMIT})
    assert float(response.headers["x-cocoa-max-risk"]) == near(expected.max_risk)
    details = response.json()["usage"]["completion_tokens_details"]
    assert details["cocoa_max_risk"] == expected.max_risk
    events = await chunks(tiny, max_tokens=LIMIT, stream_options={"include_usage": True})
    assert events[-1]["usage"]["completion_tokens_details"]["cocoa_max_risk"] == expected.max_risk
    silent = await post(create_app(tiny), {"messages": HELLO, "max_tokens": 4, "cocoa": {"report": "none"}})
    assert "x-cocoa-max-risk" not in silent.headers


async def test_comments_while_the_prompt_is_read() -> None:
    engine = speaker()
    engine.chat(HELLO, max_new_tokens=1)  # the trials of the backend are over
    app = create_app(engine, ServerSettings(progress_interval=0.02))
    with gated(engine) as gate:
        exchange = Exchange(app, {"messages": HELLO, "max_tokens": 5, "stream": True})
        await happens(lambda: exchange.body.count(b"\n\n") >= 2)
        assert exchange.status == 200
        tokens = len(engine.encode_chat(HELLO))
        assert set(exchange.events) == {f": reading the prompt: 0 of {tokens} tokens"}
        gate.open()
        await exchange.ended()
    data = [event for event in exchange.events if not event.startswith(":")]
    assert '"role":"assistant"' in data[0]
    assert data[-1] == "data: [DONE]"
