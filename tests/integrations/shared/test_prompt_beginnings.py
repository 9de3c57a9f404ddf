"""A prompt has one beginning and no end, and its messages make no control tokens, at every door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage
from tokenizers import processors

from cocoa_engine import CocoaEngine
from cocoa_integrations import langchain, llama_index
from cocoa_integrations.server import create_app
from tests.helpers.served import post
from tests.helpers.tiny_models import BOS, EOS, sentencepiece_like_tokenizer, tiny_model, tiny_tokenizer

ADDED = ["$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>"]
CHAT = [{"role": "user", "content": "he is in"}]
PROMPTS = ["the a", "<bos>the a", "rendered"]


def engine_of(base: Callable[[], Any], added: str) -> CocoaEngine:
    tokenizer = base()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=added, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    tokenizer.chat_template = "{{ bos_token }}{% for each in messages %}{{ each.content }}{% endfor %}"
    return CocoaEngine(tiny_model("llama", seed=3), tokenizer, calibrator=None)


@pytest.fixture(params=[tiny_tokenizer, sentencepiece_like_tokenizer], ids=["bytes", "sentencepiece"])
def base(request: Any) -> Callable[[], Any]:
    made: Callable[[], Any] = request.param
    return made


def prompt_of(engine: CocoaEngine, prompt: str, added: str) -> tuple[str, list[int]]:
    """The text, and the tokens that it should be."""
    text = engine.render_chat(CHAT) if prompt == "rendered" else prompt
    plain = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    return text, [BOS, *plain] if added.startswith("<bos>") and plain[0] != BOS else plain


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("added", ADDED)
async def test_the_doors_of_adapters_and_of_the_server(base: Callable[[], Any], added: str, prompt: str) -> None:
    engine = engine_of(base, added)
    text, ids = prompt_of(engine, prompt, added)
    assert engine.encode(text) == ids
    expected = engine.generate(ids, max_new_tokens=3)
    assert engine.generate(text, max_new_tokens=3).token_ids == expected.token_ids
    app = create_app(engine)
    body = {"prompt": text, "max_tokens": 3, "echo": True, "logprobs": 0}
    completion = (await post(app, body, "/v1/completions")).json()
    [choice] = completion["choices"]
    assert completion["usage"]["prompt_tokens"] == len(ids)
    assert len(choice["logprobs"]["tokens"]) == len(ids) + len(expected.token_ids)
    assert choice["text"] == text + expected.text
    scored = (await post(app, {"prompt": text, "text": "é"}, "/v1/cocoa/score")).json()
    assert scored["usage"]["prompt_tokens"] == len(ids) + engine.score(text, "é").usage.completion_tokens
    assert langchain.CocoaLLM(engine=engine, max_tokens=3).invoke(text) == expected.text
    assert llama_index.CocoaLLM(engine=engine, max_new_tokens=3).complete(text).text == expected.text
    if prompt == "rendered":
        chat = langchain.ChatCocoa(engine=engine, max_tokens=3)
        assert chat.get_num_tokens_from_messages([HumanMessage(CHAT[0]["content"])]) == len(ids)
        answer = chat.invoke(CHAT[0]["content"])
        assert answer.usage_metadata is not None
        assert (answer.text, answer.usage_metadata["input_tokens"]) == (expected.text, len(ids))
        asked = llama_index.CocoaLLM(engine=engine, max_new_tokens=3).chat([ChatMessage(CHAT[0]["content"])])
        assert asked.message.content == expected.text


async def test_messages_make_control_tokens_only_on_request() -> None:
    engine = engine_of(tiny_tokenizer, "<bos> $A")
    text = "he is<eos><bos>in"
    on_request: dict[str, Any] = {"chat_template_kwargs": {"split_special_tokens": False}}
    nothing: dict[str, Any] = {}
    for options in (nothing, on_request):
        ids = engine.encode_chat([{"role": "user", "content": text}], **options.get("chat_template_kwargs", {}))
        assert ids.count(EOS) == len(options)
        answer = langchain.ChatCocoa(engine=engine, max_tokens=3).invoke(text, **options)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_tokens"] == len(ids)
        model = llama_index.CocoaLLM(engine=engine, max_new_tokens=3)
        expected = engine.generate(ids, max_new_tokens=3).text
        assert (answer.text, model.chat([ChatMessage(text)], **options).message.content) == (expected, expected)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **options}
        response = (await post(create_app(engine), body)).json()
        assert response["usage"]["prompt_tokens"] == len(ids)
