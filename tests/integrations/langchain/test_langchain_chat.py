"""ChatCocoa: messages, answers, streams, usage, options of a call, async."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.runnables.utils import add as added

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_integrations.chat_service import local
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, GenerationTimeoutError, get_risk, get_spans, risk_gate
from cocoa_integrations.langchain.messages import to_chat, to_entries
from tests.helpers.alike import close, token_counts
from tests.helpers.forward_passes import failing
from tests.helpers.reports import risk_report, to_dicts


def test_an_answer_is_the_engines_chat_answer(engine: CocoaEngine, answer: AIMessage, question: str) -> None:
    expected = engine.chat([{"role": "user", "content": question}], max_new_tokens=12)
    assert answer.content == expected.text  # the chat template is used and the prompt is not echoed
    assert get_risk(answer).to_dict() == risk_report(expected)
    assert answer.response_metadata["finish_reason"] == expected.finish_reason == "length"
    assert answer.response_metadata["model_name"] == engine.model_name


def test_each_chunk_is_one_span_the_last_is_the_report_and_they_add_up(
    chunks: list[AIMessageChunk], answer: AIMessage
) -> None:
    (*parts, last), whole = chunks, added(chunks)
    spans = get_risk(answer).to_dict()["spans"]
    assert len(parts) > 2
    assert [to_dicts(get_spans(chunk)) for chunk in parts] == [[span] for span in spans]
    assert [chunk.content for chunk in parts] == [span["text"] for span in spans]
    assert all(not chunk.response_metadata and chunk.usage_metadata is None for chunk in parts)
    assert (last.content, last.chunk_position) == ("", "last")
    assert get_risk(last).to_dict() == get_risk(answer).to_dict()
    assert (whole.content, whole.additional_kwargs) == (answer.content, answer.additional_kwargs)
    assert whole.response_metadata == answer.response_metadata
    assert token_counts(whole.usage_metadata) == token_counts(answer.usage_metadata)
    for message in (answer, whole):
        assert message.response_metadata["model_provider"] == "cocoa"
        assert message.content_blocks == [{"type": "text", "text": message.text}]


def test_an_answer_ends_by_itself(chat: ChatCocoa) -> None:
    answer = chat.invoke("What is the capital of France?")
    assert answer.response_metadata["finish_reason"] == "eos"
    assert answer.content == "The capital of France is Paris."


def test_leaving_a_stream_early_stops_the_engine(quick_chat: ChatCocoa, spy: Any, question: str) -> None:
    for _ in quick_chat.stream(question):
        break
    [stream] = spy.streams
    assert next(stream, None) is None
    assert stream.generation is None


def test_usage_counts_the_prompt_as_the_template_makes_it(
    engine: CocoaEngine, chat: ChatCocoa, answer: AIMessage, question: str
) -> None:
    prompt = len(engine.encode_chat([{"role": "user", "content": question}]))
    counts = {"input_tokens": prompt, "output_tokens": 12, "total_tokens": prompt + 12}
    assert token_counts(answer.usage_metadata) == counts
    assert chat.get_num_tokens_from_messages([HumanMessage(question)]) == prompt


def test_tokens_are_counted_by_the_models_own_tokenizer(engine: CocoaEngine, chat: ChatCocoa) -> None:
    text = "naïve café 🙂"
    assert chat.get_token_ids(text) == engine.encode(text, add_special_tokens=False)
    assert ChatCocoa(engine=engine, custom_get_token_ids=lambda text: [1, 2]).get_num_tokens(text) == 2


def test_logprobs_can_be_left_out_and_switched_on_as_scorers_do(quick_engine: CocoaEngine) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=1, logprobs=False)
    assert "logprobs" not in chat.invoke("Hi").response_metadata
    chat.logprobs = True
    assert chat.invoke("Hi").response_metadata["logprobs"]["content"]
    assert "logprobs" not in chat.invoke("Hi", logprobs=False).response_metadata


def test_stop_texts_of_the_model_and_of_a_call(engine: CocoaEngine, answer: AIMessage, question: str) -> None:
    assert " telephone" in answer.content
    assert " invention" in answer.content
    chat = ChatCocoa(engine=engine, max_tokens=12, stop=[" telephone"])
    cut = chat.invoke(question)
    assert cut.content == answer.content.split(" telephone")[0]
    assert cut.response_metadata["finish_reason"] == "stop"
    assert to_dicts(get_spans(cut))[-1]["end"] == len(cut.content)
    assert chat.invoke(question, stop=[" invention"]).content == answer.content.split(" invention")[0]
    assert added(list(chat.stream(question))).content == cut.content
    assert chat.invoke(question, stop=[]).content == answer.content
    assert chat.bind(stop=[" invention"]).invoke(question).content == answer.content.split(" invention")[0]


def test_every_setting_can_be_overridden_for_a_call(
    quick_chat: ChatCocoa, quick_answer: AIMessage, question: str
) -> None:
    first = to_dicts(get_spans(quick_answer))[0]
    for message in (
        quick_chat.invoke(question, alpha=0.5),
        quick_chat.bind(alpha=0.5).invoke(question),
        added(list(quick_chat.stream(question, alpha=0.5))),
        quick_chat.batch([question], alpha=0.5)[0],
    ):
        expected = pytest.approx(first["log_prob"] * (1 + 0.5 * first["f_mlds"]))
        assert to_dicts(get_spans(message))[0]["score"] == expected
    assert get_risk(quick_chat.invoke(question, method="greedy", max_tokens=2)).method == "greedy"
    assert quick_chat.invoke(question, max_new_tokens=2).usage_metadata["output_tokens"] == 2
    assert quick_chat.alpha == 2.5


def test_batches_answer_as_single_calls_do(quick_chat: ChatCocoa, quick_answer: AIMessage, question: str) -> None:
    questions = ["Name a colour.", question, "What is 2 + 2?", "Say hello.", question]
    answers = quick_chat.batch(questions, max_tokens=12)
    assert answers[1].content == answers[4].content == quick_answer.content
    assert close(get_risk(answers[4]).to_dict(), get_risk(quick_answer).to_dict())
    assert len({message.content for message in answers}) == 4


async def test_async_calls_answer_as_sync_ones(quick_chat: ChatCocoa, quick_answer: AIMessage, question: str) -> None:
    async def streamed() -> Any:
        return added([chunk async for chunk in quick_chat.astream(question)])

    one, whole, (first, second) = await asyncio.gather(
        quick_chat.ainvoke(question), streamed(), quick_chat.abatch([question, question])
    )
    for message in (one, whole, first, second):
        assert message.content == quick_answer.content
        assert close(get_risk(message).to_dict(), get_risk(quick_answer).to_dict())


def test_text_streams_with_the_risk_beside_it(chat: ChatCocoa, answer: AIMessage, question: str) -> None:
    chain = (
        ChatPromptTemplate.from_messages([("human", "{question}")])
        | chat
        | RunnableParallel(text=StrOutputParser(), risk=RunnableLambda(get_risk))
    )
    result = chain.invoke({"question": question})
    assert result == {"text": answer.content, "risk": get_risk(answer)}
    assert (chain | risk_gate(1.0)).invoke({"question": question}) == result
    abstained = (chain | risk_gate(0.0, on_risk="abstain", answer="?")).invoke({"question": question})
    assert (abstained["text"], get_risk(abstained).max_risk) == ("?", get_risk(answer).max_risk)
    pieces = [piece for piece in chain.stream({"question": question}) if piece.get("text")]
    assert len(pieces) > 2
    assert "".join(piece["text"] for piece in pieces) == answer.content


def test_risk_metadata_never_reaches_a_later_prompt(
    quick_engine: CocoaEngine, quick_chat: ChatCocoa, spy: Any, quick_answer: AIMessage, question: str
) -> None:
    conversation = [SystemMessage("Be brief."), HumanMessage(question), quick_answer, HumanMessage("And the radio?")]
    quick_chat.invoke(conversation, max_tokens=1)
    [messages] = spy.asked("chat")
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
        {"role": "assistant", "content": quick_answer.content},
        {"role": "user", "content": "And the radio?"},
    ]
    assert "cocoa" not in quick_engine.render_chat(messages)


def test_messages_are_trimmed_by_the_models_own_count(quick_chat: ChatCocoa) -> None:
    messages = [HumanMessage("One?"), AIMessage("1"), HumanMessage("Two?"), AIMessage(""), HumanMessage("Three?")]
    limit = quick_chat.get_num_tokens_from_messages(messages[2:])
    kept = trim_messages(messages, max_tokens=limit, token_counter=quick_chat, strategy="last", start_on="human")
    assert kept == messages[2:]
    assert trim_messages(messages, max_tokens=1, token_counter=quick_chat) == []
    assert quick_chat.get_num_tokens_from_messages([]) == 0


def test_an_empty_conversation_is_refused_before_any_work(quick_chat: ChatCocoa, spy: Any) -> None:
    for empty in ([], "", [HumanMessage(" \n")]):
        with pytest.raises(PromptError, match="empty"):
            quick_chat.invoke(empty)
    assert spy.calls == []


def test_a_timeout_raises_so_that_fallbacks_start(
    quick_engine: CocoaEngine, quick_chat: ChatCocoa, question: str
) -> None:
    hasty = ChatCocoa(engine=quick_engine, max_tokens=12, timeout=1e-6)
    with pytest.raises(GenerationTimeoutError, match="within 1e-06 s"):
        hasty.invoke(question)
    with pytest.raises(TimeoutError):
        list(quick_chat.stream(question, timeout=1e-6))
    assert hasty.with_fallbacks([quick_chat]).invoke(question).content
    assert hasty.invoke(question, timeout=600.0).content


def test_running_out_of_gpu_memory_is_tried_again(
    quick_engine: CocoaEngine,
    quick_chat: ChatCocoa,
    monkeypatch: pytest.MonkeyPatch,
    quick_answer: AIMessage,
    question: str,
) -> None:
    monkeypatch.setattr(local, "RETRY_PAUSE", 0.0)
    failures: list[str] = []

    def failing_twice(name: str) -> Any:
        method = getattr(quick_engine, name)

        def fails_twice(*args: Any, **options: Any) -> Any:
            if len(failures) < 2:
                failures.append(name)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return method(*args, **options)

        return fails_twice

    monkeypatch.setattr(quick_engine, "chat", failing_twice("chat"))
    monkeypatch.setattr(quick_engine, "stream_chat", failing_twice("stream_chat"))
    assert quick_chat.invoke(question).content == quick_answer.content
    assert failures == ["chat", "chat"]
    failures.clear()
    assert added(list(quick_chat.stream(question))).content == quick_answer.content
    assert failures == ["stream_chat", "stream_chat"]
    failures.clear()
    with pytest.raises(torch.OutOfMemoryError):
        ChatCocoa(engine=quick_engine, max_tokens=12, max_retries=1).invoke(question)


def test_invoke_hands_spans_to_callbacks_when_streaming_is_on(
    quick_engine: CocoaEngine, question: str, quick_answer: AIMessage, live: Any
) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, streaming=True, risk_metadata="full")
    message = chat.invoke(question, config={"callbacks": [live]})
    assert message.content == quick_answer.content
    assert get_risk(message).to_dict() == get_risk(quick_answer).to_dict()
    assert live.spans == to_dicts(get_spans(quick_answer))
    assert len(list(ChatCocoa(engine=quick_engine, max_tokens=12, streaming=False).stream(question))) == 1


def test_a_stream_that_began_is_not_begun_again(
    quick_engine: CocoaEngine, quick_chat: ChatCocoa, monkeypatch: pytest.MonkeyPatch, spy: Any, question: str
) -> None:
    monkeypatch.setattr(local, "RETRY_PAUSE", 0.0)
    stream = quick_chat.stream(question)
    next(stream)
    error = torch.OutOfMemoryError("CUDA out of memory")
    with failing(quick_engine, error), pytest.raises(torch.OutOfMemoryError):
        list(stream)
    assert len(spy.streams) == 1


def test_stream_usage_leaves_the_usage_out(quick_engine: CocoaEngine) -> None:
    chat, silent = (ChatCocoa(engine=quick_engine, max_tokens=3, stream_usage=usage) for usage in (None, False))
    for model, options, told in (
        (chat, {}, True),
        (chat, {"stream_usage": False}, False),
        (chat.bind(stream_usage=False), {}, False),
        (silent, {}, False),
        (silent, {"stream_usage": True}, True),
    ):
        assert any(chunk.usage_metadata for chunk in model.stream("Hi", **options)) == told
    assert silent.invoke("Hi").usage_metadata is not None
    assert silent._identifying_params != chat._identifying_params
    assert ChatCocoa(stream_usage=None) == ChatCocoa()
    with pytest.raises(ConfigError, match="stream_usage"):
        chat.invoke("Hi", stream_usage="perhaps")
    llm = CocoaLLM(engine=quick_engine, max_tokens=3, streaming=True)
    [quiet], [loud] = (llm.generate(["Hi"], stream_usage=usage).generations[0] for usage in (False, True))
    assert "usage_metadata" not in quiet.generation_info
    assert loud.generation_info["usage_metadata"]["output_tokens"] == 3
    assert "".join(llm.stream("Hi", stream_usage=False)) == "".join(llm.stream("Hi"))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (SystemMessage("a"), {"role": "system", "content": "a"}),
        (HumanMessage("a"), {"role": "user", "content": "a"}),
        (HumanMessage("a", name="Ada"), {"role": "user", "content": "a", "name": "Ada"}),
        (AIMessage("a"), {"role": "assistant", "content": "a"}),
        (AIMessageChunk("a"), {"role": "assistant", "content": "a"}),
        (ChatMessage("a", role="developer"), {"role": "developer", "content": "a"}),
        (HumanMessage(["a", {"type": "text", "text": "b"}]), {"role": "user", "content": "ab"}),
    ],
)
def test_known_messages(message: BaseMessage, expected: dict[str, str]) -> None:
    assert to_chat([message]) == [expected]


def test_the_name_of_a_call_is_that_of_its_result() -> None:
    call = {"name": "f", "args": {}}
    calls = AIMessage("", tool_calls=[{**call, "id": None}, {**call, "id": "1"}])
    entries = to_entries([HumanMessage("a"), calls, ToolMessage("b", tool_call_id="1"), HumanMessage("c")])
    assert [entry.get("name") for entry in entries] == [None, None, "f", None]
    with pytest.raises(PromptError, match="cannot hold messages of type FunctionMessage"):
        to_chat([HumanMessage("Hi"), FunctionMessage("a", name="f")])
