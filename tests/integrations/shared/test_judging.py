"""The risk of answers that other models wrote: one judge, and what LlamaIndex, LangSmith and RAGAS call it by.

Risk in traces: attributes of the caller's OpenTelemetry span, whatever way an answer is asked for.
"""

import asyncio
import contextvars
import gc
import inspect
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langsmith.evaluation.evaluator import run_evaluator
from llama_index.core.base.response.schema import Response
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from opentelemetry import trace

from cocoa_engine import CalibrationWarning, CocoaEngine, ConfigError, PromptError, Runtime
from cocoa_engine.report import RiskReport
from cocoa_engine.risk.calibrator import RiskCalibrator, Settings
from cocoa_integrations import tracing
from cocoa_integrations.judging import AnswerJudge, RagasRisk
from cocoa_integrations.langchain import ChatCocoa, get_risk, get_risk_callback, risk_evaluator
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM, RiskEvaluator, collect_risk
from tests.helpers.alike import near, risk_report
from tests.helpers.made_up_risk import fitted
from tests.helpers.reasoning_models import reasoning_engine, saying
from tests.helpers.span_handlers import Spans, instrumented
from tests.helpers.tiny_models import engine_for_schemas, pieces_tokenizer, tiny_model, tiny_tokenizer

QUESTION, CONTEXTS = "Who is it?", ["the red one", "it rains"]
ANSWER = "It is Otto. He is old!\nYes, 3.5 years"
ASKED = [{"role": "user", "content": "Context:\nthe red one\n\nit rains\n\nQuestion: Who is it?"}]


@pytest.fixture(scope="module")
def quick() -> CocoaEngine:
    return engine_for_schemas()


@pytest.fixture(scope="module")
def expected(quick: CocoaEngine) -> float:
    """The risk of the answer by plain scores."""
    return AnswerJudge(quick).judge(QUESTION, ANSWER, CONTEXTS).risk


def test_sentences(quick: CocoaEngine) -> None:
    judged = AnswerJudge(quick).judge(QUESTION, ANSWER, CONTEXTS)
    spans = judged.report.spans
    assert RiskReport.from_wire(judged.report.to_dict()) == judged.report
    assert [span.text for span in spans] == ["It is Otto.", " He is old!", "\nYes, 3.5 years"]
    assert [ANSWER[span.start : span.end] for span in spans] == [span.text for span in spans]
    assert judged.risk == judged.report.mean_risk == pytest.approx(sum(span.risk for span in spans) / 3)
    prompt = quick.encode_chat(ASKED)
    ids = quick.score(prompt, ANSWER).token_ids
    total = quick.score(prompt, ids).spans[0].log_prob
    assert sum(span.log_prob for span in spans) == pytest.approx(total, abs=1e-3)
    first = quick.score(prompt, "It is Otto.").spans[0]
    assert spans[0].risk == near(first.risk)
    assert AnswerJudge(quick, measure="max_risk").judge(QUESTION, ANSWER, CONTEXTS).risk == judged.report.max_risk
    assert judged.risk != AnswerJudge(quick).judge(QUESTION, ANSWER).risk  # the contexts matter
    for answer in (
        "\n\nIt is Otto.\n\nHe is old!\n \n\nYes",  # a paragraph break is no sentence
        "猫は座った。犬は吠えた！「はい。」 Dr. Otto is 3.5 years old, e.g. Yes?",
    ):
        report = AnswerJudge(quick).judge(QUESTION, answer).report
        broken = [span.text for span in report.spans]
        assert len(broken) > 2
        assert [text.strip() for text in broken] == [answer[part.start : part.end] for part in report.sentences]
        assert "".join(broken) == answer
    # the contexts are the source
    whole = quick.score(prompt, ANSWER, source=CONTEXTS)
    assert judged.report.risk_source == whole.risk_source
    first = quick.score(prompt, "It is Otto.", source=CONTEXTS).spans[0]
    measured = [span.passage_attention for span in judged.report.spans]
    assert measured[0] == near(first.passage_attention)
    assert all(len(values) == 2 and all(values) for values in measured)
    assert judged.report.source_heads == whole.source_heads == "spread"


def test_a_model_with_known_heads_is_judged_by_its_attention_to_the_contexts(engine: CocoaEngine) -> None:
    judge = AnswerJudge(engine.without_calibrator())
    sources = [judge.judge(QUESTION, "Otto.", given).report.risk_source for given in (CONTEXTS, None)]
    assert sources == ["source_attention", "token_probability"]


def test_only_contexts_that_the_prompt_has_are_the_source(quick: CocoaEngine) -> None:
    def second(question: str, contexts: list[str]) -> str:
        return f"{contexts[1]}\n{question}\nAnswer:"

    spans = AnswerJudge(quick, prompt=second).judge(QUESTION, ANSWER, ["no red one", *CONTEXTS[1:]]).report.spans
    assert all(span.passage_attention[0] is None and span.passage_attention[1] for span in spans)
    for prompt in (lambda question, _: question, lambda question, contexts: f"{contexts[0].upper()} {question}"):
        report = AnswerJudge(quick, prompt=prompt).judge(QUESTION, ANSWER, CONTEXTS).report
        assert report.risk_source == quick.score(QUESTION, ANSWER).risk_source
        assert not any(span.passage_attention for span in report.spans)
    for contexts in (["", "  "], []):
        spans = AnswerJudge(quick).judge(QUESTION, ANSWER, contexts).report.spans
        assert not any("passage_attention" in span for span in spans)


@pytest.mark.slow
def test_the_report_of_a_judge_has_what_other_reports_have(quick: CocoaEngine) -> None:
    report = AnswerJudge(quick).judge(QUESTION, ANSWER, CONTEXTS).report
    assert set(risk_report(quick.score(QUESTION, ANSWER, source=[QUESTION]))) <= set(report.to_dict())
    assert [(one.start, one.end) for one in report.sentences] == [(0, 11), (12, 22), (23, 37)]
    assert [one.risk for one in report.sentences] == [span.risk for span in report.spans]
    assert report.check
    for check in report.check:
        (number,) = check.spans
        assert ANSWER[check.start : check.end] == check.text
        assert check.text in report.spans[number].text
        assert check.risk == report.spans[number].risk
    settings = Settings.of(quick.config, quick.num_layers)
    for level in ("span", "answer"):
        calibrator = fitted(model_name="quick", settings=settings, levels=(level,), domain=True, draws=2)
        with pytest.warns(CalibrationWarning, match="out_of_domain") if level == "answer" else nullcontext():
            assert AnswerJudge(quick.with_calibrator(calibrator)).judge(QUESTION, ANSWER).report.out_of_domain


def test_only_the_whole_answer_has_a_risk_of_answers(quick: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.of(quick.config, quick.num_layers)
    of_spans, of_both = (
        quick.with_calibrator(fitted(model_name="quick", settings=settings, levels=levels, draws=2))
        for levels in (("span",), ("span", "answer"))
    )
    for_answers: list[bool] = []
    rated = RiskCalibrator.rated

    def counted(calibrator: RiskCalibrator, generation: Any) -> Any:
        for_answers.append(calibrator.answer is not None)
        return rated(calibrator, generation)

    monkeypatch.setattr(RiskCalibrator, "rated", counted)
    report = AnswerJudge(of_both).judge(QUESTION, ANSWER, CONTEXTS).report
    assert for_answers == [True, False, False, False]
    assert report.answer_risk is not None
    assert report.spans == AnswerJudge(of_spans).judge(QUESTION, ANSWER, CONTEXTS).report.spans


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, pieces_tokenizer])
def test_without_a_chat_template(tokenizer: Any) -> None:
    engine = CocoaEngine(tiny_model("llama", seed=6), tokenizer())
    judged = AnswerJudge(engine).judge("who", "It is he. A red one. É日")
    spans = judged.report.spans
    assert len(spans) == 3
    assert "".join(span.text for span in spans) == "It is he. A red one. É日"
    assert AnswerJudge(engine, prompt=lambda question, _: question).judge("who", "he").report.spans[0].text == "he"


def test_verdict(quick: CocoaEngine, expected: float) -> None:
    assert AnswerJudge(quick).judge(QUESTION, ANSWER, CONTEXTS).passing is None
    assert AnswerJudge(quick, threshold=expected).judge(QUESTION, ANSWER, CONTEXTS).passing is False
    judged = AnswerJudge(quick, threshold=min(expected + 0.01, 1.0)).judge(QUESTION, ANSWER, CONTEXTS)
    assert judged.passing is True
    worst = max(judged.report.spans, key=lambda span: span.risk).text.strip()
    assert repr(worst) in judged.comment
    assert "how unsure the model was" in judged.comment


def test_llama_index(quick: CocoaEngine, expected: float) -> None:
    evaluator = RiskEvaluator(CocoaLLM(engine=quick), threshold=min(expected + 0.01, 1.0))
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in CONTEXTS]
    result = evaluator.evaluate_response(query=QUESTION, response=Response(ANSWER, nodes))
    assert (result.score, result.passing, result.response) == (expected, True, ANSWER)
    assert list(result.contexts or ()) == CONTEXTS
    assert "riskiest" in (result.feedback or "")
    again = asyncio.run(evaluator.aevaluate(QUESTION, ANSWER, CONTEXTS))
    assert again == result
    for empty in ("", "  ", "\n\n"):
        assert evaluator.evaluate(QUESTION, empty).invalid_result
    with pytest.raises(ConfigError, match="needs both query and response"):
        evaluator.evaluate(QUESTION)


def test_options_of_a_llama_index_llm_apply_later(quick: CocoaEngine) -> None:
    llm = CocoaLLM(model=quick.model, tokenizer=quick.tokenizer, risk="con_mlds")
    evaluator, fixed = RiskEvaluator(llm), RiskEvaluator(llm, config=quick.config.replace(risk="f_mlds"))
    con_mlds, f_mlds = (
        AnswerJudge(quick, config=quick.config.replace(risk=metric)).judge(QUESTION, ANSWER, CONTEXTS).risk
        for metric in ("con_mlds", "f_mlds")
    )
    assert con_mlds != near(f_mlds)
    for risk, scores in (("con_mlds", (con_mlds, f_mlds)), ("f_mlds", (f_mlds, f_mlds))):
        llm.risk = risk
        assert tuple(one.evaluate(QUESTION, ANSWER, CONTEXTS).score for one in (evaluator, fixed)) == near(scores)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"question": QUESTION}, {"answer": ANSWER, "context": [Document(text) for text in CONTEXTS]}),
        ({"q": QUESTION, "docs": CONTEXTS}, {"a": AIMessage(ANSWER), "b": 1}),
        (
            {"messages": [HumanMessage(QUESTION)], "contexts": CONTEXTS},
            {"messages": [{"role": "ai", "content": ANSWER}]},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]},
            {"answer": ANSWER, "documents": [{"page_content": text, "type": "Document"} for text in CONTEXTS]},
        ),
    ],
)
def test_langsmith(
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    quick: CocoaEngine,
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    keys = {"question": "q", "answer": "a", "context": "docs"} if "q" in inputs else {}
    evaluator = risk_evaluator(ChatCocoa(engine=quick), threshold=expected, **keys)
    result = evaluator(inputs, outputs)
    assert (result["key"], result["score"], result["value"]) == ("cocoa_risk", expected, "fail")
    assert "riskiest" in result["comment"]
    run: Any = SimpleNamespace(inputs=inputs, outputs=outputs, id=None, trace_id=None)
    example: Any = SimpleNamespace(inputs=inputs, outputs={}, attachments=None, id=None)
    assert evaluator(run, example) == result
    assert evaluator(run, None) == result
    assert run_evaluator(evaluator).evaluate_run(run, example).score == expected  # type: ignore[union-attr]


async def test_ragas(quick: CocoaEngine, expected: float) -> None:
    metric = RagasRisk(quick)
    sample = SimpleNamespace(user_input=QUESTION, response=ANSWER, retrieved_contexts=CONTEXTS, reference=None)
    assert await metric.single_turn_ascore(sample, callbacks=None, timeout=60) == expected
    assert metric.single_turn_score(sample) == expected
    assert metric.name == "cocoa_risk"
    assert metric.required_columns == {"SINGLE_TURN": {"user_input", "response"}}
    assert "retrieved_contexts" in metric.get_required_columns(with_optional=True)["SINGLE_TURN"]
    without = SimpleNamespace(user_input=QUESTION, response=ANSWER, retrieved_contexts=None)
    assert metric.single_turn_score(without) == AnswerJudge(quick).judge(QUESTION, ANSWER).risk


def test_refused(quick: CocoaEngine) -> None:
    judge = AnswerJudge(quick)
    for options in ({"threshold": "x"}, {"measure": "mlds"}):
        with pytest.raises(ConfigError):
            AnswerJudge(quick, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes a CocoaEngine"):
        AnswerJudge("model")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="list of texts"):
        judge.judge(QUESTION, ANSWER, "text")
    with pytest.raises(ConfigError, match="calibrator for answers"):
        AnswerJudge(quick, measure="answer_risk").judge(QUESTION, ANSWER)
    for empty in ("", " \n"):
        with pytest.raises(PromptError, match="the answer is empty"):
            judge.judge(QUESTION, empty)
        sample = SimpleNamespace(user_input=QUESTION, response=empty, retrieved_contexts=None)
        with pytest.raises(PromptError, match="the answer is empty"):
            RagasRisk(judge).single_turn_score(sample)
        for answer in (empty, AIMessage(empty), {"role": "assistant", "content": None}):
            result = risk_evaluator(quick, key="risk", threshold=0.5)({"question": QUESTION}, {"answer": answer})
            assert result == {"key": "risk", "score": None, "comment": "the answer is empty"}
    with pytest.raises(ConfigError, match="to the AnswerJudge"):
        RagasRisk(judge, threshold=0.5)
    with pytest.raises(ConfigError, match="no answer found"):
        risk_evaluator(judge)({"question": QUESTION}, {"x": 1, "y": 2})
    evaluator = risk_evaluator(judge, context="docs")
    with pytest.raises(ConfigError, match=r"no context found .*context="):
        evaluator({"question": QUESTION, "contexts": CONTEXTS}, {"answer": ANSWER})
    assert evaluator({"question": QUESTION, "docs": []}, {"answer": ANSWER})["score"] is not None


def test_no_control_tokens_in_what_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    score = CocoaEngine.score

    def recorded(engine: CocoaEngine, prompt: Any, text: Any, **options: Any) -> Any:
        scored = score(engine, prompt, text, **options)
        texts.append([*prompt, *scored.token_ids])
        return scored

    monkeypatch.setattr(CocoaEngine, "score", recorded)
    tokenizer = tiny_tokenizer()
    engine = CocoaEngine(tiny_model("llama", seed=6), tokenizer, calibrator=None)
    hostile = ("Who?<eos>", "Otto.<bos> He<eos>.", ["red<eos>"])
    for prompt, found in ((None, 0), (lambda question, contexts: "<bos>" + question, 2)):
        AnswerJudge(engine, prompt=prompt).judge(*hostile)
        assert sum(token_id in tokenizer.all_special_ids for token_id in texts[-1]) == found


def test_an_evaluator_keeps_no_engine_that_its_llm_has_left(quick: CocoaEngine) -> None:
    llm = CocoaLLM(model=quick.model, tokenizer=quick.tokenizer)
    evaluator, before = RiskEvaluator(llm), weakref.ref(llm.engine)
    llm.runtime = Runtime(max_batch_size=2)
    evaluator.evaluate(QUESTION, ANSWER, CONTEXTS)
    gc.collect()
    assert before() is None


PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def models() -> SimpleNamespace:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    engine = CocoaEngine(tiny_model("llama", seed=6), tokenizer)
    return SimpleNamespace(
        chat=ChatCocoa(engine=engine, max_tokens=8),
        text=LangChainLLM(engine=engine, max_tokens=8),
        index=CocoaLLM(engine=engine, max_new_tokens=8),
    )


class Tracer(Spans):
    """An SDK of its own, whose spans end in memory."""

    def span(self, name: str) -> Any:
        """A span that is current inside a ``with`` block."""
        return self.tracer.start_as_current_span(name)

    def attributes(self, name: str = "call") -> dict[str, Any]:
        """Of the one span of that name."""
        [span] = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return dict(span.attributes or {})


@pytest.fixture
def tracer() -> Tracer:
    return Tracer()


def expected_of(*reports: RiskReport) -> dict[str, Any]:
    """The attributes of a span under which these answers were given."""
    risks = [span.risk or 0.0 for report in reports for span in report.spans]
    return {
        "cocoa.max_risk": max(risks),
        "cocoa.mean_risk": pytest.approx(sum(risks) / len(risks)),
        "cocoa.risk_points": sum(report.risk_points for report in reports),
        "cocoa.calibrated": False,
        "cocoa.answers": len(reports),
    }


OF_LANGCHAIN = [
    *(("chat", method) for method in ("invoke", "stream", "batch", "ainvoke", "astream", "abatch")),
    *(("text", method) for method in ("invoke", "stream", "batch", "ainvoke", "astream", "abatch")),
]
OF_LLAMA_INDEX = [
    ("index", f"{begin}{method}") for begin in ("", "stream_", "a", "astream_") for method in ("complete", "chat")
]


async def called(models: SimpleNamespace, model: str, method: str) -> None:
    """Ask a model, and read its answer to the end."""
    asked = [PROMPT] if "batch" in method else [ChatMessage(PROMPT)] if "chat" in method else PROMPT
    made: Any = getattr(getattr(models, model), method)(asked)
    made = await made if inspect.isawaitable(made) else made
    if isinstance(made, AsyncIterator):
        _ = [chunk async for chunk in made]
    elif isinstance(made, Iterator):
        _ = list(made)


@pytest.mark.parametrize("is_instrumented", [False, True])
@pytest.mark.parametrize(("model", "method"), OF_LANGCHAIN + OF_LLAMA_INDEX)
async def test_the_span_that_is_current_gets_the_risk(
    model: str, method: str, is_instrumented: bool, models: SimpleNamespace, tracer: Tracer
) -> None:
    """That of LlamaIndex's instrumentation, even where a stream is read later; those of LangChain's never are."""
    package, name = ("llama_index", "LlamaIndex") if model == "index" else ("langchain", "LangChain")
    instrumentor = (f"openinference.instrumentation.{package}", f"{name}Instrumentor", tracer)
    with (
        instrumented(*instrumentor) if is_instrumented else nullcontext(),
        get_risk_callback() as risk,
        collect_risk() as reports,
        tracer.span("call"),
    ):
        await called(models, model, method)
    [report] = risk.reports + reports
    [(name, attributes)] = tracer.with_risk()
    assert name.startswith("CocoaLLM.") if model == "index" and is_instrumented else name == "call"
    assert attributes == expected_of(report)


def test_answers_under_one_span_are_summed_up(models: SimpleNamespace, tracer: Tracer) -> None:
    with get_risk_callback() as risk, collect_risk() as reports, tracer.span("call"):
        models.chat.batch(["a", "b", "c"])  # in threads
        models.text.batch(["a", "b"])
        models.index.complete("a")
    reports = [*risk.reports, *reports]
    assert len(reports) == 6
    assert tracer.attributes() == expected_of(*reports)


@pytest.mark.parametrize(("model", "method"), [("chat", "stream"), ("index", "stream_complete")])
def test_a_stream_belongs_to_the_span_in_which_it_began(
    model: str, method: str, models: SimpleNamespace, tracer: Tracer
) -> None:
    with get_risk_callback() as risk, collect_risk() as reports, tracer.span("call"):
        stream = iter(getattr(getattr(models, model), method)("a"))
        next(stream)
        with tracer.span("reader"):
            contextvars.Context().run(lambda: list(stream))  # where nothing is known of either span
    [report] = risk.reports + reports
    assert tracer.attributes() == expected_of(report)
    assert tracer.attributes("reader") == {}


def test_a_span_that_has_ended_and_a_broken_stream_get_nothing(models: SimpleNamespace, tracer: Tracer) -> None:
    chat = models.chat
    with tracer.span("ended"):
        late = iter(chat.stream("a"))
        next(late)
    list(late)
    with tracer.span("broken"):
        next(chat.stream("a"))
        next(models.index.stream_complete("a"))
        with pytest.raises(Exception, match="empty"):
            chat.invoke("")
    assert tracer.attributes("ended") == tracer.attributes("broken") == {}


@pytest.mark.slow
def test_without_a_span_nothing_happens_and_nothing_is_kept(models: SimpleNamespace, tracer: Tracer) -> None:
    chat = models.chat
    assert not trace.get_current_span().is_recording()
    gc.collect()
    before = len(tracing._totals)  # of spans that other tests have left
    chat.invoke("a")
    with tracer.span("call"):
        chat.invoke("a")
    tracer.exporter.clear()
    gc.collect()
    assert len(tracing._totals) <= before  # spans that are gone leave nothing


def test_opentelemetry_is_not_needed(models: SimpleNamespace, tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracer.span("call"):
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        monkeypatch.setitem(sys.modules, "opentelemetry", None)  # as if it were not installed
        models.chat.invoke("a")
        list(models.chat.stream("a"))
        models.index.complete("a")
        monkeypatch.undo()
    assert tracer.attributes() == {}


def test_the_risk_of_reasoning_does_not_count(tracer: Tracer) -> None:
    thinker = reasoning_engine()
    options = saying(thinker, "Well, well.</think>\n\nHello!")
    chat, llm = ChatCocoa(engine=thinker), CocoaLLM(engine=thinker)
    expected = get_risk(chat.invoke(PROMPT, **options)).to_dict()
    of_all = [span["risk"] for span in expected["spans"]]
    assert expected["mean_risk"] != pytest.approx(sum(of_all) / len(of_all), rel=1e-3)
    with tracer.span("invoked"):
        chat.invoke(PROMPT, **options)
    with tracer.span("streamed"):
        list(chat.stream(PROMPT, **options))
    with tracer.span("llama"):
        llm.chat([ChatMessage(content=PROMPT)], **options)
    for name in ("invoked", "streamed", "llama"):
        attributes = tracer.attributes(name)
        assert attributes["cocoa.max_risk"] == near(expected["max_risk"])
        assert attributes["cocoa.mean_risk"] == near(expected["mean_risk"])
