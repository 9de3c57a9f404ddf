"""Every parameter that other servers document is a setting, has no effect, or is refused by its name and says why."""

import re
from typing import Any, get_type_hints

import pytest

from cocoa_engine import CocoaConfig
from cocoa_integrations.server import ServerSettings
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.parameters import REFUSED, SAME_SETTING
from cocoa_integrations.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DecodingRequest,
    ScoreRequest,
    StreamOptions,
)
from docs._generate.request_parameters import WITHOUT_EFFECT, request_parameters
from tests.conformance.tools import source_if_there
from tests.helpers.reasoning_models import Speaker
from tests.helpers.served import CHAT, COMPLETIONS, HELLO, SCORE, refusal

ROUTES: dict[type[DecodingRequest], dict[str, Any]] = {
    ChatRequest: {"messages": HELLO},
    CompletionRequest: {"prompt": "Hi"},
    ScoreRequest: {"prompt": "Hi", "text": "you"},
}
VALUES = [True, False, 0.37, -1, 0, 1, 7, "", "x", [], ["x"], {}, {"x": 1}, "auto"]
LIMITS = ServerSettings()


def read(route: type[DecodingRequest], **body: Any) -> DecodingRequest:
    return route.read({**ROUTES[route], **body}, LIMITS)


def names_of_route(route: type[DecodingRequest]) -> set[str]:
    nested = {f"stream_options.{name}" for name in StreamOptions.model_fields}
    return {*route.model_fields, *route.refused, *WITHOUT_EFFECT, *nested}


def test_all_that_openai_documents_is_known() -> None:
    chat = pytest.importorskip("openai.types.chat.completion_create_params")
    text = pytest.importorskip("openai.types.completion_create_params")
    options = pytest.importorskip("openai.types.chat").ChatCompletionStreamOptionsParam
    nested = {f"stream_options.{name}" for name in get_type_hints(options)}
    assert {*get_type_hints(chat.CompletionCreateParamsBase), *nested} - names_of_route(ChatRequest) == set()
    assert {*get_type_hints(text.CompletionCreateParamsBase), *nested} - names_of_route(CompletionRequest) == set()


def test_all_that_the_source_of_llama_cpp_reads_is_known() -> None:
    folder = source_if_there("llama-cpp-python") / "vendor" / "llama.cpp" / "tools" / "server"
    source = (folder / "server-schema.cpp").read_text(encoding="utf-8")
    names = set(re.findall(r'(?:new field_\w+(?:<\w+>)?|add_alias)\("([\w.]+)"', source))
    assert len(names) > 80
    assert names - {"include_usage"} - names_of_route(ChatRequest) == set()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_a_value_is_accepted_or_named(route: type[DecodingRequest]) -> None:
    def check(name: str, value: Any) -> None:
        outer, _, inner = name.partition(".")
        read(route, **({"stream": True, outer: {inner: value}} if outer == "stream_options" else {name: value}))

    own = [*route.model_fields, *(["stream_options"] if route is ScoreRequest else [])]  # with types of their own
    for name, (neutral, instead) in route.refused.items():
        if name.partition(".")[0] in own and (name in own or "stream_options" in route.refused):
            continue
        for value in (None, *neutral):
            check(name, value)
        for value in (value for value in VALUES if value not in neutral):
            with pytest.raises(ApiError) as caught:
                check(name, value)
            assert (caught.value.status, caught.value.param) == (400, name)
            assert f"{name}=" in str(caught.value)
            assert instead in str(caught.value)
    for name in WITHOUT_EFFECT:
        assert name not in {*route.refused, *route.model_fields}
        for value in VALUES:
            check(name, value)


@pytest.mark.parametrize("name", [name for name, setting in SAME_SETTING.items() if setting == "max_new_tokens"])
@pytest.mark.parametrize("route", [ChatRequest, CompletionRequest])
def test_every_name_of_the_limit_is_the_limit(route: type[DecodingRequest], name: str) -> None:
    def config(**given: Any) -> CocoaConfig:
        return read(route, **given).config(CocoaConfig(), LIMITS)

    if name in route.refused:
        with pytest.raises(ApiError, match=name):
            config(**{name: 7})
        return
    assert config(**{name: 7}).max_new_tokens == 7
    for value in (0, -1, 10**9):
        with pytest.raises(ApiError, match=f"^{name}") as caught:
            config(**{name: value})
        assert caught.value.param == name
        assert name == "max_new_tokens" or "max_new_tokens" not in str(caught.value)
    other = "max_tokens" if name != "max_tokens" else "n_predict"
    with pytest.raises(ApiError, match=r"are the same setting, but differ: \d+ and \d+"):
        config(**{name: 7, other: 8})


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("adds", [False, True, None])
def test_the_generation_prompt_is_the_contrary_of_continuing(continues: bool, adds: bool | None) -> None:
    body = {"continue_final_message": continues, "add_generation_prompt": adds}
    if adds is continues:
        with pytest.raises(ApiError) as caught:
            read(ChatRequest, **body)
        assert caught.value.param == "add_generation_prompt"
    else:
        read(ChatRequest, **body)


def test_the_page_lists_every_parameter_once() -> None:
    listed = re.findall(r"`([\w.]+)`", "".join(line.split("|")[1] for line in request_parameters().splitlines()[2:]))
    assert sorted(listed) == sorted([*SAME_SETTING, *REFUSED, *WITHOUT_EFFECT])


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def message(content: Any, role: str = "user", **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more}]


MOVE = tool(name="move", parameters={"type": "object"})
FOO = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}
NO_IMAGE = message([{"type": "text", "text": "a"}, {"type": "image_url"}])
NO_NAME = message(None, "assistant", tool_calls=[{"function": {"arguments": "{}"}}])

Cases = list[tuple[dict[str, Any], str, str]]
"""A body, the parameter that is wrong, and what the message says; with ``^``, it begins with what the client sent."""
OF_ENGINE = ("add_generation_prompt", "chat_template", "conversation", "messages", "tools", "truncation", "self")
OF_CHAT: Cases = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": message(" ")}, "messages", "empty"),
    ({"messages": message("a", "robot")}, "messages[0].role", "'system'"),
    ({"messages": message(3)}, "messages[0].content", "a text or a list"),
    ({"messages": NO_IMAGE}, "messages[0].content[1]", "text only"),
    ({"messages": [*HELLO, *NO_NAME]}, "messages[1].tool_calls[0]", "name"),
    ({"temperature": 0.5, "cocoa": {"temperature": 0.4}}, "temperature", "cocoa.temperature"),
    ({"top_p": 0.5}, "top_p", "method='sample'"),
    ({"cocoa": {"top_k": 5}}, "cocoa.top_k", "method='sample'"),
    ({"cocoa": {"max_risk": 1.5}}, "cocoa.max_risk", "outside the scale"),
    ({"cocoa": {"alfa": 1}}, "cocoa", "did you mean 'alpha'"),
    ({"cocoa": {"report": "full"}}, "cocoa.report", "'both'"),
    ({"cocoa": {"decore_heads": "/etc/passwd"}}, "cocoa", "unknown option 'decore_heads'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "below 300"),
    ({"logit_bias": {"foo": 0}}, "logit_bias", "'foo'"),
    ({"logit_bias": [5]}, "logit_bias", "dictionary"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "no variable for it"),
    ({"reasoning_effort": "none"}, "reasoning_effort", "no variable for it"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"tools": [{"type": "web_search"}]}, "tools", "functions only"),
    ({"tools": [MOVE], "tool_choice": "mvoe"}, "tool_choice", "did you mean 'move'"),
    ({"tool_choice": "required"}, "tool_choice", "none are given"),
    ({"continue_final_message": True}, "messages", "assistant message"),
    ({"chat_template_kwargs": {"mood": "glad"}}, "chat_template_kwargs.mood", "has no variable of this name"),
    ({"max_tokens": True}, "max_tokens", "must be a number"),
    ({"max_tokens": "8"}, "max_tokens", "must be a number"),
    ({"tools": [MOVE, MOVE]}, "tools", "two tools have the name 'move'"),
    ({"logit_bias": {"5": True}}, "logit_bias", "not '5': True"),
    ({"cocoa": {"alpha": "2"}}, "cocoa.alpha", "must be a number"),
    ({"cocoa": {"candidates": "no"}}, "cocoa.candidates", "boolean"),
    ({"logprobs": 1}, "logprobs", "boolean"),
    ({"response_format": {}}, "response_format", "takes"),
    ({"response_format": FOO}, "response_format", "cannot be enforced"),
    (
        {"tools": [tool(parameters={"type": "foo"})], "tool_choice": "required"},
        "tools",
        "have the type 'foo', not object",
    ),
    ({"tools": [tool(parameters="x")]}, "tools", "a JSON schema"),
    ({"tools": [tool(description=3)]}, "tools", "takes a text"),
    ({"tools": [tool(strict="x")]}, "tools", "true or false"),
    ({"tools": [MOVE], "tool_choice": {"a": 1}}, "tool_choice", "names a function"),
    ({"messages": message("\ud800")}, "messages", "lone surrogate"),
    ({"messages": message("long " * 3000), "cocoa": {}}, "messages", "context window"),
    ({"tool_choice": 3}, "tool_choice", "string"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"repetition_penalty": 2.0, "cocoa": {"repetition_penalty": 1.5}}, "repetition_penalty", "differ"),
    ({"cocoa": {"middle_layers": [50, 60]}}, "cocoa.middle_layers", "layers"),
    ({"cocoa": {"source": ["not there"]}}, "cocoa.source", "not in the prompt"),
    ({"cocoa": {"source": ["Say"] * 257}}, "cocoa.source", "at most 256"),
    ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
    ({"temperature": -1}, "temperature", "^"),
    ({"repetition_penalty": 0}, "repetition_penalty", "^"),
    ({"cocoa": {"alpha": -1}}, "cocoa.alpha", "^"),
    ({"cocoa": {"method": "sample"}, "top_p": 3}, "top_p", "^"),
    ({"logprobs": True, "top_logprobs": 3, "cocoa": {"top_logprobs": 4}}, "top_logprobs", "^"),
    *(({"chat_template_kwargs": {name: "{{ 1 }}"}}, "chat_template_kwargs", name) for name in OF_ENGINE),
]
OF_COMPLETIONS: Cases = [
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": 3}, "prompt", "a text, a list of texts"),
    ({"prompt": [True]}, "prompt", "a list of token ids"),
    ({"prompt": ["a", 1]}, "prompt", "a list of token ids"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "empty"),
    ({"prompt": [10**6]}, "prompt", "10"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [10**6], "echo": True}, "prompt", "10"),
    ({"prompt": ["a"] * 300}, "prompt", "limit of 256"),
    ({"prompt": [40] * 5000, "max_tokens": 1}, "prompt", "context window"),
    ({"prompt": [40] * 5000, "max_tokens": 0, "echo": True, "logprobs": 1}, "prompt", "context window"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": 2, "cocoa": {"top_logprobs": 3}}, "logprobs", "differ"),
    ({"cocoa": {"source": ["not there"]}}, "cocoa.source", "not in the prompt"),
    ({"cocoa": {"source": ["a"]}, "max_tokens": 0, "echo": True}, "cocoa.source", "no effect"),
]
OF_SCORE: Cases = [
    ({"text": "a"}, "prompt", "either prompt or messages"),
    ({"prompt": "a", "messages": HELLO, "text": "a"}, "prompt", "either prompt or messages"),
    ({"prompt": "a"}, "text", "either text or texts"),
    ({"prompt": "a", "text": "a", "texts": ["b"]}, "text", "either text or texts"),
    ({"prompt": "a", "texts": []}, "texts", "no text"),
    ({"prompt": "", "text": "a"}, "prompt", "empty"),
    ({"prompt": "a", "texts": ["b", ""]}, "text", "empty"),
    ({"prompt": [10**6], "text": "a"}, "prompt", "vocabulary"),
    ({"prompt": "a", "text": "a" * 5000}, "text", "context window"),
    ({"prompt": "a", "texts": ["a"] * 300}, "texts", "limit of 256"),
    ({"prompt": "a", "text": "b\ud800"}, "text", "surrogate"),
    ({"prompt": "a", "text": "b", "source": ["c"]}, "source", "not in the prompt"),
    ({"prompt": "a", "text": "b", "source": [""]}, "source", "not empty"),
    ({"prompt": "a", "text": "b", "max_tokens": 3}, "max_tokens", "nothing is decoded"),
    ({"messages": HELLO, "text": "b", "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
    ({"prompt": "a", "text": "b", "cocoa": {"alpha": -1}}, "cocoa.alpha", "alpha"),
    ({"prompt": "a", "text": "b", "cocoa": {"method": "diver"}}, "divide", "divide"),
    ({"messages": HELLO, "text": "b", "chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood", "no variable"),
    ({"prompt": "a", "text": "b", "chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs", "give messages"),
    ({"messages": [], "text": "b"}, "messages", "empty"),
    ({"prompt": "a", "text": "b", "cocoa": {"source": ["a"]}}, "cocoa.source", "give source"),
    ({"prompt": "a", "text": "b", "cocoa": {"report": "none"}}, "cocoa.report", "no effect"),
    ({"prompt": "a", "text": "b", "cocoa": {"max_new_tokens": 3}}, "cocoa.max_new_tokens", "nothing is decoded"),
    ({"prompt": "a", "text": "b", "logprobs": True}, "logprobs", "nothing is decoded"),
    ({"prompt": ["5"], "text": "b"}, "prompt", "valid string"),
    ({"prompt": "a", "text": "b", "divide": "no"}, "divide", "boolean"),
    ({"prompt": "a", "text": "b", "cocoa": {"top_logprobs": 3}}, "cocoa.top_logprobs", "no effect"),
]
OF_ROUTES = {CHAT: OF_CHAT, COMPLETIONS: OF_COMPLETIONS, SCORE: OF_SCORE}
CASES = [(path, *case) for path, cases in OF_ROUTES.items() for case in cases]


@pytest.mark.parametrize(("path", "body", "param", "says"), CASES, ids=lambda value: str(value)[:60])
async def test_what_is_refused_and_why(tiny: Speaker, path: str, body: dict[str, Any], param: str, says: str) -> None:
    for stream in (False, True) if path == CHAT and "stream_options" not in body else (False,):
        more = {"max_tokens": 2, "stream": stream} if path == CHAT else {}
        error = await refusal(tiny, path=path, **{**more, **body})
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"].startswith(param) if says == "^" else says in error["message"]
        assert error["code"] == ("context_length_exceeded" if says == "context window" else None)
