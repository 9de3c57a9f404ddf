"""get_risk_callback(): every answer once, whatever way it was asked for."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_risk, get_risk_callback, get_spans
from tests.helpers.forward_passes import failing
from tests.helpers.in_threads import join, start
from tests.helpers.reports import without_run

pytestmark = pytest.mark.also_remote


@pytest.mark.slow
def test_it_collects_answers_of_both_models(
    quick_chat: ChatCocoa, quick_llm: CocoaLLM, quick_answer: AIMessage
) -> None:
    with get_risk_callback() as risk:
        assert risk.max_risk == 0.0
        message = quick_chat.invoke("Who invented the telephone?")
        quick_llm.invoke("Once")
        list(quick_llm.stream("Once"))
    [first, second, third] = without_run(risk.reports)
    assert first == get_risk(message).to_dict() == get_risk(quick_answer).to_dict()
    assert second == third
    assert risk.max_risk == max(report.max_risk for report in risk.reports)
    quick_chat.invoke("Hello", max_tokens=1)
    assert len(risk.reports) == 3  # nothing after the block


def test_it_collects_batches(quick_chat: ChatCocoa, quick_llm: CocoaLLM) -> None:
    with get_risk_callback() as risk:
        quick_chat.batch(["a", "b", "c"], max_tokens=4)  # in threads
    assert len(risk.reports) == 3
    with get_risk_callback() as risk:
        quick_llm.batch(["a", "b", "c"], max_tokens=4)
    [a, b, c] = quick_llm.generate(["a", "b", "c"], max_tokens=4).generations
    assert without_run(risk.reports) == [get_risk(one[0]).to_dict() for one in (a, b, c)]


async def test_it_collects_async_calls(quick_chat: ChatCocoa, quick_llm: CocoaLLM) -> None:
    with get_risk_callback() as risk:
        await asyncio.gather(quick_chat.ainvoke("a", max_tokens=4), quick_chat.abatch(["b", "c"], max_tokens=4))
        await quick_llm.abatch(["a", "b"], max_tokens=4)
        async for _ in quick_chat.astream("d", max_tokens=4):
            pass
        async for _ in quick_llm.astream("d", max_tokens=4):
            pass
    assert len(risk.reports) == 7
    assert not any("partial" in report for report in risk.reports)


def test_it_collects_calls_deep_inside_chains_and_other_threads(quick_chat: ChatCocoa) -> None:
    agent = RunnableLambda(lambda text: quick_chat.invoke(text, max_tokens=4)) | (lambda message: message.content)
    with get_risk_callback() as risk:
        agent.batch(["a", "b"])
        copied = contextvars.copy_context()
        join([start(lambda: copied.run(agent.invoke, "c"))])
    assert len(risk.reports) == 3


def test_a_stream_left_early_leaves_a_partial_report(
    quick_chat: ChatCocoa, quick_llm: CocoaLLM, quick_answer: AIMessage, question: str
) -> None:
    with get_risk_callback() as risk:
        for number, _ in enumerate(quick_chat.stream(question)):
            if number == 1:
                break
        for _ in quick_llm.stream("Once"):
            break
    chat_report, llm_report = risk.reports
    assert chat_report.partial is True
    assert chat_report.spans == get_spans(quick_answer)[:2]
    assert chat_report.max_risk == max(span.risk or 0.0 for span in chat_report.spans)
    assert set(chat_report.to_dict()) == {*get_risk(quick_answer).to_dict(), "partial", "run_id"} - {
        *("model_name", "check", "claims", "sentences", "source_heads")
    }
    assert len(llm_report.spans) == 1
    assert risk.max_risk == max(chat_report.max_risk, llm_report.max_risk)


@pytest.mark.also_remote(False)
def test_an_error_in_mid_stream_leaves_a_partial_report(
    quick_engine: CocoaEngine, quick_chat: ChatCocoa, question: str
) -> None:
    with get_risk_callback() as risk:
        stream = quick_chat.stream(question)
        next(stream)
        with failing(quick_engine, RuntimeError("broken")):
            with pytest.raises(RuntimeError, match="broken"):
                list(stream)
            with pytest.raises(RuntimeError, match="broken"):
                quick_chat.invoke(question)  # nothing was decided: nothing to report
    [report] = risk.reports
    assert len(report.spans) == 1


def test_an_outer_block_sees_what_an_inner_one_sees_once(quick_chat: ChatCocoa) -> None:
    def asks_inside(text: str) -> str:
        with get_risk_callback() as inner:
            quick_chat.invoke(text, max_tokens=4)
        assert len(inner.reports) == 1
        return text

    with get_risk_callback() as outer:
        asks_inside("a")
        RunnableLambda(asks_inside).invoke("b")  # here the outer handler is attached to the chain as well
        quick_chat.invoke("c", max_tokens=4)
    assert len(outer.reports) == 3


def test_it_ends_with_the_block_also_after_an_error(quick_chat: ChatCocoa) -> None:
    with pytest.raises(KeyError), get_risk_callback() as risk:
        raise KeyError
    quick_chat.invoke("a", max_tokens=1)
    assert risk.reports == []


def test_a_block_may_be_left_in_another_context(quick_chat: ChatCocoa) -> None:
    for enters, leaves in ((contextvars.copy_context().run, _here), (_here, contextvars.copy_context().run)):
        block = get_risk_callback()
        risk = enters(block.__enter__)
        enters(quick_chat.invoke, "a", max_tokens=1)
        leaves(block.__exit__, None, None, None)
        assert len(risk.reports) == 1
        with get_risk_callback() as after:  # nothing is left in disorder
            quick_chat.invoke("a", max_tokens=1)
        assert len(after.reports) == 1


def _here(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def test_answers_of_other_models_are_left_alone() -> None:
    with get_risk_callback() as risk:
        FakeListChatModel(responses=["hello"]).invoke("Hi")
        next(FakeListChatModel(responses=["hello"]).stream("Hi"))
    assert risk.reports == []


def test_blocks_may_be_left_in_any_order(quick_chat: ChatCocoa) -> None:
    first, second = get_risk_callback(), get_risk_callback()
    outer, inner = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    quick_chat.invoke("a", max_tokens=1)
    second.__exit__(None, None, None)
    quick_chat.invoke("a", max_tokens=1)
    assert (len(outer.reports), len(inner.reports)) == (0, 1)


async def test_an_async_stream_left_early_leaves_a_partial_report(quick_chat: ChatCocoa, question: str) -> None:
    with get_risk_callback() as risk:
        stream = quick_chat.astream(question)
        await anext(stream)
        await stream.aclose()
    [report] = risk.reports
    assert report.partial is True


def test_reports_are_nobodys_but_the_handlers(quick_chat: ChatCocoa) -> None:
    with get_risk_callback() as outer, get_risk_callback() as inner:
        message = quick_chat.invoke("a", max_tokens=4)
    expected = get_risk(message).to_dict()
    for handler in (inner, outer):
        assert without_run(handler.reports) == [expected]
        handler.reports[0].spans.clear()
    assert get_risk(message).to_dict() == expected
