"""Conventions of LangChain's other models: usage in streams, details of usage, the provider, ``from_model_id``."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables.utils import add

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM

MODELS = [ChatCocoa, CocoaLLM]
each_model = pytest.mark.parametrize("kind", MODELS)


def test_stream_usage_leaves_the_usage_out(quick_engine: CocoaEngine) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=3)
    *_, last = chat.stream("Hi")
    assert last.usage_metadata is not None
    silent = ChatCocoa(engine=quick_engine, max_tokens=3, stream_usage=False)
    for chunks in (
        chat.stream("Hi", stream_usage=False),
        silent.stream("Hi"),
        chat.bind(stream_usage=False).stream("Hi"),
    ):
        assert all(chunk.usage_metadata is None for chunk in chunks)
    assert silent.invoke("Hi").usage_metadata is not None
    *_, last = silent.stream("Hi", stream_usage=True)
    assert last.usage_metadata is not None
    assert ChatCocoa(stream_usage=None) == ChatCocoa()
    with pytest.raises(ConfigError, match="stream_usage"):
        chat.invoke("Hi", stream_usage="perhaps")


def test_answers_name_their_provider(quick_chat: ChatCocoa) -> None:
    answer = quick_chat.invoke("Hi")
    streamed = add(list(quick_chat.stream("Hi")))
    for message in (answer, streamed):
        assert isinstance(message, AIMessage)
        assert message.response_metadata["model_provider"] == "cocoa"
        assert message.content_blocks == [{"type": "text", "text": message.text}]


@each_model
def test_from_model_id_is_the_constructor(kind: Any) -> None:
    made = kind.from_model_id(
        model_id="org/name",
        task="text-generation",
        device=0,
        model_kwargs={"torch_dtype": "bfloat16", "trust_remote_code": True, "attn_implementation": "eager"},
        pipeline_kwargs={"max_new_tokens": 7, "do_sample": True, "top_p": 1.0, "return_full_text": False},
        alpha=1.0,
    )
    assert made == kind(
        model="org/name",
        device_map="cuda:0",
        dtype="bfloat16",
        trust_remote_code=True,
        model_kwargs={"attn_implementation": "eager"},
        max_tokens=7,
        temperature=1.0,
        alpha=1.0,
    )
    assert kind.from_model_id("org/name") == kind(model="org/name")
    assert kind.from_model_id("org/name", device=-1).device_map == "cpu"
    assert kind.from_model_id("org/name", device="cuda:1").device_map == "cuda:1"
    assert kind.from_model_id("org/name", device_map="auto").device_map == "auto"
    assert kind.from_model_id("org/name").device_map == kind(model="org/name").device_map == "auto"
    assert kind.from_model_id("org/name", device_map=None).device_map is None  # the CPU
    greedy = kind.from_model_id("org/name", pipeline_kwargs={"do_sample": False, "temperature": 0.7})
    assert greedy.temperature == 0
    assert CocoaLLM.from_model_id("org/name", batch_size=2).batch_size == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "summarization"}, "task='summarization' is not supported; only 'text-generation' is"),
        ({"backend": "openvino"}, "backend='openvino' is not supported"),
        ({"device": 0, "device_map": "cpu"}, "device and device_map are both given"),
        ({"pipeline_kwargs": {"top_k": 50}}, r"top_k=50 \(gamma and max_candidates"),
        ({"pipeline_kwargs": {"return_full_text": True}}, "answers do not repeat the prompt"),
        ({"pipeline_kwargs": {"alpha": 1.0}, "alpha": 2.0}, "alpha is given in pipeline_kwargs and elsewhere too"),
        ({"model": "other"}, "model and model_id are the same option"),
        ({"alhpa": 1.0}, "did you mean 'alpha'"),
    ],
)
@each_model
def test_from_model_id_refuses_what_is_not_supported(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind.from_model_id("org/name", **options)


def test_stream_usage_of_a_text_model(quick_engine: CocoaEngine, live: Any) -> None:
    llm = CocoaLLM(engine=quick_engine, max_tokens=3, streaming=True)
    result = llm.generate(["Hi"], stream_usage=False)
    assert "usage_metadata" not in result.generations[0][0].generation_info
    assert llm.generate(["Hi"]).generations[0][0].generation_info["usage_metadata"]["output_tokens"] == 3
    assert "".join(llm.stream("Hi", stream_usage=False)) == "".join(llm.stream("Hi"))


def test_answers_with_and_without_usage_are_cached_apart(quick_engine: CocoaEngine) -> None:
    keys = [ChatCocoa(engine=quick_engine, stream_usage=usage)._identifying_params for usage in (True, False)]
    assert keys[0] != keys[1]
