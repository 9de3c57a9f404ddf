"""Our instrumentation events, and the collector that gets the risk past LlamaIndex's own return types."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.llms import ChatMessage
from llama_index.core.types import Thread

from cocoa_engine import ConfigError
from cocoa_engine.report import RISK_KEY
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent, CocoaSpanEvent, RiskScores, collect_risk
from tests.helpers.in_threads import join, start
from tests.helpers.llama_index_helpers import PROMPT, Listener
from tests.helpers.reports import all_spans, risk_report, to_dicts, without_run

QUESTION = [ChatMessage("Name a colour.")]


def test_one_event_a_span_and_one_an_answer(llm: CocoaLLM, heard: Listener) -> None:
    response = llm.complete(PROMPT)
    (risk,) = heard.of(CocoaRiskEvent)
    spans = heard.of(CocoaSpanEvent)
    assert without_run([risk.model_dump()["report"]]) == [risk_report(risk.generation)]
    assert [risk_report(risk.generation)] == [response.additional_kwargs[RISK_KEY]]
    assert risk.report.run_id == risk.span_id
    assert json.loads(risk.model_dump_json())["report"] == risk.report.to_dict()
    assert CocoaRiskEvent.model_validate({"report": risk.report.to_dict(), "generation": None}).report == risk.report
    assert len(spans) > 1
    assert [event.number for event in spans] == list(range(len(risk.generation.spans)))
    assert to_dicts(event.span for event in spans) == all_spans(risk.generation)
    assert {event.span_id for event in spans} == {risk.span_id}
    assert risk.span_id.startswith("CocoaLLM.complete-")
    for event in (risk, *spans):
        assert json.loads(json.dumps(event.model_dump(mode="json")))["class_name"] == type(event).__name__


@pytest.mark.also_remote
def test_span_events_are_live_while_streaming_and_an_abandoned_answer_has_no_risk_event(
    llm: CocoaLLM, heard: Listener
) -> None:
    next(stream := llm.stream_complete(PROMPT))
    stream.close()
    assert len(heard.of(CocoaSpanEvent)) == 1
    assert not heard.of(CocoaRiskEvent)
    heard.events.clear()
    for number, chunk in enumerate(llm.stream_complete(PROMPT), start=1):
        spans, risks = heard.of(CocoaSpanEvent), heard.of(CocoaRiskEvent)
        if RISK_KEY in chunk.additional_kwargs:
            assert len(risks) == 1
        else:
            assert (len(spans), len(risks)) == (number, 0)
            assert spans[-1].span.text == chunk.delta
    assert len({event.span_id for event in heard.of(CocoaSpanEvent, CocoaRiskEvent)}) == 1


@pytest.mark.also_remote
def test_collects_what_is_asked_for_inside_the_block(llm: CocoaLLM) -> None:
    llm.complete(PROMPT)
    with collect_risk() as reports:
        first = llm.complete(PROMPT)
        *_, second = llm.stream_chat(QUESTION)
    llm.complete(PROMPT)
    assert without_run(reports) == [first.additional_kwargs[RISK_KEY], second.additional_kwargs[RISK_KEY]]


def test_a_failed_generation_is_not_reported_and_ends_its_block(llm: CocoaLLM, heard: Listener) -> None:
    def broken(ids: Any, scores: Any) -> Any:
        raise RuntimeError("processor")

    with pytest.raises(RuntimeError, match="processor"), collect_risk() as reports:
        llm.complete(PROMPT, logits_processor=broken)
    llm.complete(PROMPT, max_new_tokens=1)
    assert reports == []
    assert len(heard.of(CocoaRiskEvent)) == 1


def test_blocks_nest_and_keep_the_latest_reports(llm: CocoaLLM) -> None:
    collector = collect_risk(max_reports=1)
    with collect_risk() as outer, collector as latest:
        llm.complete(PROMPT, max_new_tokens=1)
        with collect_risk() as inner:
            llm.complete(PROMPT)
        llm.complete(PROMPT, max_new_tokens=1)
    assert len(outer) == 3
    assert (inner, latest) == ([outer[1]], [outer[2]])
    assert collector.max_risk == max(report.max_risk or 0.0 for report in outer)
    inner[0].spans.clear()
    assert outer[1].spans  # a report of its own
    with pytest.raises(ConfigError, match="max_reports"):
        collect_risk(max_reports=0)


async def test_tasks_do_not_see_each_other(llm: CocoaLLM) -> None:
    async def ask(prompt: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        with collect_risk() as reports:
            response = await llm.acomplete(prompt)
        return reports, response.additional_kwargs[RISK_KEY]

    for reports, own in await asyncio.gather(ask(PROMPT), ask("2 + 2 =")):
        assert without_run(reports) == [own]


def test_follows_llama_index_threads_and_copied_contexts(llm: CocoaLLM) -> None:
    def ask() -> None:
        llm.complete(PROMPT, max_new_tokens=1)

    with collect_risk() as reports:
        bare = threading.Thread(target=ask)
        for thread in (bare, Thread(target=ask), threading.Thread(target=contextvars.copy_context().run, args=(ask,))):
            thread.start()
            join([thread])
    assert len(reports) == 2  # all but the bare one, which starts from an empty context


@pytest.mark.also_remote
def test_an_answer_belongs_to_the_block_that_asked(llm: CocoaLLM) -> None:
    with collect_risk() as asked:
        stream = llm.stream_complete(PROMPT)
    with collect_risk() as read:
        join([start(lambda: list(stream))])
    assert len(asked) == 1
    assert read == []


def _in_fresh_contexts(stream: Iterator[Any]) -> list[Any]:
    """Each ``next`` in a context of its own: whatever a generator sets there is lost, or breaks its reset."""
    chunks: list[Any] = []
    while chunk := contextvars.copy_context().run(next, stream, None):
        chunks.append(chunk)
    return chunks


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_sync_streams_set_no_context_variable(method: str, llm: CocoaLLM, heard: Listener) -> None:
    with collect_risk() as reports:
        stream = getattr(llm, method)(PROMPT if method == "stream_complete" else QUESTION)
        before = dict(contextvars.copy_context().items())
        next(stream)
        after = dict(contextvars.copy_context().items())
        assert {name: value for name, value in after.items() if name not in before or before[name] is not value} == {}
        assert active_span_id.get() is None
        chunks = _in_fresh_contexts(stream)
    assert without_run(reports) == [chunks[-1].additional_kwargs[RISK_KEY]]
    assert len(heard.of(CocoaRiskEvent)) == 1


@pytest.mark.also_remote
@pytest.mark.parametrize("streamed", [False, True])
def test_opentelemetry_gets_an_event(llm: CocoaLLM, streamed: bool) -> None:
    helpers = pytest.importorskip("tests.helpers.span_handlers")
    events, spans, root = helpers.Events(), helpers.Spans(), get_dispatcher()
    handler = RiskScores(logger_provider=events.provider, threshold=0.0)
    root.add_event_handler(handler)
    try:
        with spans.tracer.start_as_current_span("outer") as outer:
            chunks = llm.stream_complete(PROMPT) if streamed else [llm.complete(PROMPT)]
        *_, last = chunks
    finally:
        root.event_handlers.remove(handler)
    [event] = events.records()
    assert event.event_name == "gen_ai.evaluation.result"
    assert event.attributes["gen_ai.evaluation.name"] == "hallucination_risk"
    assert event.attributes["gen_ai.evaluation.score.value"] == last.additional_kwargs[RISK_KEY]["max_risk"]
    assert event.attributes["gen_ai.evaluation.score.label"] == "fail"
    assert event.span_id == outer.get_span_context().span_id
