"""Chat completions over HTTP are the engine's answers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from cocoa_engine import CocoaConfig
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations.server import ServerSettings
from tests.helpers import tool_templates
from tests.helpers.alike import near
from tests.helpers.reasoning_models import HYBRID, OPENS, PLAIN, READS_REASONING
from tests.helpers.served import HELLO, Speaker, chat, chunks, joined, post, refusal, speaker
from tests.helpers.served import create_app as app_of

LIMIT = 24

PARAMETERS = {
    "type": "object",
    "properties": {"up": {"type": "boolean"}, "unit": {"enum": ["m", "km"]}},
    "required": ["up", "unit"],
}
MOVE = {"type": "function", "function": {"name": "move", "description": "Move.", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "move", "arguments": {"up": true, "unit": "km"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return speaker()


@pytest.fixture(scope="module")
def hermes() -> Speaker:
    return speaker(template=tool_templates.HERMES)


def saying(engine: Speaker, text: str | None) -> Speaker:
    """The engine; it says a text until the next call of this function."""
    engine.says = text
    return engine


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
async def test_an_answer_is_the_engines(tiny: Speaker, path: str) -> None:
    expected = tiny.chat(HELLO, max_new_tokens=LIMIT)
    response = await post(app_of(tiny), {"messages": HELLO, "max_tokens": LIMIT, "model": "any"}, path)
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == expected.text
    assert choice["message"]["refusal"] is None
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert answer["usage"]["completion_tokens"] == expected.usage.completion_tokens
    assert answer["usage"]["total_tokens"] == expected.usage.total_tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_stream_is_the_answer_span_by_span(tiny: Speaker) -> None:
    expected = tiny.chat(HELLO, max_new_tokens=LIMIT)
    assert len(expected.spans) > 2
    first, *spans, last = await chunks(tiny, max_tokens=LIMIT)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"].get("content", "") for event in spans] == [one.text for one in expected.spans]
    assert all(event["choices"][0]["finish_reason"] is None for event in (first, *spans))
    assert last["choices"][0]["finish_reason"] is not None
    assert {event["id"] for event in (first, *spans, last)} == {first["id"]}
    assert {event["object"] for event in (first, *spans, last)} == {"chat.completion.chunk"}
    assert not any("usage" in event for event in (first, *spans, last))


async def test_cached_tokens_are_counted(tiny: Speaker) -> None:
    messages = [{"role": "user", "content": "A prompt that is long enough for the prefix cache. " * 4}]
    body = {"messages": messages, "max_tokens": 2}
    first, second = [await chat(tiny, **body) for _ in range(2)]
    counts = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert counts == [0, second["usage"]["prompt_tokens"] - 1]
    several = await chat(speaker(), n=3, **body)  # all but the first reuse the prompt that the first one read
    assert several["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_usage_of_a_stream(tiny: Speaker) -> None:
    whole = await chat(tiny, max_tokens=LIMIT)
    *others, last = await chunks(tiny, max_tokens=LIMIT, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in others)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    without = await chunks(tiny, max_tokens=LIMIT, stream_options={"include_usage": False})
    assert not any("usage" in event for event in without)


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        ({"max_completion_tokens": 7}, {"max_new_tokens": 7}),
        ({"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "seed": 5}),
        ({"temperature": 0.9, "seed": -3}, {"temperature": 0.9, "seed": 2**63 - 3}),
        ({"stop": "e"}, {"stop": ("e",)}),
        ({"stop": ["e", "a"]}, {"stop": ("e", "a")}),
        ({"top_p": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1}, {}),
        ({"user": "me", "metadata": {"a": "b"}, "store": False, "modalities": ["text"], "unknown": [1]}, {}),
        ({"cocoa": {"alpha": 0.5, "gamma": 0.1}}, {"alpha": 0.5, "gamma": 0.1}),
        ({"cocoa": {"method": "greedy", "max_new_tokens": 5}}, {"method": "greedy", "max_new_tokens": 5}),
        (
            {"temperature": 1.2, "seed": 1, "top_p": 0.7, "cocoa": {"method": "sample", "top_k": 9}},
            {"method": "sample", "temperature": 1.2, "seed": 1, "top_p": 0.7, "top_k": 9},
        ),
        ({"cocoa": {"max_risk": 0.5}}, {"max_risk": 0.5}),
        ({"cocoa": {"metric": "con_mlds", "risk": "con_mlds"}}, {"metric": "con_mlds", "risk": "con_mlds"}),
        ({"temperature": None, "cocoa": None}, {}),
    ],
)
async def test_parameters_are_settings(tiny: Speaker, body: dict[str, Any], settings: dict[str, Any]) -> None:
    limit = {} if {"max_new_tokens"} & settings.keys() else {"max_tokens": LIMIT}
    expected = tiny.chat(HELLO, **{"max_new_tokens": LIMIT, **settings})
    answer = await chat(tiny, **body, **limit)
    message = answer["choices"][0]["message"]
    assert message["content"] == expected.text
    risks = [span["risk"] for span in message["cocoa_risk"]["spans"]]
    assert risks == near([span.risk for span in expected.spans])
    assert joined(await chunks(tiny, **body, **limit)) == expected.text


async def test_the_engines_settings_are_the_defaults(tiny: Speaker) -> None:
    before = tiny.config
    try:
        tiny.config = CocoaConfig(max_new_tokens=5, method="greedy")
        answer = await chat(tiny)
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["message"]["cocoa_risk"]["method"] == "greedy"
        assert (await chat(tiny, max_tokens=3))["usage"]["completion_tokens"] == 3
    finally:
        tiny.config = before


async def test_several_answers_have_seeds_of_their_own(tiny: Speaker) -> None:
    body = {"max_tokens": LIMIT, "temperature": 1.0, "seed": 7, "cocoa": {"method": "sample"}}
    settings = {"max_new_tokens": LIMIT, "temperature": 1.0, "method": "sample"}
    expected = [tiny.chat(HELLO, **settings, seed=7 + number) for number in range(3)]
    assert len({one.text for one in expected}) == 3
    answer = await chat(tiny, n=3, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [one.text for one in expected]
    assert answer["usage"]["prompt_tokens"] == expected[0].usage.prompt_tokens
    assert answer["usage"]["completion_tokens"] == sum(one.usage.completion_tokens for one in expected)
    events = await chunks(tiny, n=3, **body)
    assert [joined(events, number) for number in range(3)] == [one.text for one in expected]
    assert all(len(event["choices"]) == 1 for event in events)  # some clients read the first choice of a chunk only
    ends = [one["choices"][0] for one in events if one["choices"][0]["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1, 2]


async def test_logprobs_are_the_engines(tiny: Speaker) -> None:
    expected = TokenLogprobs(tiny).of_answer(tiny.chat(HELLO, max_new_tokens=LIMIT, top_logprobs=3).spans)
    asked = {"max_tokens": LIMIT, "logprobs": True, "top_logprobs": 3}
    answer = await chat(tiny, **asked)
    assert answer["choices"][0]["logprobs"]["content"] == expected
    assert all(len(entry["top_logprobs"]) == 3 for entry in expected)
    events = await chunks(tiny, **asked)
    parts = [(event["choices"][0]["logprobs"] or {}).get("content") or [] for event in events]
    assert [entry for part in parts for entry in part] == expected
    plain = await chat(tiny, max_tokens=LIMIT, logprobs=True)
    assert all(entry["top_logprobs"] == [] for entry in plain["choices"][0]["logprobs"]["content"])


async def test_required_calls_are_made(hermes: Speaker) -> None:
    body = {"tools": [MOVE], "tool_choice": "required", "max_tokens": 200}
    answer = await chat(saying(hermes, None), **body)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "move"
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
    [risk] = choice["message"]["cocoa_risk"]["tool_calls"]
    assert (risk["id"], risk["name"], risk["error"]) == (call["id"], "move", None)
    assert set(risk["arguments"]) == {"up", "unit"}
    assert all(0 <= value["risk"] <= 1 for value in risk["arguments"].values())


async def test_calls_in_a_stream(hermes: Speaker) -> None:
    events = await chunks(saying(hermes, f"Well. {CALL}\n{CALL}"), tools=[MOVE], max_tokens=200)
    assert joined(events).strip() == "Well."
    deltas = [delta for event in events for delta in event["choices"][0]["delta"].get("tool_calls", ())]
    for index in (0, 1):
        first, *more = [delta for delta in deltas if delta["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", "move")
        assert first["id"]
        assert all(set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in more)
        arguments = "".join(delta["function"]["arguments"] for delta in (first, *more))
        assert json.loads(arguments) == {"up": True, "unit": "km"}
    end = events[-1]["choices"][0]
    assert end["finish_reason"] == "tool_calls"
    ids = [delta["id"] for delta in deltas if "id" in delta]
    assert [call["id"] for call in end["delta"]["cocoa_risk"]["tool_calls"]] == ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason", "names"),
    [
        ('<tool_call>\n{"name": "move", "arguments": {"up": tr', "length", ["move"]),
        ('<tool_call>\n{"arguments": {"up": true}}\n</tool_call>', "stop", []),
    ],
)
async def test_calls_that_cannot_be_made_are_not_lost(
    hermes: Speaker, text: str, reason: str, names: list[str]
) -> None:
    limit = len(hermes.encode(text, add_special_tokens=False)) if reason == "length" else 200
    body = {"tools": [MOVE], "max_tokens": limit}
    answer = await chat(saying(hermes, text), **body)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == reason
    assert [call["function"]["name"] for call in choice["message"].get("tool_calls", [])] == names
    [risk] = choice["message"]["cocoa_risk"]["tool_calls"]
    assert risk["error"]
    if names:
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"up": tr'
    else:
        assert '"up": true' in choice["message"]["content"]
    events = await chunks(hermes, **body)
    assert joined(events) == (choice["message"]["content"] or "")
    assert events[-1]["choices"][0]["finish_reason"] == reason
    deltas = [delta for event in events for delta in event["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == ('{"up": tr' if names else "")


async def test_a_conversation_with_calls_reaches_the_prompt(hermes: Speaker) -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "move", "arguments": '{"up": true, "unit": "km"}'}}
    broken = {"id": "d", "type": "function", "function": {"name": "move", "arguments": '{"up": tr'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Move "}, {"type": "text", "text": "up."}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call, broken],
            "cocoa_risk": {"spans": []},
            "refusal": None,
        },
        {"role": "tool", "tool_call_id": "abc", "content": "done"},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Move up."},
        {
            "role": "assistant",
            "content": '{"name": "move", "arguments": {"up": tr',
            "tool_calls": [
                {"type": "function", "id": "abc", "function": {"name": "move", "arguments": {"up": True, "unit": "km"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "abc", "content": "done", "name": "move"},
    ]
    expected = saying(hermes, None).chat(plain, max_new_tokens=8)
    answer = await chat(hermes, messages=messages, max_tokens=8)
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "json_schema", "json_schema": {"name": "move", "strict": True, "schema": PARAMETERS}},
        {"type": "json_object", "schema": PARAMETERS},
    ],
)
async def test_answers_keep_to_a_schema(tiny: Speaker, asked: dict[str, Any]) -> None:
    answer = await chat(tiny, response_format=asked, max_tokens=100)
    message = answer["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), PARAMETERS)
    assert set(message["cocoa_risk"]["fields"]) == {"$.up", "$.unit"}
    events = await chunks(tiny, response_format=asked, max_tokens=100)
    assert joined(events) == message["content"]
    fields = events[-1]["choices"][0]["delta"]["cocoa_risk"]["fields"]
    assert {path: value["risk"] for path, value in fields.items()} == near(
        {path: value["risk"] for path, value in message["cocoa_risk"]["fields"].items()}
    )


async def test_other_formats(tiny: Speaker) -> None:
    plain = await chat(tiny, max_tokens=LIMIT)
    text = await chat(tiny, max_tokens=LIMIT, response_format={"type": "text"})
    assert text["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    some = await chat(tiny, max_tokens=LIMIT, response_format={"type": "json_object"})
    assert some["choices"][0]["message"]["content"].startswith("{")
    assert (await refusal(tiny, response_format={"type": "yaml"}))["param"] == "response_format"


@pytest.mark.parametrize("template", [OPENS, PLAIN], ids=["inside", "opened"])
async def test_reasoning_is_a_field_of_its_own(template: str) -> None:
    opening = "" if template == OPENS else "<think>"
    engine = speaker(f"{opening}First, hm.</think>\n\nThe answer.", template=template)
    answer = await chat(engine, max_tokens=200)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("First, hm.", "The answer.")
    details = answer["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["completion_tokens"]
    parts = [span["part"] for span in message["cocoa_risk"]["spans"]]
    assert parts == sorted(parts, reverse=True)
    assert set(parts) == {"reasoning", "answer"}
    events = await chunks(engine, max_tokens=200, stream_options={"include_usage": True})
    assert joined(events, key="reasoning_content") == "First, hm."
    assert joined(events[:-1]) == "The answer."
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == details["reasoning_tokens"]


async def test_reasoning_of_earlier_answers_reaches_templates_that_read_it() -> None:
    engine = speaker(template=READS_REASONING)
    earlier = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    expected = engine.chat([*HELLO, earlier, *HELLO], max_new_tokens=4)
    answer = await chat(engine, messages=[*HELLO, earlier, *HELLO], max_tokens=4)
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


async def test_the_last_message_can_be_continued(tiny: Speaker) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I say"}]
    kwargs = {"continue_final_message": True, "add_generation_prompt": False}
    expected = tiny.chat(messages, max_new_tokens=6, template_kwargs=kwargs)
    answer = await chat(tiny, messages=messages, max_tokens=6, continue_final_message=True)
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


async def test_variables_of_the_chat_template() -> None:
    engine = speaker(template=PLAIN + "{{ mood }}")
    plain, glad = [
        (await chat(engine, max_tokens=2, chat_template_kwargs=kwargs))["usage"]["prompt_tokens"]
        for kwargs in (None, {"mood": "very glad"})
    ]
    assert glad > plain
    off = {"enable_thinking": False, "documents": []}  # which clients send to every model
    assert (await chat(engine, max_tokens=2, chat_template_kwargs=off))["usage"]["prompt_tokens"] == plain
    for name in ("add_generation_prompt", "chat_template", "conversation", "messages", "tools", "truncation", "self"):
        error = await refusal(engine, chat_template_kwargs={name: "{{ 1 }}"})
        assert error["param"] == "chat_template_kwargs"
        assert name in error["message"]


async def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    engine = speaker(template=PLAIN + "{{ reasoning_effort }}")
    counts = [
        (await chat(engine, max_tokens=1, reasoning_effort=effort))["usage"]["prompt_tokens"]
        for effort in ("low", "very very high")
    ]
    assert counts[1] > counts[0]
    hybrid = speaker(template=HYBRID)
    without = hybrid.chat(HELLO, max_new_tokens=1, template_kwargs={"enable_thinking": False}).usage.prompt_tokens
    assert without > hybrid.chat(HELLO, max_new_tokens=1).usage.prompt_tokens
    answer = await chat(hybrid, max_tokens=1, reasoning_effort="none")
    assert answer["usage"]["prompt_tokens"] == without
    assert (await refusal(hybrid, max_tokens=1, reasoning_effort="low"))["param"] == "reasoning_effort"


async def test_logit_bias(tiny: Speaker) -> None:
    [token] = tiny.encode("q", add_special_tokens=False)
    body = {"max_tokens": 3, "logit_bias": {str(token): 100}, "cocoa": {"method": "greedy"}}
    assert (await chat(tiny, **body))["choices"][0]["message"]["content"] == "qqq"
    assert joined(await chunks(tiny, **body)) == "qqq"
    plain = tiny.chat(HELLO, max_new_tokens=3, method="greedy")
    banned = await chat(tiny, **{**body, "logit_bias": {str(plain.token_ids[0]): -100}})
    assert banned["choices"][0]["message"]["content"] != plain.text


async def test_the_names_of_the_model(tiny: Speaker) -> None:
    named = ServerSettings(served_names=("small", "gpt-x"))
    assert (await chat(tiny, named, max_tokens=1))["model"] == "small"
    assert (await chat(tiny, named, max_tokens=1, model="gpt-x"))["model"] == "gpt-x"
    response = await post(app_of(tiny, named), {"messages": HELLO, "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_parameters_of_other_servers_are_settings_or_neutral(tiny: Speaker) -> None:
    plain = await chat(tiny, max_tokens=8)
    neutral = {"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "do_sample": False, "min_tokens": 0}
    assert (await chat(tiny, max_tokens=8, **neutral))["choices"] == plain["choices"]
    sampled = {"max_tokens": 8, "seed": 1, "temperature": 2.0}
    own = await chat(tiny, **sampled, cocoa={"method": "sample", "top_k": 3, "repetition_penalty": 3.0})
    same = await chat(tiny, **sampled, cocoa={"method": "sample"}, top_k=3, repetition_penalty=3.0)
    other = await chat(tiny, **sampled, cocoa={"method": "sample"})
    assert same["choices"] == own["choices"] != other["choices"]
