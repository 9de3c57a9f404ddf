"""Answers of a server with missing fields and values of wrong types: an answer, or one error that names the field."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from cocoa_engine.errors import DataError
from cocoa_integrations.chat_service import ChatCall, RemoteChat
from cocoa_integrations.server import create_app
from tests.helpers.live_server import listening
from tests.helpers.mutations import EXAMPLES, each_change, outcome
from tests.helpers.tiny_models import engine_for_schemas

BODY = {
    "model": "cocoa",
    "messages": [{"role": "user", "content": "Who invented the telephone?"}],
    "max_tokens": 3,
    "logprobs": True,
    "top_logprobs": 1,
    "cocoa": {"candidates": True},
}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ERROR = {"name": "add", "id": "1", "risk": 0.5, "arguments": {}, "error": "cut off"}

STEP = 1 if EXAMPLES else 9
"""Every which change is tried. The number of changes of a part, 22, has no common factor with it."""

CHAT = ChatCall(messages=[{"role": "user", "content": "Hi"}], logprobs=True)
PROMPT = ChatCall(prompt="Hi", logprobs=True)


class Answering:
    """An app that sends what it is told to."""

    def __init__(self) -> None:
        self.text = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            body = await Request(scope, receive).body()
            streams = body and json.loads(body)["stream"]
            kind = "text/event-stream" if streams else "application/json"
            await Response(self.text.encode("latin-1"), media_type=kind)(scope, receive, send)

    def sends(self, value: Any) -> None:
        """Send an answer, or the chunks of one."""
        self.text = json.dumps(value)
        if isinstance(value, list):
            self.text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in value) + "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def app() -> Answering:
    return Answering()


@pytest.fixture(scope="module")
def service(app: Answering) -> Iterator[RemoteChat]:
    with listening(app) as url:
        yield RemoteChat(url, max_retries=0)


def asked(service: RemoteChat, call: ChatCall, stream: bool) -> Any:
    if not stream:
        return service.answer(call)
    answer = service.stream(call)
    list(answer)
    return answer.answer


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """A completion, a chat completion, and the first and the last chunks of a stream, which have one of each kind."""
    prompt = {"model": "cocoa", "prompt": "It is", "max_tokens": 3, "logprobs": 1, "cocoa": {"candidates": True}}
    streamed = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    with listening(create_app(engine_for_schemas())) as url:
        completion = httpx.post(f"{url}/completions", json=prompt, timeout=60).json()
        whole = httpx.post(f"{url}/chat/completions", json=BODY, timeout=60).json()
        text = httpx.post(f"{url}/chat/completions", json=streamed, timeout=60).text
    message = whole["choices"][0]["message"]
    message["tool_calls"] = [CALL]
    message["cocoa_risk"]["tool_calls"] = [ERROR]
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    chunks[1]["choices"][0]["delta"]["tool_calls"] = [{**CALL, "index": 0}]
    return {"completion": completion, "whole": whole, "chunks": [*chunks[:2], *chunks[-2:]]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "chunks", "completion"])
def test_each_value_of_an_answer(service: RemoteChat, app: Answering, kind: str, answers: dict[str, Any]) -> None:
    good, stream, call = answers[kind], kind == "chunks", PROMPT if kind == "completion" else CHAT
    app.sends(good)
    assert asked(service, call, stream).report.spans
    refused, places = 0, enumerate(good) if stream else [(None, good)]
    changes = ((number, *change) for number, part in places for change in each_change(part))
    for number, what, value in islice(changes, 0, None, STEP):
        value = value if number is None else [*good[:number], value, *good[number + 1 :]]
        app.sends(value)
        try:
            answer = outcome(lambda: asked(service, call, stream))
        except Exception as error:
            pytest.fail(f"{what} in part {number}: {type(error).__name__}: {error}")
        refused += isinstance(answer, DataError)
    assert refused > 45


def test_counts_that_a_server_does_not_have(service: RemoteChat, app: Answering) -> None:
    details = {"prompt_tokens_details": None, "completion_tokens_details": {"reasoning_tokens": None}}
    usage = {"prompt_tokens": 3, "completion_tokens": None, **details}
    app.sends({"choices": [{"message": {"content": "Hi"}}], "usage": usage})
    answer = service.answer(CHAT)
    assert (answer.text, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ("Hi", 3, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("indices", [(0, 1, 0), (1, 2, 1), (0, 0, None), (None, None, None)])
def test_calls_are_told_apart_by_their_ids(
    service: RemoteChat, app: Answering, indices: tuple[int | None, ...], stream: bool
) -> None:
    first, second = ({**CALL, "id": call_id, "index": index} for call_id, index in zip("ab", indices, strict=False))
    rest = [] if indices[2] is None else [{"index": indices[2], "function": {"arguments": ""}}]
    parts = [[first], [second], rest]
    app.sends(
        [{"choices": [{"delta": {"tool_calls": part}}]} for part in parts] + [{"choices": [{"finish_reason": "stop"}]}]
        if stream
        else {"choices": [{"message": {"tool_calls": [first, second]}}]}
    )
    assert [(call.id, call.name, call.arguments) for call in asked(service, CHAT, stream).valid_calls] == [
        ("a", "add", {}),
        ("b", "add", {}),
    ]


@pytest.mark.parametrize(
    ("parts", "count"),
    [
        ([(None, "add", ""), ("a", None, "{}")], 1),  # its id comes late
        ([("a", "add", "{"), ("b", None, "}")], 1),  # an id for each part
        ([("a", "add", "{"), ("b", "add", "{}"), ("a", None, "}")], 2),  # in turn
    ],
)
def test_parts_of_a_call_stay_together(
    service: RemoteChat, app: Answering, parts: list[tuple[str | None, str | None, str]], count: int
) -> None:
    sent = [
        {"index": 0, "id": call_id, "function": {"name": name, "arguments": written}}
        for call_id, name, written in parts
    ]
    chunks = [{"choices": [{"delta": {"tool_calls": [part]}}]} for part in sent]
    app.sends([*chunks, {"choices": [{"finish_reason": "stop"}]}])
    answer = asked(service, CHAT, True)
    assert ([(call.name, call.arguments) for call in answer.valid_calls], answer.invalid_calls) == (
        [("add", {})] * count,
        [],
    )


def test_what_a_call_may_lack(service: RemoteChat, app: Answering) -> None:
    functions = [
        {"name": "add"},
        {"name": "add", "arguments": ""},
        {"arguments": "{}"},
        {"name": "add", "arguments": "["},
    ]
    app.sends({"choices": [{"message": {"tool_calls": [{"function": function} for function in functions]}}]})
    answer = service.answer(CHAT)
    assert [call.arguments for call in answer.valid_calls] == [{}, {}]
    assert [call.error for call in answer.invalid_calls] == ["it has no name", "its arguments are not a JSON object"]
    assert len({call.id for call in answer.calls}) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["{", "[" * 100_000, '"\xff"'])
def test_an_answer_that_is_no_json(service: RemoteChat, app: Answering, text: str, stream: bool) -> None:
    app.text = f"data: {text}\n\n" if stream else text
    with pytest.raises(DataError, match="no JSON"):
        asked(service, CHAT, stream)


def test_each_value_of_the_list_of_models(service: RemoteChat, app: Answering) -> None:
    good = {"object": "list", "data": [{"id": "cocoa", "object": "model", "max_model_len": 512}]}
    app.sends(good)
    assert service.context_window() == 512
    refused = 0
    for what, value in each_change(good):
        app.sends(value)
        window = outcome(service.context_window)
        refused += isinstance(window, DataError)
        assert isinstance(window, DataError) or window is None or window > 0, what
    assert refused > 50
