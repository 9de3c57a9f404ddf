"""Chat completions and completions over HTTP are the engine's answers, whole and streamed, and have their risk."""

import json
from functools import partial
from typing import Any

import jsonschema
import pytest

from cocoa_engine import CocoaConfig, Generation
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers import tool_templates
from tests.helpers.alike import near, wire_report
from tests.helpers.in_threads import happens
from tests.helpers.inside import Gate, gated
from tests.helpers.reasoning_models import HYBRID, PLAIN, READS_REASONING, Speaker, speaker
from tests.helpers.served import ASKED, CHAT, COMPLETIONS, HELLO, Exchange, chat, chunks, joined, post, refusal, text_of
from tests.helpers.tool_templates import MOVE, PARAMETERS

LIMIT = 24
WITHOUT_EFFECT = {"best_of": 1, "suffix": "", "presence_penalty": 0, "logit_bias": {}, "user": "me", "unheard_of": [1]}

CALL = '<tool_call>\n{"name": "move", "arguments": {"up": true, "unit": "km"}}\n</tool_call>'


@pytest.fixture(scope="module")
def expected(endless: Speaker) -> dict[bool, Generation]:
    """The answers of the engine to a chat, and to a text."""
    settings = {"max_new_tokens": LIMIT}
    answers = {True: endless.chat(HELLO, **settings), False: endless.generate(ASKED[COMPLETIONS]["prompt"], **settings)}
    for answer in answers.values():
        assert sum(span.kind == "risk_point" for span in answer.spans) > 1
    return answers


@pytest.mark.parametrize("path", [CHAT, "/chat/completions", COMPLETIONS, "/completions"])
async def test_an_answer_is_the_engines_with_its_report(
    endless: Speaker, expected: dict[bool, Generation], path: str
) -> None:
    chats = "chat" in path
    app, body = create_app(endless), {"max_tokens": LIMIT, "model": "any"}
    body |= ASKED[CHAT] if chats else {**ASKED[COMPLETIONS], **WITHOUT_EFFECT}
    response, generation = await post(app, body, path), expected[chats]
    answer, report = response.json(), wire_report(generation)
    kind, prefix = ("chat.completion", "chatcmpl-") if chats else ("text_completion", "cmpl-")
    assert (answer["object"], answer["model"]) == (kind, "tiny")
    assert answer["id"].startswith(prefix)
    [choice] = answer["choices"]
    assert (choice["index"], text_of(choice), choice["finish_reason"]) == (0, generation.text, "length")
    logprobs = {"content": None, "refusal": None, "cocoa_risk": report}
    assert choice["logprobs"] == (logprobs if chats else None)
    message = {"role": "assistant", "refusal": None, "cocoa_risk": report} if chats else {"cocoa_risk": report}
    assert message.items() <= choice.get("message", choice).items()
    usage = answer["usage"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[name] for name in counts] == [getattr(generation.usage, name) for name in counts]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["completion_tokens_details"]["cocoa_max_risk"] == generation.max_risk
    assert float(response.headers["x-cocoa-max-risk"]) == near(generation.max_risk)
    silent = await post(app, {**body, "max_tokens": 4, "cocoa": {"report": "none"}}, path)
    assert "x-cocoa-max-risk" not in silent.headers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_is_the_answer_span_by_span_and_then_its_report(
    endless: Speaker, expected: dict[bool, Generation], path: str
) -> None:
    chats, body = path == CHAT, {"path": path, "max_tokens": LIMIT}
    report, whole = wire_report(expected[chats]), await chat(endless, **body)
    *events, end = await chunks(endless, **body, stream_options={"include_usage": True})
    assert (end["choices"], end["usage"]) == ([], whole["usage"])
    assert all(event["usage"] is None for event in events)
    kind = "chat.completion.chunk" if chats else "text_completion"
    assert {(event["id"], event["object"]) for event in events} == {(end["id"], kind)}
    *spans, last = [event["choices"][0] for event in events]
    if chats:
        first = spans.pop(0)
        assert (first["delta"], first["logprobs"]) == ({"role": "assistant", "content": ""}, None)
    for choice, span in zip(spans, report["spans"], strict=True):
        assert text_of(choice) == span["text"]
        assert choice.get("delta", choice)["cocoa_spans"] == [span]
        logprobs = {"content": None, "refusal": None, "cocoa_spans": [span]}
        assert choice["logprobs"] == (logprobs if chats else None)
        assert not chats or set(choice["delta"]) - {"content"} == {"cocoa_spans"}
        assert choice["finish_reason"] is None
    assert last["finish_reason"] == "length"
    assert last.get("delta", last)["cocoa_risk"] == report
    logprobs = {"content": None, "refusal": None, "cocoa_risk": report}
    assert (last.get("delta"), last["logprobs"]) == (({"cocoa_risk": report}, logprobs) if chats else (None, None))
    # openai-python's .stream() adds up the spans of a delta by their index
    assert [span["index"] for span in report["spans"]] == list(range(len(spans)))
    for options in ({}, {"stream_options": {"include_usage": False}}):
        assert not any("usage" in event for event in await chunks(endless, **body, **options))


async def test_cached_tokens_are_counted(tiny: Speaker) -> None:
    messages = [{"role": "user", "content": "A prompt that is long enough for the prefix cache. " * 4}]
    body = {"messages": messages, "max_tokens": 2}
    first, second = [await chat(tiny, **body) for _ in range(2)]
    counts = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert counts == [0, second["usage"]["prompt_tokens"] - 1]
    several = await chat(speaker(), n=3, **body)  # all but the first reuse the prompt that the first one read
    assert several["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


SAMPLED, FILTERED = {"seed": 1, "temperature": 2.0}, {"top_k": 3, "repetition_penalty": 3.0}


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
        ({"temperature": None, "cocoa": None, "response_format": {"type": "text"}}, {}),
        ({"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "do_sample": False, "min_tokens": 0}, {}),
        ({**SAMPLED, "cocoa": {"method": "sample"}, **FILTERED}, {**SAMPLED, "method": "sample", **FILTERED}),
        ({**SAMPLED, "cocoa": {"method": "sample", **FILTERED}}, {**SAMPLED, "method": "sample", **FILTERED}),
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


async def test_the_engines_settings_are_the_defaults(tiny: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "config", CocoaConfig(max_new_tokens=5, method="greedy"))
    answer = await chat(tiny)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["message"]["cocoa_risk"]["method"] == "greedy"
    assert (await chat(tiny, max_tokens=3))["usage"]["completion_tokens"] == 3


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


def deltas_of(events: list[dict[str, Any]], key: str = "tool_calls") -> list[Any]:
    """What the chunks of a stream have under a key of their deltas."""
    return [value for event in events for value in event["choices"][0]["delta"].get(key, ())]


async def test_calls_in_a_stream(hermes: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hermes, "says", f"Well. {CALL}\n{CALL}")
    events = await chunks(hermes, tools=[MOVE], max_tokens=200)
    assert joined(events).strip() == "Well."
    deltas = deltas_of(events)
    for index in (0, 1):
        first, *more = [delta for delta in deltas if delta["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", "move")
        assert all(set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in more)
        arguments = "".join(delta["function"]["arguments"] for delta in (first, *more))
        assert json.loads(arguments) == {"up": True, "unit": "km"}
    end, ids = events[-1]["choices"][0], [delta["id"] for delta in deltas if "id" in delta]
    assert end["finish_reason"] == "tool_calls"
    assert all(ids)
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
    hermes: Speaker, monkeypatch: pytest.MonkeyPatch, text: str, reason: str, names: list[str]
) -> None:
    monkeypatch.setattr(hermes, "says", text)
    limit = len(hermes.encode(text, add_special_tokens=False)) if reason == "length" else 200
    body = {"tools": [MOVE], "max_tokens": limit}
    answer = await chat(hermes, **body)
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
    assert "".join(delta["function"]["arguments"] for delta in deltas_of(events)) == ('{"up": tr' if names else "")


BROKEN = '{"up": tr'
ASSISTANT = {"role": "assistant", "content": None, "cocoa_risk": {"spans": []}, "refusal": None}
MOVED = {"id": "abc", "type": "function", "function": {"name": "move", "arguments": {"up": True, "unit": "km"}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Move up."},
    {"role": "assistant", "content": f'{{"name": "move", "arguments": {BROKEN}', "tool_calls": [MOVED]},
    {"role": "tool", "tool_call_id": "abc", "content": "done", "name": "move"},
]
SENT = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Move "}, {"type": "text", "text": "up."}]},
    {
        **ASSISTANT,
        "tool_calls": [
            {**MOVED, "function": {"name": "move", "arguments": '{"up": true, "unit": "km"}'}},
            {"id": "d", "type": "function", "function": {"name": "move", "arguments": BROKEN}},
        ],
    },
    {"role": "tool", "tool_call_id": "abc", "content": "done"},
]
REASONED = [*HELLO, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, *HELLO]
BEGUN = [*HELLO, {"role": "assistant", "content": "I say"}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
MOOD, EFFORT = PLAIN + "{{ mood }}", PLAIN + "{{ reasoning_effort }}"
SENT_TO_ALL = {"enable_thinking": False, "documents": []}


@pytest.mark.parametrize(
    ("template", "body", "messages", "variables"),
    [
        (tool_templates.HERMES, {"messages": SENT}, CONVERSATION, {}),
        (READS_REASONING, {"messages": REASONED}, REASONED, {}),
        (PLAIN, {"messages": BEGUN, "continue_final_message": True}, BEGUN, CONTINUED),
        (MOOD, {"chat_template_kwargs": {"mood": "very glad"}}, HELLO, {"mood": "very glad"}),
        (MOOD, {"chat_template_kwargs": SENT_TO_ALL}, HELLO, {}),  # which clients send to every model
        (EFFORT, {"reasoning_effort": "very high"}, HELLO, {"reasoning_effort": "very high"}),
        (HYBRID, {"reasoning_effort": "none"}, HELLO, {"enable_thinking": False}),
    ],
)
async def test_messages_and_variables_of_the_template_reach_the_prompt(
    template: str, body: dict[str, Any], messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    engine = speaker(template=template)
    expected = engine.chat(messages, max_new_tokens=6, template_kwargs=variables)
    assert not variables or expected.usage.prompt_tokens != engine.chat(messages, max_new_tokens=1).usage.prompt_tokens
    answer = await chat(engine, max_tokens=6, **body)
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
    answer = await chat(tiny, max_tokens=LIMIT, response_format={"type": "json_object"})
    assert answer["choices"][0]["message"]["content"].startswith("{")
    assert (await refusal(speaker(template=HYBRID), reasoning_effort="low"))["param"] == "reasoning_effort"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_logit_bias(tiny: Speaker, path: str) -> None:
    prompt = tiny.encode_chat(HELLO) if path == CHAT else tiny.encode(ASKED[path]["prompt"])
    [token] = tiny.encode("q", add_special_tokens=False)
    greedy = {"path": path, "max_tokens": 3, "cocoa": {"method": "greedy"}}
    body = {**greedy, "logit_bias": {str(token): 100}}
    assert text_of((await chat(tiny, **body))["choices"][0]) == joined(await chunks(tiny, **body)) == "qqq"
    plain = tiny.generate(prompt, max_new_tokens=3, method="greedy")
    [banned] = (await chat(tiny, **greedy, logit_bias={str(plain.token_ids[0]): -100}))["choices"]
    assert text_of(banned) != plain.text


async def test_the_names_of_the_model(tiny: Speaker) -> None:
    named = ServerSettings(served_names=("small", "gpt-x"))
    assert (await chat(tiny, named, max_tokens=1))["model"] == "small"
    assert (await chat(tiny, named, max_tokens=1, model="gpt-x"))["model"] == "gpt-x"
    response = await post(create_app(tiny, named), {"messages": HELLO, "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


REPORTS: list[tuple[str, dict[str, Any] | None, bool, str]] = [
    (CHAT, {}, True, "risk"),
    (CHAT, {"logprobs": None}, True, "risk"),
    (CHAT, {"logprobs": False}, True, "null"),
    (CHAT, {"logprobs": True}, True, "both"),
    (CHAT, {"cocoa": {"report": "message"}}, True, "null"),
    (CHAT, {"cocoa": {"report": "message"}, "logprobs": True}, True, "tokens"),
    (CHAT, {"cocoa": {"report": "logprobs"}}, False, "risk"),
    (CHAT, {"cocoa": {"report": "logprobs"}, "logprobs": False}, False, "null"),
    (CHAT, {"cocoa": {"report": "none"}}, False, "null"),
    (CHAT, {"cocoa": {"report": "none"}, "logprobs": True}, False, "tokens"),
    (CHAT, None, True, "null"),  # the server leaves it out of the log-probabilities
    (COMPLETIONS, {"logprobs": 0}, True, "both"),
    (COMPLETIONS, {"logprobs": 0, "cocoa": {"report": "message"}}, True, "tokens"),
    (COMPLETIONS, {"logprobs": 0, "cocoa": {"report": "logprobs"}}, False, "both"),
    (COMPLETIONS, {"logprobs": 0, "cocoa": {"report": "none"}}, False, "tokens"),
]


@pytest.mark.parametrize(("path", "asked", "in_message", "logprobs"), REPORTS)
async def test_where_the_risk_is(
    endless: Speaker, path: str, asked: dict[str, Any] | None, in_message: bool, logprobs: str
) -> None:
    def check(choice: dict[str, Any], key: str, content: bool) -> None:
        listed = choice["logprobs"]
        assert (key in choice.get("message", choice.get("delta", choice))) == in_message
        if logprobs == "null":
            assert listed is None
            return
        assert (key in listed) == (logprobs in ("risk", "both"))
        assert bool(listed.get("content", listed.get("tokens"))) == (content and logprobs in ("tokens", "both"))

    settings, body = ServerSettings(risk_in_logprobs=asked is not None), {"max_tokens": LIMIT, **(asked or {})}
    answer = await chat(endless, settings, path, **body)
    check(answer["choices"][0], "cocoa_risk", True)
    shown = in_message or logprobs in ("risk", "both")
    assert ("cocoa_max_risk" in answer["usage"]["completion_tokens_details"]) == shown
    events = [event["choices"][0] for event in await chunks(endless, settings, path, **body)]
    *spans, last = events[1:] if path == CHAT else events
    for choice in spans:
        check(choice, "cocoa_spans", True)
    check(last, "cocoa_risk", False)


async def test_candidates_on_demand(endless: Speaker, expected: dict[bool, Generation]) -> None:
    answer = await chat(endless, max_tokens=LIMIT, cocoa={"candidates": True})
    entries = answer["choices"][0]["message"]["cocoa_risk"]["spans"]
    streamed = deltas_of(await chunks(endless, max_tokens=LIMIT, cocoa={"candidates": True}), "cocoa_spans")
    for listed in (entries, streamed):
        for entry, span in zip(listed, expected[True].spans, strict=True):
            assert entry["candidates"] == len(span.candidates)
            assert [rival["text"] for rival in entry["rivals"]] == [one.text for one in span.candidates]
            for rival, candidate in zip(entry["rivals"], span.candidates, strict=True):
                assert set(rival) == {"text", "log_prob", "con_mlds", "f_mlds", "score", "is_greedy"}
                assert rival["log_prob"] == candidate.log_prob
                assert rival["score"] == candidate.score
    assert "rivals" not in (await chat(endless, max_tokens=4))["choices"][0]["message"]["cocoa_risk"]["spans"][0]


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


async def test_comments_while_the_prompt_is_read(endless: Speaker, gate: Gate) -> None:
    app = create_app(endless, ServerSettings(progress_interval=0.02))
    exchange = Exchange(app, {"messages": HELLO, "max_tokens": 5, "stream": True})
    await happens(lambda: exchange.body.count(b"\n\n") >= 2)
    assert exchange.status == 200
    assert set(exchange.events) == {f": reading the prompt: 0 of {len(endless.encode_chat(HELLO))} tokens"}
    gate.open()
    await exchange.ended()
    data = [event for event in exchange.events if not event.startswith(":")]
    assert '"role":"assistant"' in data[0]
    assert data[-1] == "data: [DONE]"


TEXT = ASKED[COMPLETIONS]["prompt"]
completion = partial(chat, path=COMPLETIONS)
LISTS = ("tokens", "token_logprobs", "top_logprobs")
parts = partial(chunks, path=COMPLETIONS)


@pytest.mark.slow
async def test_many_prompts_and_answers(endless: Speaker) -> None:
    prompts = ["One", "Two or three"]
    body = {"n": 2, "seed": 3, "cocoa": {"method": "sample"}, "temperature": 2.0}
    many = await completion(endless, prompt=prompts, **body)
    alone = [await completion(endless, prompt=one, **body) for one in prompts]
    expected = [choice["text"] for one in alone for choice in one["choices"]]
    assert [choice["text"] for choice in many["choices"]] == expected
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert len(set(expected)) > 2
    assert many["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    by_ids = await completion(endless, prompt=[endless.encode(one) for one in prompts], **body)
    assert [choice["text"] for choice in by_ids["choices"]] == expected
    texts = [""] * 4
    for event in await parts(endless, prompt=prompts, echo=True, **body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    echoed = await completion(endless, prompt=prompts, echo=True, **body)
    assert texts == [choice["text"] for choice in echoed["choices"]]
    assert texts == [prompts[number // 2] + text for number, text in enumerate(expected)]


async def test_logprobs_cover_the_text_and_list_an_end_token_by_its_name(endless: Speaker) -> None:
    """The evaluation harness counts on one entry for each decoded token."""
    text, ending = (await completion(endless))["choices"][0]["text"], speaker("Yes.")
    special, eos = set(ending.tokenizer.all_special_tokens), ending.tokenizer.eos_token
    for engine, body, expected in (
        (endless, {"logprobs": 3}, text),
        (endless, {"logprobs": 0, "stop": text[4:6]}, text[: text.index(text[4:6])]),
        (ending, {"logprobs": 0}, "Yes."),
    ):
        answer = await completion(engine, **body)
        [choice] = answer["choices"]
        listed = choice["logprobs"]
        counts = {len(listed[key]) for key in (*LISTS, "text_offset")}
        assert len(counts) == 1
        assert (choice["text"], choice["finish_reason"]) == (expected, "length" if expected == text else "stop")
        assert "".join(token for token in listed["tokens"] if token not in special) == expected
        for token, offset in zip(listed["tokens"], listed["text_offset"], strict=True):
            assert token in special or expected[offset : offset + len(token)] == token
        assert listed["cocoa_risk"] == choice["cocoa_risk"]
        if body == {"logprobs": 3}:
            for token, log_prob, top in zip(*(listed[key] for key in LISTS), strict=True):
                assert top[token] >= log_prob
                assert 1 <= len(top) <= 4
    assert (counts, listed["tokens"][-1]) == ({answer["usage"]["completion_tokens"]}, eos)


async def test_streamed_logprobs_are_those_of_the_whole_answer(endless: Speaker) -> None:
    [whole] = (await completion(endless, logprobs=2, echo=True))["choices"]
    streamed = [event["choices"][0]["logprobs"] for event in await parts(endless, logprobs=2, echo=True)]
    for key in ("tokens", "token_logprobs", "text_offset"):
        first, *values = [value for listed in streamed for value in listed[key]]
        assert first == whole["logprobs"][key][0]
        assert values == (near if key == "token_logprobs" else list)(whole["logprobs"][key][1:])


@pytest.mark.parametrize("given_ids", [False, True])
async def test_an_echoed_prompt_has_log_probabilities(endless: Speaker, given_ids: bool) -> None:
    ids = [*endless.encode(TEXT), 2, 40]  # 2 is a special token
    prompt: Any = ids if given_ids else TEXT
    ids = ids if given_ids else endless.encode(TEXT)
    answer = await completion(endless, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
    [choice] = answer["choices"]
    listed = choice["logprobs"]
    assert len(listed["tokens"]) == len(ids) + 1  # one was decoded, which may be an end token
    expected = endless.score(ids[:1], ids[1:], method="greedy", top_logprobs=1).spans[0]
    assert listed["token_logprobs"][0] is None
    assert listed["top_logprobs"][0] is None
    assert listed["token_logprobs"][1 : len(ids)] == near(expected.token_log_probs)
    assert expected.top_log_probs is not None
    for place, ((_, best),) in enumerate(expected.top_log_probs, 1):
        assert max(listed["top_logprobs"][place].values()) == near(best)
    assert choice["text"].startswith(endless.decode(ids))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 1)


async def test_a_greedy_continuation_is_seen_as_greedy(endless: Speaker) -> None:
    """What the evaluation harness does: the log-probability of each token equals the highest one."""
    prompt = endless.encode("Ab")
    text = endless.generate(prompt, method="greedy", max_new_tokens=5).token_ids
    [choice] = (await completion(endless, prompt=[*prompt, *text], echo=True, logprobs=1, max_tokens=1))["choices"]
    _, own, best = (choice["logprobs"][key][len(prompt) : -1] for key in LISTS)
    assert own == [max(top.values()) for top in best]
    assert len(own) == len(text)


async def test_an_echo_alone(endless: Speaker) -> None:
    body = {"echo": True, "max_tokens": 0, "logprobs": 0}
    with gated(endless) as gate:
        gate.open()
        before = gate.reached
        answer, [event] = await completion(endless, **body), await parts(endless, **body)
        assert gate.reached == before  # nothing was decoded
    assert answer["usage"]["completion_tokens"] == 0
    for [choice] in (answer["choices"], event["choices"]):
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
        assert len(choice["logprobs"]["tokens"]) == len(endless.encode(TEXT))
        assert "cocoa_risk" not in choice
    [choice] = (await completion(endless, **{**body, "prompt": [40], "logprobs": 1}))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]
