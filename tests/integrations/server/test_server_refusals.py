"""Requests that are refused, by route: each error names the parameter and says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.served import CHAT, COMPLETIONS, HELLO, SCORE, Speaker, refusal, speaker

MOVE = {"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}

Cases = list[tuple[dict[str, Any], str, str]]
OF_CHAT: Cases = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user", "content": " "}]}, "messages", "empty"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'system'"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a text or a list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1]",
        "text only",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "messages[1].tool_calls[0]",
        "name",
    ),
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
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}},
        "response_format",
        "cannot be enforced",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}],
            "tool_choice": "required",
        },
        "tools",
        "have the type 'foo', not object",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools", "a JSON schema"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 3}}]}, "tools", "takes a text"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "x"}}]}, "tools", "true or false"),
    ({"tools": [MOVE], "tool_choice": {"a": 1}}, "tool_choice", "names a function"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "lone surrogate"),
    ({"messages": [{"role": "user", "content": "long " * 3000}], "cocoa": {}}, "messages", "context window"),
    ({"tool_choice": 3}, "tool_choice", "string"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"repetition_penalty": 2.0, "cocoa": {"repetition_penalty": 1.5}}, "repetition_penalty", "differ"),
    ({"cocoa": {"middle_layers": [50, 60]}}, "cocoa.middle_layers", "layers"),
    ({"cocoa": {"source": ["not there"]}}, "cocoa.source", "not in the prompt"),
    ({"cocoa": {"source": ["Say"] * 257}}, "cocoa.source", "at most 256"),
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
    (
        {"messages": HELLO, "text": "b", "chat_template_kwargs": {"mood": 1}},
        "chat_template_kwargs.mood",
        "has no variable",
    ),
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


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return speaker()


@pytest.mark.parametrize(("path", "body", "param", "says"), CASES, ids=lambda value: str(value)[:60])
async def test_what_is_refused_and_why(tiny: Speaker, path: str, body: dict[str, Any], param: str, says: str) -> None:
    for stream in (False, True) if path == CHAT and "stream_options" not in body else (False,):
        more = {"max_tokens": 2, "stream": stream} if path == CHAT else {}
        error = await refusal(tiny, path=path, **{**more, **body})
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert says in error["message"]
        assert error["code"] == ("context_length_exceeded" if says == "context window" else None)
