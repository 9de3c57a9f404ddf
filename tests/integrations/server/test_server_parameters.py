"""Every parameter that other servers document is a setting, has no effect, or is refused by its own name."""

from __future__ import annotations

import re
from typing import Any, get_type_hints

import pytest

from cocoa_engine import CocoaConfig
from cocoa_integrations.server import ServerSettings
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DecodingRequest,
    ScoreRequest,
    StreamOptions,
)
from cocoa_integrations.server.settings import REFUSED, SAME_SETTING, WITHOUT_EFFECT
from docs._generate.request_parameters import request_parameters
from tests.conformance.tools import source_if_there
from tests.helpers.served import HELLO

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


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"cocoa": {"alpha": -1}}, "cocoa.alpha"),
        ({"cocoa": {"method": "sample"}, "top_p": 3}, "top_p"),
        ({"logprobs": True, "top_logprobs": 3, "cocoa": {"top_logprobs": 4}}, "top_logprobs"),
    ],
)
def test_a_message_begins_with_what_the_client_sent(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match=f"^{re.escape(param)}") as caught:
        read(ChatRequest, **body).config(CocoaConfig(), LIMITS)
    assert caught.value.param == param


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
