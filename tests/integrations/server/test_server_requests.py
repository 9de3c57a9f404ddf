"""Every parameter that other servers document is a setting, has no effect, or is refused by its name and says why.

The risk of given texts, and what the server says of itself.
"""

import asyncio
import platform
import re
import threading
from typing import Any, get_type_hints

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime, __version__
from cocoa_integrations.server import ServerSettings, create_app
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
from tests.helpers.alike import near, risk_report
from tests.helpers.in_threads import happens
from tests.helpers.reasoning_models import Speaker, speaker
from tests.helpers.served import CHAT, COMPLETIONS, HELLO, PATIENCE, SCORE, client_of, post, refusal

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
    ({"prompt": "a", "texts": ["b", ""]}, "texts", "text to score at index 1 is empty"),
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


PROMPT = "A tower is in Paris. Where is the tower?"
TEXTS = ["It is in Paris.", "It is in Rome, or so."]


async def score(engine: CocoaEngine, **body: Any) -> dict[str, Any]:
    response = await post(create_app(engine), body, SCORE)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert (
        response.headers["x-cocoa-max-risk"] == f"{answer['usage']['completion_tokens_details']['cocoa_max_risk']:.6g}"
    )
    return answer


def risks(report: dict[str, Any]) -> list[float]:
    return [span["risk"] for span in report["spans"]]


@pytest.mark.parametrize("path", [SCORE, "/cocoa/score"])
@pytest.mark.parametrize("kind", ["text", "messages", "ids"])
async def test_a_text_is_divided_at_its_risk_points(tiny: Speaker, path: str, kind: str) -> None:
    ids = tiny.encode(PROMPT) if kind == "text" else tiny.encode_chat(HELLO)
    asked = {"text": PROMPT, "messages": HELLO, "ids": ids}[kind]
    expected = risk_report(tiny.score(ids, TEXTS[0], divide=True))
    body = {"messages" if kind == "messages" else "prompt": asked, "text": TEXTS[0]}
    answer = (await post(create_app(tiny), body, path)).json()
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    [entry] = answer["data"]
    assert (entry["object"], entry["index"], entry["text"]) == ("cocoa.score", 0, TEXTS[0])
    report = entry["cocoa_risk"]
    assert len(report["spans"]) > 1
    assert risks(report) == near(risks(expected))
    assert report["max_risk"] == near(expected["max_risk"])
    assert "".join(span["text"] for span in report["spans"]) == TEXTS[0]
    assert {span["kind"] for span in report["spans"]} == {"given"}
    assert report["check"] == expected["check"]


@pytest.mark.parametrize("divide", [False, True])
async def test_many_texts_after_one_prompt(tiny: Speaker, divide: bool) -> None:
    answer = await score(tiny, prompt=PROMPT, texts=TEXTS, divide=divide)
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    for text, entry in zip(TEXTS, answer["data"], strict=True):
        alone = (await score(tiny, prompt=PROMPT, text=text, divide=divide))["data"][0]["cocoa_risk"]
        assert risks(entry["cocoa_risk"]) == near(risks(alone))
        assert (len(entry["cocoa_risk"]["spans"]) > 1) is divide
    tokens = [tiny.score(PROMPT, text).usage for text in TEXTS]
    assert answer["usage"]["prompt_tokens"] == tokens[0].prompt_tokens + sum(one.completion_tokens for one in tokens)
    assert answer["usage"]["completion_tokens"] == 0


MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (SCORE, {"prompt": PROMPT, "text": TEXTS[0]}, "source"),
        (SCORE, {"messages": MESSAGES, "text": TEXTS[0]}, "source"),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}, "cocoa.source"),
    ],
)
async def test_passages_are_named(engine: CocoaEngine, path: str, body: dict[str, Any], name: str) -> None:
    def asked(source: str) -> dict[str, Any]:
        return {**body, **({"cocoa": {"source": [source]}} if name == "cocoa.source" else {"source": source})}

    answer = (await post(create_app(engine), asked("A tower is in Paris."), path)).json()
    [entry] = answer["data"] if path == SCORE else answer["choices"]
    assert all(len(span["passage_attention"]) == 1 for span in entry["cocoa_risk"]["spans"])
    error = await refusal(engine, path=path, **asked("A house"))
    assert error["param"] == name
    assert "not in the prompt" in error["message"]


async def test_settings_and_candidates_apply(tiny: Speaker) -> None:
    answer = await score(tiny, prompt=PROMPT, text=TEXTS[0], cocoa={"risk": "f_mlds", "gamma": 1.0, "candidates": True})
    report = answer["data"][0]["cocoa_risk"]
    expected = tiny.score(PROMPT, TEXTS[0], config=CocoaConfig(risk="f_mlds", gamma=1.0), divide=True)
    assert report["risk_source"] == "f_mlds"
    assert len(report["spans"]) == len(expected.spans)
    assert all("rivals" in span for span in report["spans"])


async def test_long_texts_are_read_in_steps(tiny: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": PROMPT, "text": TEXTS[0], "divide": False}
    expected = await score(tiny, **body)
    monkeypatch.setattr("cocoa_integrations.server.protocol.answers._MOST_LOGITS", 0)
    [answer], [whole] = (await score(tiny, **body))["data"], expected["data"]
    assert risks(answer["cocoa_risk"]) == near(risks(whole["cocoa_risk"]))


@pytest.mark.parametrize(("risk", "risk_source"), [("auto", "token_probability"), ("con_mlds", "con_mlds")])
async def test_what_is_served(risk: Any, risk_source: str) -> None:
    tiny = speaker(max_batch_size=3, max_queue=5)
    tiny.config = CocoaConfig(alpha=1.5, decore_heads="/secret/heads.json", risk=risk)
    app = create_app(tiny, ServerSettings(max_n=2, served_names=("a", "b"), api_keys=("secret",)))
    async with client_of(app, authorization="Bearer secret") as client:
        found = (await client.get("/v1/cocoa/info")).json()
        version = (await client.get("/version")).json()
    assert version == {"version": __version__}
    assert found["object"] == "cocoa.info"
    assert found["served_names"] == ["a", "b"]
    assert found["model"] == tiny.info().model_dump(mode="json")
    assert (found["settings"]["alpha"], found["settings"]["method"]) == (1.5, "cocoa-sig")
    assert (found["risk_source"], found["calibrator"]) == (risk_source, None)
    assert (found["limits"]["max_n"], found["limits"]["context_window"]) == (2, 4096)
    assert (found["limits"]["max_batch_size"], found["limits"]["max_queue"]) == (3, 5)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert "secret" not in str(found)
    async with client_of(app) as stranger:
        assert [(await stranger.get(path)).status_code for path in ("/v1/cocoa/info", "/version")] == [401, 401]


async def test_the_embedded_calibrator_is_named(engine: CocoaEngine) -> None:
    async with client_of(create_app(engine)) as client:
        found = (await client.get("/v1/cocoa/info")).json()
    assert found["risk_source"] == "calibrator"
    assert found["calibrator"]["model_name"] == engine.model_name
    assert found["calibrator"]["spans"] is True


class Scorer(Speaker):
    """Notes the texts of each call and how many ran at once, and waits before the first and the twentieth one."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.texts: list[Any] = []
        self.goes_on = threading.Event()
        self.running = self.most = 0

    def score(self, prompt: Any, text: Any, **options: Any) -> Any:
        if len(self.texts) == 20:
            self.goes_on.clear()
        self.texts.append(text)
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.goes_on.wait(PATIENCE)
        try:
            return super().score(prompt, text, **options)
        finally:
            self.running -= 1


@pytest.mark.slow
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("others", [1, 4])
async def test_a_new_request_waits_for_two_texts_however_many_others_there_are(
    tiny: Speaker, divide: bool, others: int
) -> None:
    """The texts, or batches of texts, of several requests take turns."""
    engine = Scorer(
        tiny.session.model.model, tiny.tokenizer, model_name="tiny", runtime=Runtime(max_batch_size=2, max_queue=20)
    )
    app = create_app(engine)
    many = {"prompt": PROMPT, "texts": [f"a{number}" for number in range(50)], "divide": divide}
    requests = [asyncio.ensure_future(post(app, many, SCORE)) for _ in range(others)]
    engine.goes_on.set()
    await happens(lambda: len(engine.texts) == 21)
    requests.append(asyncio.ensure_future(post(app, {"prompt": PROMPT, "text": "b", "divide": divide}, SCORE)))
    await happens(lambda: len(app.state.cocoa.calls) == others + 1)
    await asyncio.sleep(0.2)  # it is ready to be scored
    engine.goes_on.set()
    answers = [(await request).json()["data"] for request in requests]
    assert [[entry["text"] for entry in entries] for entries in answers] == [many["texts"]] * others + [["b"]]
    assert engine.texts.index("b") <= 22
    assert engine.most == 1


@pytest.mark.parametrize("divide", [False, True])
async def test_an_error_names_the_text_among_all(tiny: Speaker, divide: bool) -> None:
    texts = [*TEXTS * 6, "long " * 4000, "a"]
    error = await refusal(tiny, path=SCORE, prompt=PROMPT, texts=texts, divide=divide)
    assert error["param"] == "texts"
    assert "text to score at index 12" in error["message"]
