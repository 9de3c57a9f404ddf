"""Limits of risk for gates, retries and scores, of spans, claims, sentences and answers; no number passes none."""

from __future__ import annotations

import inspect
import json
import math
import pickle
from collections.abc import Iterator
from typing import Any, get_args
from unittest.mock import MagicMock
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import RunnableGenerator
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.schema import QueryBundle
from pydantic import BaseModel

from cocoa_engine import ConfigError, DataError, HallucinationRiskError, UnitLevel
from cocoa_engine.report import RiskReport, measured_text
from cocoa_integrations._shared.limits import Limit, highest
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations._shared.tries import Measure, OnRisk, RetryPlan, Tries
from cocoa_integrations.judging import Judgement
from cocoa_integrations.langchain import RiskCallbackHandler, max_risk, risk_gate, with_citations, with_risk_retry
from cocoa_integrations.langchain.agents import RiskMiddleware, RiskyToolCalls
from cocoa_integrations.llama_index import CocoaLLM, RiskCitationQueryEngine, RiskRetryQueryEngine
from cocoa_integrations.reports import get_risk
from cocoa_integrations.tool_calling import Plan, ToolRequest, parts_of_report
from cocoa_integrations.tracing import Scoring
from tests.helpers.alike import all_spans, made_report, risk_report
from tests.helpers.llama_index_helpers import Finds
from tests.helpers.made_up_answers import generation
from tests.helpers.tiny_models import endless

PARTS = (("The Seine", 0.6), (" is", 0.9), (" long", 0.2), (".", 0.99), (" It ends", 0.3), (".", 0.1))
TEXT = "".join(text for text, _ in PARTS)


def report(**changes: Any) -> RiskReport:
    return RiskReport.of(generation(*PARTS)).with_values(**{"threshold": 0.5, **changes})


@pytest.mark.parametrize("wrong", ["0.5", "high", 10**400, [1], {}, True])
@pytest.mark.parametrize("name", ["max_risk", "threshold", "claims"])
def test_a_number_of_another_type_is_refused(name: str, wrong: object) -> None:
    wire = report().to_dict()
    value = [{**wire["claims"][0], "risk": wrong}] if name == "claims" else wrong
    with pytest.raises(DataError, match=r"valid|large"):
        RiskReport.from_wire({**wire, name: value})


def test_a_compact_report_keeps_them_small() -> None:
    full = report()
    assert [(one.text, one.risk) for one in full.check] == [("Seine", 0.6), ("ends", 0.3)]
    assert [TEXT[one.start : one.end] for one in full.claims] == ["Seine", "long", "ends"]
    assert [TEXT[one.start : one.end] for one in full.sentences] == ["The Seine is long.", "It ends."]
    compact = full.compact(TEXT)
    wire = compact.to_dict()
    assert RiskReport.from_wire(wire) == compact
    assert compact.sentences == full.sentences
    assert "claims" not in wire
    assert not any("text" in span for span in wire["spans"])
    check = full.check[0]
    assert wire["check"][0] == {
        "text": "Seine",
        "start": check.start,
        "end": check.end,
        "risk": check.risk,
        "reasons": ["the model was unsure"],
    }
    expanded = compact.expanded(TEXT)
    assert [span.text for span in expanded.spans] == [text for text, _ in PARTS]
    assert Limit(0.5, unit="claim").reached(expanded)
    assert all(span.text is None for span in compact.expanded("another text").spans)


@pytest.mark.parametrize(
    ("unit", "threshold", "risky"),
    [
        ("span", 0.95, ["."]),
        ("claim", 0.95, []),
        ("claim", 0.5, ["Seine"]),
        ("claim", 0.25, ["Seine", "ends"]),
        ("sentence", 0.35, ["The Seine is long."]),
        ("sentence", 0.5, []),
    ],
)
def test_a_threshold_applies_to_spans_claims_or_sentences(unit: Any, threshold: float, risky: list[str]) -> None:
    limit = Limit(threshold, unit=unit)
    assert [(part.text or "").strip() for part, _ in limit.risky(report().spans)] == risky
    assert limit.reached(report()) is bool(risky)


def test_spans_stand_in_where_a_text_is_missing() -> None:
    """The text of a compact report's spans is lost with that of its message."""
    spans = [span.without("text") for span in report().spans]
    assert measured_text(spans, lambda span: span.risk) is None
    assert Limit(0.95, unit="claim").reached(report(spans=spans))


@pytest.mark.parametrize("wire", [None, [], "report", {}, {"spans": [{}]}, {**report().to_dict(), "spans": [1]}])
def test_what_is_no_report_is_refused(wire: Any) -> None:
    with pytest.raises(DataError):
        RiskReport.from_wire(wire)


def test_errors_name_the_claim() -> None:
    error = Limit(0.5, unit="claim").error(report())
    assert isinstance(error, HallucinationRiskError)
    assert ("'Seine'" in str(error), error.value) == (True, 0.6)
    with pytest.raises(ConfigError, match="claim"):
        Limit(0.5, unit="clam")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="answer_risk"):
        Limit(0.5, "answer_risk", unit="claim")


def test_a_score_counts_the_visible_spans_of_the_answer_only() -> None:
    texts, parts = ("So", "Hello", "\n"), ("reasoning", "answer", "answer")
    spans = [
        span.with_values(text=text, part=part)
        for span, text, part in zip(made_report([0.9, 0.3, 0.8]).spans, texts, parts, strict=True)
    ]
    given = RiskReport.of_spans(spans, risk_source="calibrator")
    assert (Scoring(threshold=0.5).score(given), Scoring(threshold=0.5).label(given)) == (0.3, "pass")
    assert Scoring(threshold=0.3).label(given) == "fail"
    assert Scoring(threshold=0.5).score(RiskReport.of_spans(spans[2:])) == 0.0


ANSWER = generation(*PARTS)


def message_of(**more: Any) -> AIMessage:
    return AIMessage(ANSWER.text, response_metadata={"cocoa_risk": {**risk_report(ANSWER), "threshold": 0.5, **more}})


def test_a_gate_compares_the_risk_of_the_answer_where_there_is_one() -> None:
    low, high = (message_of(answer_risk=risk, answer_threshold=0.7) for risk in (0.6, 0.7))
    assert risk_gate().invoke(low) is low
    with pytest.raises(HallucinationRiskError, match="answer_risk of the answer"):
        risk_gate().invoke(high)
    gate = risk_gate(on_risk="abstain").invoke(high).response_metadata["cocoa_risk"]["gate"]
    assert gate == {"action": "abstain", "metric": "answer_risk", "threshold": 0.7, "value": 0.7}
    for spans in (risk_gate(0.9), risk_gate(unit="claim"), risk_gate(metric="risk", threshold=0.9)):
        with pytest.raises(HallucinationRiskError, match=r"^risk of"):
            spans.invoke(low)
    assert risk_gate(0.9, on_risk="mark").invoke(low).text == "The Seine [[is]] long. It ends."


@pytest.mark.parametrize(
    ("unit", "threshold", "mark", "text"),
    [
        ("claim", None, "[[{text}]]", "The [[Seine]] is long. It ends."),
        ("claim", 0.25, "[[{text}|{value:.1f}]]", "The [[Seine|0.6]] is long. It [[ends|0.3]]."),
        ("sentence", 0.35, "<{text}>", "<The Seine is long>. It ends."),
        ("span", 0.5, "<{text}>", "<The Seine> <is> long. It ends."),
    ],
)
def test_marks_of_an_answer_and_of_a_stream(unit: Any, threshold: float | None, mark: str, text: str) -> None:
    gate = risk_gate(threshold, unit=unit, on_risk="mark", mark=mark)
    marked = gate.invoke(message_of())
    assert marked.text == text
    entry = marked.response_metadata["cocoa_risk"]["gate"]
    assert (entry.get("unit", "span"), entry["threshold"]) == (unit, threshold or 0.5)
    assert ("unit" in entry) == (unit != "span")

    def chunks(given: Iterator[Any]) -> Iterator[AIMessageChunk]:
        for span in all_spans(ANSWER):
            yield AIMessageChunk(span["text"], additional_kwargs={"cocoa_spans": [span]})
        yield AIMessageChunk("", response_metadata=message_of().response_metadata, chunk_position="last")

    assert "".join(chunk.text for chunk in (RunnableGenerator(chunks) | gate).stream("")) == text


def test_middleware_takes_the_unit() -> None:
    by_claim = RiskMiddleware(0.8, unit="claim")
    assert by_claim.limit.unit == "claim"
    assert by_claim.name != RiskMiddleware(0.8).name
    report = RiskReport.of(ANSWER)
    assert not by_claim.limit.reached(report)
    assert RiskMiddleware(0.8).limit.reached(report)


HIGH = 1.0
"""A threshold above every finite value here."""

NOT_FINITE = pytest.mark.parametrize("risk", [math.nan, math.inf])


def report_with(risk: float) -> RiskReport:
    """The report of an answer whose second span has this risk."""
    report = RiskReport.of(generation(("Dune is by ", 0.1), ("Frank", risk), (" Herbert", 0.2)))
    json.dumps(report.to_dict(), allow_nan=False)
    return report


def message_with(risk: float, **more: Any) -> AIMessage:
    return AIMessage(
        "Dune is by Frank Herbert", response_metadata={"cocoa_risk": {**report_with(risk).to_dict(), **more}}
    )


@pytest.mark.parametrize("risk", [math.nan, math.inf, -math.inf])
def test_a_gate_stops_what_a_report_calls_harmless(risk: float) -> None:
    """A report may come from elsewhere: what it says of a risk that is no number does not count."""
    message = message_with(0.1, threshold=0.6)
    span = message.response_metadata["cocoa_risk"]["spans"][1]
    span.update(risk=risk, flagged=False)
    for gate in (risk_gate(metric="risk"), risk_gate(HIGH)):
        with pytest.raises(HallucinationRiskError, match="'Frank' is inf"):
            gate.invoke(message)


@NOT_FINITE
def test_a_gate_stops(risk: float) -> None:
    message = message_with(risk)
    with pytest.raises(HallucinationRiskError, match="'Frank' is inf"):
        risk_gate(HIGH).invoke(message)
    marked = risk_gate(HIGH, on_risk="mark").invoke(message)
    assert marked.content == "Dune is by [[Frank]] Herbert"
    json.dumps(marked.response_metadata, allow_nan=False)
    assert risk_gate(HIGH).invoke(message_with(0.9)).content == "Dune is by Frank Herbert"
    assert max_risk(message) == math.inf


@NOT_FINITE
def test_the_middleware_stops(risk: float) -> None:
    model = GenericFakeChatModel(messages=iter([message_with(risk)]))
    agent = create_agent(model, tools=[], middleware=[RiskMiddleware(HIGH, on_risk="abstain")])
    state = agent.invoke({"messages": [("user", "Who wrote Dune?")]})
    assert state["messages"][-1].text == "I don't know."
    entry = state["cocoa_risks"][0]
    assert (entry["action"], entry["value"], entry["attempts"]) == ("abstain", None, [None])
    json.dumps(state["cocoa_risks"], allow_nan=False)


@NOT_FINITE
def test_a_tool_is_not_called(risk: float) -> None:
    answer = generation(('{"city": "', 0.1), ("Paris", risk), ('"}', 0.1))
    plan = Plan(ToolRequest.of(response_format={"type": "json_object"}), endless())
    city = parts_of_report(answer, plan, Split("", 0, None, answer), [])["fields"]["$.city"].to_dict()
    json.dumps(city, allow_nan=False)
    assert city["risk"] is None
    call = {"name": "weather", "args": {"city": "Paris"}, "id": "1", "type": "tool_call"}
    risks = {"tool_calls": [{"id": "1", "name": "weather", "risk": None, "error": None, "arguments": {"city": city}}]}
    message = message_with(0.1, **risks).model_copy(update={"tool_calls": [call]})
    assert RiskyToolCalls(HIGH).values(call, [message]) == {"city": math.inf}


def retry_plan(
    threshold: float | None = None, max_tries: int = 3, measure: Any = None, on_risk: Any = "keep"
) -> RetryPlan:
    """The plan of attempts that differ in alpha."""
    return RetryPlan(
        alpha=1.0,
        retriever=None,
        top_k=3,
        has_second=False,
        is_same=lambda step: not step,
        threshold=threshold,
        max_tries=max_tries,
        settings=None,
        alphas=None,
        top_k_growth=None,
        measure=measure,
        on_risk=on_risk,
        mark="[[{text}]]",
        answer="I don't know.",
    )


@NOT_FINITE
@pytest.mark.parametrize("measure", ["max_risk", "mean_risk"])
def test_a_retry_goes_on_and_prefers_a_finite_risk(risk: float, measure: Any) -> None:
    tries = Tries[str](retry_plan(HIGH, measure=measure))
    assert not tries.add("a", report_with(risk))
    assert not tries.add("raw", report_with(0.1).with_values(**{measure: risk}))
    assert tries.add("b", report_with(0.1))
    best, history = tries.best()
    assert best == "b"
    json.dumps([{**entry, "cocoa_risk": None} for entry in history], allow_nan=False)


@NOT_FINITE
def test_a_judge_a_score_a_collector_and_the_answer_as_a_whole(risk: float) -> None:
    report, handler = report_with(risk), RiskCallbackHandler()
    judgement, scoring = Judgement(risk, "max_risk", HIGH, report), Scoring(threshold=HIGH)
    assert (judgement.passing, scoring.label(report)) == (False, "fail")
    assert "'Frank' (inf)" in judgement.comment
    assert scoring.explanation(report).endswith("the riskiest claim is 'Frank Herbert'")
    handler.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message_with(risk))]]), run_id=uuid4())
    assert handler.max_risk == math.inf
    compact = report.compact()
    assert [part.text for part, _ in Limit(HIGH).risky(compact.spans)] == ["Frank"]
    assert (compact.max_risk, compact.mean_risk) == (None, None)
    answer = generation(("Frank", 0.1)).model_copy(update={"answer_risk": risk, "answer_threshold": 0.5})
    report = RiskReport.of(answer)
    json.dumps(report.to_dict(), allow_nan=False)
    assert Limit(HIGH, "answer_risk").reached(report)
    assert not Tries[str](retry_plan(HIGH, measure="answer_risk")).add("a", report)


def test_the_rest_of_the_metadata_is_json() -> None:
    answer = generation(("a", 0.1))
    certain = answer.spans[0].model_copy(
        update={"token_ids": [70], "token_log_probs": [-math.inf], "top_log_probs": [[(70, 0.0), (71, -math.inf)]]}
    )
    entries = TokenLogprobs(endless()).of_answer([certain])
    assert "-9999.0" in json.dumps(entries, allow_nan=False)


def test_a_risk_that_was_not_measured_is_another_matter() -> None:
    answer = generation(("Dune is by ", 0.1), ("Frank", 0.2), (" Herbert", 0.3))
    spans = [answer.spans[0].model_copy(update={"risk": None}), *answer.spans[1:]]
    report = RiskReport.of(answer.model_copy(update={"spans": spans}))
    assert (report.max_risk, report.mean_risk) == (0.3, 0.25)
    for each in (report, report.compact()):
        assert each.spans[0].risk is None
        assert Limit(HIGH).risky(each.spans) == []
        assert highest(each.spans, "risk") == 0.3
        assert Limit(0.0, "f_mlds").risky([each.spans[0].with_values(f_mlds=None)])


@NOT_FINITE
@pytest.mark.parametrize("unit", ["claim", "sentence"])
@pytest.mark.parametrize("where", ["It", ".", " Yes"])
def test_a_risk_outside_all_claims_stops(risk: float, unit: UnitLevel, where: str) -> None:
    texts = [" Yes", ", it", " is", "."] if where == " Yes" else ["It", " is by Frank", " Herbert", "."]
    answer = generation(*((text, risk if where in (text, " Yes") else 0.1) for text in texts))
    report = RiskReport.of(answer.model_copy(update={"threshold": 0.6}))
    message = AIMessage(answer.text, response_metadata={"cocoa_risk": report.to_dict()})
    for limit in (Limit(HIGH, unit=unit), Limit(unit=unit)):
        assert limit.reached(report)
        assert limit.value(report) == math.inf
    assert risk_gate(unit=unit, on_risk="abstain").invoke(message).content == "I don't know."
    with pytest.raises(HallucinationRiskError, match="is inf"):
        risk_gate(HIGH, unit=unit).invoke(message)
    if unit == "claim" and where != " Yes":
        marked = risk_gate(HIGH, unit=unit, on_risk="mark").invoke(message)
        mark = "." if where == "." else f"[[{where}]]"  # the gate acts, but punctuation is not marked
        assert marked.content == answer.text.replace(where, mark)


@NOT_FINITE
@pytest.mark.parametrize("unit", ["claim", "sentence"])
def test_white_space_and_an_unmeasured_risk_pass(risk: float, unit: UnitLevel) -> None:
    answer = generation(("It", 0.2), (" is", 0.1), ("\n\n", risk), ("Dune", 0.3), (".", 0.2))
    first = answer.spans[0].model_copy(update={"risk": None, "risk_source": "source_attention"})
    report = RiskReport.of(answer.model_copy(update={"spans": [first, *answer.spans[1:]]}))
    assert not Limit(HIGH, unit=unit).reached(report)
    assert Limit(HIGH, unit=unit).value(report) == 0.3


ONLY_LANGCHAIN = ("question", "context", "format_documents", "return_documents", "prompt", "chat", "retriever")


def options_of(function: object, leave_out: tuple[str, ...]) -> list[tuple[str, object, str]]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    named = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in leave_out]
    return [(one.name, one.default, str(one.annotation)) for one in named]


def test_retries_have_the_same_options() -> None:
    here, there = (options_of(one, ONLY_LANGCHAIN) for one in (with_risk_retry, RiskRetryQueryEngine))
    by_framework = {"second_retriever"}  # the class of a retriever is the framework's
    assert [one[:2] for one in here] == [one[:2] for one in there]
    assert [one for one in here if one[0] not in by_framework] == [one for one in there if one[0] not in by_framework]


def test_citations_have_the_same_options() -> None:
    here, there = (options_of(one, ONLY_LANGCHAIN) for one in (with_citations, RiskCitationQueryEngine))
    assert here == there


@given(
    risks=st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=4),
    threshold=st.floats(0, 1),
    measure=st.sampled_from([None, *get_args(Measure)]),
    on_risk=st.sampled_from(get_args(OnRisk)),
)
def test_an_answer_is_refused_if_no_attempt_is_below_the_threshold(
    risks: list[float | None], threshold: float, measure: Any, on_risk: Any
) -> None:
    tries = Tries[int](retry_plan(threshold, len(risks), measure, on_risk))
    for number, risk in enumerate(risks):  # without a risk: nothing was retrieved, and no model was asked
        whole = {"threshold": 0.5, "answer_risk": risk, "answer_threshold": 0.5}
        if tries.add(number, None if risk is None else made_report([risk], **whole)):
            break
    answer, _ = tries.best()
    chosen = risks[answer]
    if on_risk == "keep" or (chosen is not None and chosen < threshold):
        assert tries.gate() is None
    elif on_risk == "raise":
        with pytest.raises(HallucinationRiskError, match="has no report" if chosen is None else "reaches"):
            tries.gate()
    else:
        gate = tries.gate()
        assert gate is not None
        assert (gate.action, gate.value) == (on_risk, chosen)
        assert not any(risk is not None and risk < threshold for risk in risks)


WHOLE = {"threshold": 0.6, "answer_threshold": 0.7}


@pytest.mark.parametrize(
    ("limit", "risks", "values", "reached"),
    [
        # without a number the threshold is that of the report
        (Limit(), [0.1, 0.7], {"threshold": 0.6}, True),
        (Limit(), [0.1, 0.5], {"threshold": 0.6}, False),
        (Limit(), [], {}, False),
        # the answer as a whole
        (Limit(0.5, "answer_risk"), [0.0], {"answer_risk": 0.5}, True),
        (Limit(0.5, "answer_risk"), [1.0], {"answer_risk": 0.4}, False),
        (Limit(None, "answer_risk"), [0.0], {"answer_risk": 0.8, "answer_threshold": 0.7}, True),
        # without a metric it is compared where it has a risk
        (Limit(), [0.1], {**WHOLE, "answer_risk": 0.75}, True),
        (Limit(), [0.9], {**WHOLE, "answer_risk": 0.5}, False),
        (Limit(), [0.1], {**WHOLE, "answer_risk": float("nan")}, True),
        # a number, a unit or a metric chooses the risk of spans
        (Limit(0.6), [0.1], {**WHOLE, "answer_risk": 0.9}, False),
        (Limit(unit="claim"), [0.1], {**WHOLE, "answer_risk": 0.9}, False),
        (Limit(metric="risk"), [0.1], {**WHOLE, "answer_risk": 0.9}, False),
        # a raw MLDS is compared under its own name
        (Limit(0.5, "f_mlds"), [0.93], {"risk_source": "f_mlds"}, True),
    ],
)
def test_what_reaches_a_limit(limit: Limit, risks: list[float], values: dict[str, Any], reached: bool) -> None:
    assert limit.reached(made_report(risks, **values)) is reached


@pytest.mark.parametrize(
    ("limit", "values", "words"),
    [
        (Limit(), {}, "has no threshold of risk"),
        (Limit(0.5, "answer_risk"), {}, "no answer_risk: it is of a part"),
        (Limit(0.5), {"risk_source": "f_mlds"}, "metric='f_mlds'"),
    ],
)
def test_a_report_without_what_is_compared(limit: Limit, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        limit.reached(made_report([0.9], **values))


def test_a_limit_names_what_it_compared() -> None:
    limit, of_spans, whole = Limit(), made_report([0.9, 0.1], threshold=0.6), {**WHOLE, "answer_risk": 0.75}
    error = limit.error(of_spans)
    assert (limit.threshold_for(of_spans), error.threshold, error.metric) == (0.6, 0.6, "risk")
    assert (limit.metric_for(of_spans), Limit(0.6).metric, Limit(unit="claim").metric) == ("risk", "risk", "risk")
    assert limit.error(made_report([0.1], **whole)).metric == "answer_risk"
    assert limit.value(made_report([0.9], **whole)) == 0.75
    assert len(limit.risky(made_report([0.9, 0.1], **whole).spans)) == 1  # of spans, still by their own
    assert "answer_risk of the answer is 0.5" in str(
        Limit(0.5, "answer_risk").error(made_report([0.0], answer_risk=0.5))
    )


def test_a_retry_is_compared_with_its_like_and_one_that_passes_is_chosen() -> None:
    whole = {"threshold": 0.6, "answer_threshold": 0.7}
    tries = Tries[str](retry_plan(None, 3, None))
    tries.add("nothing", None)
    tries.add("first", made_report([0.3], answer_risk=0.8, **whole))
    tries.add("span", made_report([0.75], threshold=0.6))
    assert tries.best()[0] == "first"
    tries.add("lower", made_report([0.3], answer_risk=0.72, **whole))
    assert tries.best()[0] == "lower"
    assert tries.add("passes", made_report([0.5], threshold=0.6))
    assert tries.best()[0] == "passes"


@pytest.mark.parametrize("measure", [None, "max_risk", "mean_risk"])
def test_risks_of_different_sources_are_not_ranked_under_a_number(measure: Any) -> None:
    tries = Tries[str](retry_plan(0.3, 4, measure))
    tries.add("not measured", made_report([float("nan")], risk_source="token_probability"))
    tries.add("first", made_report([0.8]))
    assert not tries.add("other source", made_report([0.4], risk_source="source_attention"))
    assert tries.best()[0] == "first"
    tries.add("lower", made_report([0.7]))
    assert tries.best()[0] == "lower"
    assert tries.add("passes", made_report([0.1], risk_source="source_attention"))  # the number is for every answer
    assert tries.best()[0] == "passes"


@pytest.mark.parametrize("metric", ["risk", "answer_risk"])
@pytest.mark.parametrize("threshold", [-0.1, 1.05, 2.0])
def test_a_number_outside_the_scale_is_refused(metric: Any, threshold: float) -> None:
    with pytest.raises(ConfigError, match="metric='f_mlds'"):
        Limit(threshold, metric)
    Limit(abs(threshold), "f_mlds")
    with pytest.raises(ConfigError, match="no default threshold"):
        Limit(None, "f_mlds")


def test_only_settings_that_are_used_are_computed() -> None:
    options = dict(retry_plan())
    assert RetryPlan(**{**options, "max_tries": 1, "alpha": 1e6}).steps == [{}]
    many = RetryPlan(**{**options, "max_tries": 2000, "settings": [{"alpha": 5.0}]})
    assert many.steps == [{}, *[{"alpha": 5.0}] * 1999]


def test_an_engine_can_be_sent_to_another_process() -> None:
    llm = CocoaLLM(base_url="http://localhost:1/v1", context_window=100)
    engine = RiskRetryQueryEngine(Finds(), llm, top_k_growth=1, alphas=[5.0], max_tries=2)
    assert pickle.loads(pickle.dumps(engine)).retrieve(QueryBundle("a")) == []


def test_reports_are_read_beside_objects_with_any_fields() -> None:
    class Parsed(BaseModel):
        blocks: list[str] = ["a", "b"]
        additional_kwargs: None = None

    report = made_report([0.5])
    shown = PydanticResponse(response=Parsed(), metadata={"cocoa_risk": report.to_dict()})
    assert get_risk(shown) == report
    with pytest.raises(ConfigError, match="no risk report"):
        get_risk(MagicMock())


def test_a_compact_report_is_completed_wherever_it_is() -> None:
    report = made_report([0.5, 0.25])
    compact = report.compact().to_dict()
    whole = get_risk(AIMessage("", response_metadata={"cocoa_risk": compact}))
    assert compact != whole.to_dict()
    assert get_risk(compact) == whole == get_risk({"text": "", "risk": compact})
