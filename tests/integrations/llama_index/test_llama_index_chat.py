"""Chat: the tokenizer's template, and no risk in the next turn's prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from llama_index.core.base.llms.generic_utils import messages_to_prompt as llama_index_default
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage, MessageRole

from cocoa_engine import CocoaEngine, PromptError
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.reports import all_spans, risk_report

QUESTION = [ChatMessage("Name a colour.")]
AS_DICTS = [{"role": "user", "content": "Name a colour."}]


def test_chat_uses_the_template_of_the_tokenizer(llm: CocoaLLM, engine: CocoaEngine) -> None:
    expected = engine.chat(AS_DICTS, max_new_tokens=8)
    response = llm.chat(QUESTION)
    assert response.message.role is MessageRole.ASSISTANT
    assert response.message.content == expected.text
    assert response.additional_kwargs == {"cocoa_spans": all_spans(expected), "cocoa_risk": risk_report(expected)}
    assert response.raw is not None
    assert response.raw["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert response.logprobs is not None
    assert len(response.logprobs) == expected.usage.completion_tokens
    *chunks, last = llm.stream_chat(QUESTION)
    assert "".join(chunk.delta or "" for chunk in chunks) == expected.text
    assert last == response.model_copy(update={"delta": "", "additional_kwargs": {"cocoa_risk": risk_report(expected)}})


def test_system_prompt_opens_a_chat_that_has_none(engine: CocoaEngine) -> None:
    llm = CocoaLLM(engine=engine, max_new_tokens=4, system_prompt="Answer in capitals.")
    own = ChatMessage("Answer in French.", role=MessageRole.SYSTEM)

    def expected(system: str) -> str:
        return engine.chat([{"role": "system", "content": system}, *AS_DICTS], max_new_tokens=4).text

    assert llm.chat(QUESTION).message.content == expected("Answer in capitals.")
    assert llm.chat([own, *QUESTION]).message.content == expected("Answer in French.")


def test_every_role_of_llama_index_has_one_in_the_template(
    llm: CocoaLLM, engine: CocoaEngine, prompts: list[str]
) -> None:
    roles = [MessageRole.DEVELOPER, MessageRole.USER, MessageRole.MODEL, MessageRole.USER]
    llm.chat([ChatMessage("Hi.", role=role) for role in roles], max_new_tokens=1)
    known = [{"role": role, "content": "Hi."} for role in ("system", "user", "assistant", "user")]
    assert prompts == [engine.render_chat(known)]


@pytest.mark.parametrize("messages", [[], [ChatMessage("")], [ChatMessage(" \n\t")], [ChatMessage(blocks=[])] * 2])
def test_messages_without_text_are_refused(messages: list[ChatMessage], llm: CocoaLLM, engine: CocoaEngine) -> None:
    opened = CocoaLLM(engine=engine, system_prompt="Be brief.", max_new_tokens=1)
    formatted = CocoaLLM(engine=engine, messages_to_prompt=llama_index_default, max_new_tokens=1)
    for one in (llm, opened, formatted):
        with pytest.raises(PromptError, match="the conversation is empty"):
            one.chat(messages)
    assert opened.chat([ChatMessage("Hi"), *messages]).message.content


async def _two_turns(how: str, chat: SimpleChatEngine) -> list[str]:
    answers = []
    for question in ("Name a colour.", "And another."):
        if how == "chat":
            answers.append((await asyncio.to_thread(chat.chat, question)).response)
        elif how == "stream_chat":
            stream = await asyncio.to_thread(chat.stream_chat, question)
            answers.append("".join(await asyncio.to_thread(list, stream.response_gen)))
        elif how == "achat":
            answers.append((await chat.achat(question)).response)
        else:
            astream = await chat.astream_chat(question)
            answers.append("".join([delta async for delta in astream.async_response_gen()]))
    return answers


@pytest.mark.parametrize("how", ["chat", "stream_chat", "achat", "astream_chat"])
async def test_risk_does_not_leak_into_the_second_turn(how: str, engine: CocoaEngine) -> None:
    prompts: list[str] = []

    def prints_everything(messages: Sequence[ChatMessage]) -> str:
        prompts.append(llama_index_default(messages))  # LlamaIndex's own prints a message's additional_kwargs
        return prompts[-1]

    llm = CocoaLLM(engine=engine, max_new_tokens=6, messages_to_prompt=prints_everything)
    chat = SimpleChatEngine.from_defaults(llm=llm)
    first, _ = await _two_turns(how, chat)
    assert prompts[1] == f"user: Name a colour.\nassistant: {first}\nuser: And another.\nassistant: "
    assert all(not message.additional_kwargs for message in chat.chat_history)
