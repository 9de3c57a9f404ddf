"""What litellm keeps of the risk.

pytest runs this in the environment of the suites, with the address of the server's API in ``COCOA_URL``.
"""

import json
import os
from typing import Any

import litellm
import pytest

MESSAGES = [{"role": "user", "content": "Who wrote Pride and Prejudice?"}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def call(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The arguments of a call, by each provider that is used for servers of one's own."""
    model = f"{request.param}/SmolLM2-135M-Instruct"
    address = {"api_base": os.environ["COCOA_URL"], "api_key": "none", "num_retries": 0}
    return {"model": model, "messages": MESSAGES, "max_tokens": 8, **address}


def test_a_whole_answer(call: dict[str, Any]) -> None:
    answer = litellm.completion(**call)
    [choice] = answer.choices
    report = choice.message.provider_specific_fields["cocoa_risk"]
    assert "".join(span["text"] for span in report["spans"]) == choice.message.content
    assert choice.logprobs.model_dump()["cocoa_risk"] == report
    assert answer.usage.completion_tokens_details.cocoa_max_risk == report["max_risk"]
    header = answer._hidden_params["additional_headers"]["llm_provider-x-cocoa-max-risk"]
    assert float(header) == pytest.approx(report["max_risk"], rel=1e-5)


def test_a_stream(call: dict[str, Any]) -> None:
    """The chunk with the finish reason keeps the report in the log-probabilities only."""
    whole = litellm.completion(**call).choices[0].message.provider_specific_fields["cocoa_risk"]
    chunks = list(litellm.completion(**call, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    spans = [span for choice in choices for span in choice.delta.get("cocoa_spans") or ()]
    assert [span["text"] for span in spans] == [span["text"] for span in whole["spans"]]
    assert [span["risk"] for span in spans] == pytest.approx([span["risk"] for span in whole["spans"]], abs=1e-3)
    [finish] = [choice for choice in choices if choice.finish_reason]
    report = finish.logprobs.model_dump()["cocoa_risk"]
    assert report["spans"] == spans
    joined = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert joined.choices[0].message.content == "".join(span["text"] for span in spans)
    assert joined.usage.completion_tokens_details.cocoa_max_risk == report["max_risk"]


def test_settings_and_calls_of_tools(call: dict[str, Any]) -> None:
    city = {"type": "string", "enum": ["Paris", "Rome"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    weather = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    extra = {"cocoa": {"method": "greedy"}, "tools": [weather], "tool_choice": "required"}
    answer = litellm.completion(**{**call, "messages": asked, "max_tokens": 48, "extra_body": extra})
    message = answer.choices[0].message
    [measured] = message.provider_specific_fields["cocoa_risk"]["tool_calls"]
    assert message.provider_specific_fields["cocoa_risk"]["method"] == "greedy"
    assert measured["name"] == message.tool_calls[0].function.name == "weather"
    assert list(measured["arguments"]) == list(json.loads(message.tool_calls[0].function.arguments)) == ["city"]
