"""Chains that act on risk: gates, the parser that keeps it; steps that change a text, whose offsets follow."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import pickle
import re
from functools import cache
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableGenerator
from langchain_core.runnables.utils import add

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import CocoaError, ConfigError
from cocoa_engine.report import SPANS_KEY
from cocoa_integrations._shared.citations import Citation
from cocoa_integrations._shared.reasoning import split_generation
from cocoa_integrations.langchain import (
    ChatCocoa,
    CocoaLLM,
    HallucinationRiskError,
    RiskOutputParser,
    get_risk,
    get_risk_callback,
    get_spans,
    max_risk,
    risk_gate,
)
from cocoa_integrations.langchain.answers import reduced
from cocoa_integrations.langchain.citations import cited
from cocoa_integrations.langchain.messages import message_content
from tests.helpers.alike import all_spans, close, risk_report, to_dicts, without_offsets
from tests.helpers.edited_answers import (
    CLOSINGS,
    MARKS,
    OPENINGS,
    REDACTED,
    SPANS,
    TOKENS,
    VALUES,
    assert_nested,
    assert_offsets_follow,
    redact,
    squeezed,
)
from tests.helpers.made_up_answers import generation
from tests.helpers.reasoning_models import PLAIN, reasoning_engine, saying
from tests.helpers.tiny_models import QUESTION

pytestmark = pytest.mark.also_remote


@pytest.fixture(scope="session")
def between(quick_answer: AIMessage) -> float:
    """A threshold that only the riskiest span of the answer reaches."""
    *_, second, first = sorted(span["risk"] for span in to_dicts(get_spans(quick_answer)))
    assert second < first
    return (first + second) / 2


def with_riskiest_marked(answer: AIMessage, left: str = "[[", right: str = "]]") -> str:
    """The answer's text, its riskiest span marked by hand."""
    worst = max(to_dicts(get_spans(answer)), key=lambda span: span["risk"])
    text, core = answer.text, worst["text"].strip()
    at = text.index(core, worst["start"])
    return f"{text[:at]}{left}{core}{right}{text[at + len(core) :]}"


@pytest.mark.also_remote(False)
def test_risk_is_read_out_of_the_engines_own_answer(
    quick_chat: ChatCocoa, quick_answer: AIMessage, between: float
) -> None:
    answer = quick_chat.load().chat([{"role": "user", "content": QUESTION}], max_new_tokens=12)
    assert close(get_risk(answer).to_dict(), get_risk(quick_answer).to_dict())
    assert close(to_dicts(get_spans(answer)), to_dicts(get_spans(quick_answer)))
    assert close(max_risk(answer, "self_information"), max_risk(quick_answer, "self_information"))
    with pytest.raises(ConfigError, match="a gate takes LangChain answers"):
        risk_gate(between, on_risk="mark").invoke(answer)


# What passes, and what does not.


def test_an_answer_passes_or_raises_with_its_report(quick_chat: ChatCocoa, between: float) -> None:
    answer = (quick_chat | risk_gate(1.0)).invoke(QUESTION)
    assert get_risk(answer).to_dict() == get_risk(quick_chat.invoke(QUESTION)).to_dict()
    with pytest.raises(HallucinationRiskError, match="how unsure the model was") as caught:
        (quick_chat | risk_gate(between)).invoke(QUESTION)
    error = caught.value
    assert isinstance(error, CocoaError)
    assert error.report == get_risk(answer)
    assert (error.value, error.threshold, error.metric) == (error.report.max_risk, between, "risk")
    assert repr(max(to_dicts(get_spans(answer)), key=lambda span: span["risk"])["text"]) in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.report, again.value) == (str(error), error.report, error.value)


def test_spans_of_whitespace_only_do_not_count(quick_answer: AIMessage) -> None:
    report = copy.deepcopy(get_risk(quick_answer).to_dict())
    others = max(span["risk"] for span in report["spans"][1:])
    moved = 3 - report["spans"][0]["end"]
    report["spans"][0] |= {"text": " \n\n", "risk": 1.9, "end": 3}
    for span in report["spans"][1:]:
        span |= {"start": span["start"] + moved, "end": span["end"] + moved}
    answer = {"text": "".join(span["text"] for span in report["spans"]), "risk": report}
    assert max_risk(answer) == others
    assert risk_gate(1.0).invoke(answer) == answer
    marked = risk_gate(0.0, on_risk="mark", mark="<{text}>").invoke(answer)["text"]
    assert marked.startswith(" \n\n")
    assert marked.replace("<", "").replace(">", "") == answer["text"].replace("<", "").replace(">", "")


def test_a_gate_opens_for_generations_and_dicts_too(quick_llm: CocoaLLM, quick_answer: AIMessage) -> None:
    [[generation]] = quick_llm.generate(["Once"]).generations
    with_risk = quick_llm.with_risk().invoke("Once")
    as_chat = ChatGeneration(message=quick_answer)
    for answer in (generation, with_risk, as_chat):
        assert risk_gate(1.0).invoke(answer) is answer
        with pytest.raises(HallucinationRiskError):
            risk_gate(0.0).invoke(answer)
        refused = risk_gate(0.0, on_risk="abstain", answer="No idea.").invoke(answer)
        assert type(refused) is type(answer)
        assert get_risk(refused).to_dict()["gate"]["action"] == "abstain"
        assert (refused["text"] if isinstance(refused, dict) else refused.text) == "No idea."
        assert without_offsets(get_risk(refused).to_dict()) == without_offsets(get_risk(answer).to_dict())
        assert {(span["start"], span["end"]) for span in get_risk(refused).to_dict()["spans"]} == {(0, 8)}


# Acting on it.


@pytest.mark.parametrize("output_version", ["v0", "v1"])
def test_marks_stand_around_risky_spans(
    quick_engine: CocoaEngine, quick_answer: AIMessage, between: float, output_version: str
) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, output_version=output_version, risk_metadata="full")
    before = chat.invoke(QUESTION)
    marked = risk_gate(between, on_risk="mark").invoke(before)
    assert marked.text == with_riskiest_marked(quick_answer)
    for message in (before, add(list(chat.stream(QUESTION)))):
        assert message.text == quick_answer.text
        assert get_risk(message).to_dict() == get_risk(quick_answer).to_dict()
        assert to_dicts(get_spans(message)) == to_dicts(get_spans(quick_answer))
    report = get_risk(marked).to_dict()
    value = max_risk(quick_answer)
    assert report.pop("gate") == {"action": "mark", "metric": "risk", "threshold": between, "value": value}
    assert without_offsets(report) == without_offsets(get_risk(quick_answer).to_dict())
    assert report["max_risk"] == value
    for spans in (report["spans"], to_dicts(get_spans(marked))):
        assert [marked.text[span["start"] : span["end"]] for span in spans] == [span["text"] for span in spans]
    html = risk_gate(between, on_risk="mark", mark="<i title='{value:.3f}'>{text}</i>").invoke(before)
    assert html.text == with_riskiest_marked(quick_answer, f"<i title='{value:.3f}'>", "</i>")
    own = risk_gate(between, on_risk="mark", mark=lambda text, span: f"{text}^{span.span}").invoke(before)
    worst = max(to_dicts(get_spans(quick_answer)), key=lambda span: span["risk"])
    assert own.text == with_riskiest_marked(quick_answer, "", f"^{worst['span']}")
    assert risk_gate(1.0, on_risk="mark").invoke(before) is before


def test_abstaining_calls_no_tools_and_marks_leave_them_alone(quick_answer: AIMessage) -> None:
    call = {"name": "look_up", "args": {}, "id": "1", "type": "tool_call"}
    calling = quick_answer.model_copy(update={"content": "", "tool_calls": [call]})
    assert risk_gate(0.0, on_risk="abstain").invoke(calling).tool_calls == []
    assert calling.tool_calls == [call]
    marked = risk_gate(0.0, on_risk="mark").invoke(calling)
    assert (marked.text, marked.tool_calls) == ("", [call])


# With the rest of LangChain.


def test_marks_stream_through(quick_chat: ChatCocoa, quick_answer: AIMessage, between: float) -> None:
    seen = []

    def watch(chunks: Any) -> Any:
        for chunk in chunks:
            seen.append(chunk.text)
            yield chunk

    chain = quick_chat | RunnableGenerator(watch) | risk_gate(between, on_risk="mark")
    stream = chain.stream(QUESTION)
    first = next(stream)
    assert seen == [to_dicts(get_spans(quick_answer))[0]["text"]]  # the rest is not decided yet
    whole = add([first, *stream])
    assert whole.text == with_riskiest_marked(quick_answer)
    assert get_risk(whole).to_dict() == get_risk(risk_gate(between, on_risk="mark").invoke(quick_answer)).to_dict()
    assert len(list((quick_chat | risk_gate(1.0, on_risk="mark")).stream(QUESTION))) == len(seen)


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "batch", "abatch", "stream", "astream"])
async def test_every_call_passes_whole_or_not_at_all(
    how: str, quick_chat: ChatCocoa, quick_answer: AIMessage, between: float
) -> None:
    async def answers(gate: Any) -> list[Any]:
        chain = quick_chat | gate
        if how == "astream":
            return [chunk async for chunk in chain.astream(QUESTION)]
        asked = [QUESTION] if "batch" in how else QUESTION
        made = getattr(chain, how)(asked)
        made = await made if inspect.isawaitable(made) else made
        return list(made) if how in ("batch", "abatch", "stream") else [made]

    with pytest.raises(HallucinationRiskError):
        await answers(risk_gate(between))
    [passed] = await answers(risk_gate(1.0))
    assert (passed.text, get_risk(passed).to_dict()) == (quick_answer.text, get_risk(quick_answer).to_dict())
    [refused] = await answers(risk_gate(between, on_risk="abstain"))
    assert refused.text == "I don't know."
    marked = await answers(risk_gate(between, on_risk="mark"))
    assert add(marked).text == with_riskiest_marked(quick_answer)
    assert len(marked) == (len(to_dicts(get_spans(quick_answer))) + 1 if "stream" in how else 1)


@pytest.mark.parametrize("how", ["batch", "abatch"])
async def test_a_batch_fails_one_by_one(how: str, quick_chat: ChatCocoa) -> None:
    prompts = ["a", "b", "Who?"]
    values = [max_risk(answer) for answer in quick_chat.batch(prompts)]
    *_, second, first = sorted(values)
    assert second < first
    outcomes = getattr(quick_chat | risk_gate((second + first) / 2), how)(prompts, return_exceptions=True)
    outcomes = await outcomes if how == "abatch" else outcomes
    assert [isinstance(outcome, HallucinationRiskError) for outcome in outcomes] == [one == first for one in values]
    assert [outcome.text for outcome in outcomes if isinstance(outcome, AIMessage)]


# Mistakes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": float("nan")}, "finite number"),
        ({"metric": "fmlds"}, "f_mlds"),
        ({"on_risk": "abstein"}, "abstain"),
        ({"mark": "**"}, "no {text} field"),
        ({"answer": None}, "answer takes a text"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        risk_gate(**{"threshold": 0.5, **options})


@pytest.mark.parametrize("on_risk", ["raise", "mark", "abstain"])
async def test_answers_without_a_whole_report_are_refused(quick_chat: ChatCocoa, on_risk: Any) -> None:
    gate = risk_gate(1.0, on_risk=on_risk)
    first = next(quick_chat.stream(QUESTION))
    for step in (gate, RiskOutputParser()):
        fake = FakeListChatModel(responses=["hello"]) | step
        for words, ask in (
            ("a chunk of an answer", lambda step=step: step.invoke(first)),
            ("a chunk of an answer", lambda step=step: list(step.transform(iter([first])))),
            ("no risk report", lambda fake=fake: fake.invoke("Hi")),
            ("no risk report", lambda fake=fake: list(fake.stream("Hi"))),
            ("no risk report", lambda step=step: (quick_chat | StrOutputParser() | step).invoke(QUESTION)),
            ("no risk report", lambda step=step: step.invoke({"text": "hello"} if step is gate else "hello")),
        ):
            with pytest.raises(ConfigError, match=words):
                ask()
        with pytest.raises(ConfigError, match="no risk report"):
            [chunk async for chunk in fake.astream("Hi")]


# Text and risk together.


async def test_the_parser_gives_text_and_report(quick_chat: ChatCocoa, quick_answer: AIMessage, between: float) -> None:
    chain = quick_chat | RiskOutputParser()
    expected = {"text": quick_answer.text, "risk": get_risk(quick_answer).to_dict()}
    assert chain.invoke(QUESTION) == await chain.ainvoke(QUESTION) == expected
    assert chain.batch([QUESTION]) == [expected]
    chunks = list(chain.stream(QUESTION))
    assert [chunk["text"] for chunk in chunks] == [*(span["text"] for span in to_dicts(get_spans(quick_answer))), ""]
    assert ["risk" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert add(chunks) == add([chunk async for chunk in chain.astream(QUESTION)]) == expected
    marked = list((chain | risk_gate(between, on_risk="mark")).stream(QUESTION))
    assert [one["text"] for one in marked] == [with_riskiest_marked(quick_answer)]


async def test_a_text_model_gives_text_and_report(quick_llm: CocoaLLM) -> None:
    model, inputs = quick_llm.with_risk(), ["Once", "Twice", "a"]
    answers = [one for [one] in quick_llm.generate(inputs).generations]
    expected = [{"text": one.text, "risk": get_risk(one).to_dict()} for one in answers]
    assert close([model.invoke(text) for text in inputs], expected)
    assert close(model.batch(inputs), expected)
    assert close(await model.abatch(inputs), expected)
    for text, wanted in zip(inputs, expected, strict=True):
        chunks = list(model.stream(text))
        assert len(chunks) > len(wanted["risk"]["spans"])
        assert close(add(chunks), wanted)
        assert close(await model.ainvoke(text), wanted)
        assert close(add([chunk async for chunk in model.astream(text)]), wanted)


def test_a_text_model_with_risk_is_a_step_like_any_other(quick_llm: CocoaLLM) -> None:
    chain = PromptTemplate.from_template("{x}") | quick_llm.with_risk().bind(max_tokens=4) | itemgetter("text")
    assert chain.invoke({"x": "Once"}) == quick_llm.invoke("Once", max_tokens=4)
    with get_risk_callback() as risk:
        gated = quick_llm.with_risk() | risk_gate(0.0, on_risk="abstain")
        assert "".join(one["text"] for one in gated.stream("Once")) == "I don't know."
        quick_llm.with_risk().invoke("Once")
    assert len(risk.reports) == 2  # the caller's own handlers hear of it as ever
    with pytest.raises(ConfigError, match="alfa"):
        quick_llm.with_risk().invoke("Once", alfa=1.0)
    stream = quick_llm.with_risk().stream("Once")
    next(stream)
    stream.close()


def test_a_cached_text_has_its_risk(quick_engine: CocoaEngine, spy: Any) -> None:
    model = CocoaLLM(engine=quick_engine, max_tokens=4, cache=InMemoryCache()).with_risk()
    assert model.invoke("Once") == model.invoke("Once")
    assert len(spy.method_calls) == 1


def test_marks_find_their_place_where_text_comes_later_than_its_spans(
    quick_chat: ChatCocoa, quick_answer: AIMessage, between: float
) -> None:
    first, second, *others = quick_chat.stream(QUESTION)
    late = [
        first.model_copy(update={"content": ""}),  # as where a tool call may begin
        second.model_copy(update={"content": first.text + second.text}),
        *others,
    ]
    gate = risk_gate(between, on_risk="mark")
    whole = add(list(gate.transform(iter(late))))
    assert whole.text == with_riskiest_marked(quick_answer)
    assert get_risk(whole).to_dict() == get_risk(gate.invoke(quick_answer)).to_dict()


DOCUMENTS = [Document("a", id="a"), Document("b"), Document("c")]
UNITS = ("span", "claim", "sentence")
STEPS = st.lists(
    st.sampled_from(
        [
            ("cite",),
            *(("mark", mark, unit, threshold) for mark in MARKS for unit in UNITS for threshold in (0.3, 0.5)),
            ("mark", redact, "span", 0.8),
            ("mark", redact, "claim", 0.5),
            ("abstain",),
        ]
    ),
    max_size=4,
)


@cache
def thinker() -> CocoaEngine:
    return reasoning_engine()


def message_of(spans: list[tuple[str, float]], reasoning: str | None = None) -> AIMessage:
    """The answer of ``ChatCocoa``."""
    before = [] if reasoning is None else [("<think>", 0.5), (reasoning, 0.7)]
    whole = generation(*before, *spans)
    split = split_generation(whole, thinker())
    return AIMessage(
        content=message_content(split.reasoning, whole.text[split.answer_start :]),
        additional_kwargs={SPANS_KEY: all_spans(whole, split)},
        response_metadata={"cocoa_risk": risk_report(whole, split)},
    )


def streamed(spans: list[tuple[str, float]]) -> list[Any]:
    """The chunks of an answer."""
    whole = generation(*spans)
    chunks = [AIMessageChunk(span["text"], additional_kwargs={SPANS_KEY: [span]}) for span in all_spans(whole)]
    return [*chunks, AIMessageChunk("", response_metadata={"cocoa_risk": risk_report(whole)})]


def stepped(answer: Any, step: tuple[Any, ...], values: list[list[float | None]]) -> Any:
    if step[0] == "cite":
        return cited(answer, values[: len(to_dicts(get_spans(answer)))], DOCUMENTS, min_attention=1.0)
    if step[0] == "abstain":
        return risk_gate(0.9, on_risk="abstain", answer=2 * REDACTED).invoke(answer)
    _, mark, unit, threshold = step
    return risk_gate(threshold, on_risk="mark", mark=mark, unit=unit).invoke(answer)


def assert_follows(answer: Any) -> None:
    text = answer["text"] if isinstance(answer, dict) else answer.text
    report, begin = get_risk(answer).to_dict(), get_risk(answer).begin
    for spans in (report["spans"], to_dicts(get_spans(answer))):
        assert_offsets_follow(text, [one for one in spans if one.get("part") != "reasoning"], begin=begin)
    for key in ("claims", "sentences"):
        assert_offsets_follow(text, report.get(key, []), begin=begin)
    assert_offsets_follow(text, report["check"], begin=begin, ordered=False)
    if isinstance(answer, AIMessage):
        citations = answer.response_metadata.get("cocoa_citations", [])
        assert all(Citation.from_wire(one).to_dict() == one for one in citations)
        assert_offsets_follow(text, citations)


@pytest.mark.slow
@given(SPANS, st.none() | st.just("Well.</think>\n\n") | st.just("Hm </think>"), VALUES, STEPS, st.booleans())
def test_offsets_follow_any_steps(spans: Any, reasoning: Any, values: Any, steps: Any, compact: bool) -> None:
    message = message_of(spans, reasoning)
    if compact:
        message = reduced(message, "compact", logprobs=False)
    original, risks = message.text, [span["risk"] for span in to_dicts(get_spans(message))]
    highest = {unit: max_risk(message, unit=unit) for unit in UNITS}
    assert_follows(message)
    for step in steps:
        message = stepped(message, step, values)
        assert_follows(message)
        assert [span["risk"] for span in to_dicts(get_spans(message))] == risks
        assert {unit: max_risk(message, unit=unit) for unit in highest} == highest
    if not any(step[0] == "abstain" or redact in step for step in steps):
        assert squeezed(message.text) == "".join(original.split())
        if len({step[2] for step in steps if step[0] == "mark"}) <= 1:
            assert_nested(message.text)


@pytest.mark.slow
@given(SPANS, VALUES, STEPS)
def test_the_same_steps_in_any_order_and_again_change_nothing(spans: Any, values: Any, steps: Any) -> None:
    def after(message: AIMessage, steps: Any) -> AIMessage:
        for step in steps:
            message = stepped(message, step, values)
        return message

    message = after(message_of(spans), steps)
    again = after(message, steps)
    if not {("cite",), ("abstain",)} <= {*steps}:  # nothing of a text that took the place of an answer is cited
        assert again.text == message.text
        assert {**get_risk(again).to_dict(), "gate": None} == {**get_risk(message).to_dict(), "gate": None}
        assert again.response_metadata.get("cocoa_citations") == message.response_metadata.get("cocoa_citations")
    if ("abstain",) not in steps and len({step[1] for step in steps if step[0] == "mark"}) <= 1:
        orders = itertools.islice(itertools.permutations(dict.fromkeys(steps)), 6)
        assert {after(message_of(spans), order).text for order in orders} == {message.text}


@pytest.mark.slow
@given(SPANS, st.lists(st.tuples(st.sampled_from(UNITS), st.sampled_from([0.3, 0.5, 0.8])), max_size=4))
def test_one_mark_of_several_gates_is_never_inside_itself(spans: Any, gates: Any) -> None:
    message = message_of(spans)
    covered = set[int]()
    for unit, threshold in gates:
        alone = stepped(message_of(spans), ("mark", MARKS[0], unit, threshold), [])
        covered |= {at for one in get_risk(alone).edits for at in range(one.start, one.end)}
        message = stepped(message, ("mark", MARKS[0], unit, threshold), [])
    assert OPENINGS[0] not in re.sub(rf"{OPENINGS[0]}[^{OPENINGS[0]}]*?{CLOSINGS[0]}", "", message.text)
    marks = [(one.start, one.end) for one in get_risk(message).edits]
    assert {at for start, end in marks for at in range(start, end)} == covered
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(marks))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('aB 7é"{[', max_size=9),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text("ab ", max_size=5), values, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(JSON, st.sampled_from(["{}", " {}\n", "```json\n{}\n```"]), st.data(), VALUES, STEPS)
def test_json_stays_as_it_is(value: Any, form: str, data: st.DataObject, values: Any, steps: Any) -> None:
    text = form.format(json.dumps(value, ensure_ascii=False, indent=data.draw(st.none() | st.just(1))))
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    spans = [(text[low:high], data.draw(st.sampled_from([0.1, 0.9]))) for low, high in itertools.pairwise(cuts)]
    asked = not isinstance(value, (dict, list))  # a report with fields says that JSON was asked for
    message = message_of(spans)
    if asked:
        message.response_metadata["cocoa_risk"]["fields"] = {}
    message = reduced(message, data.draw(st.sampled_from(["full", "compact"])), logprobs=False)
    for step in steps:
        if step[0] != "abstain" and redact not in step:
            message = stepped(message, step, values)
            assert message.text == text
            assert ("cocoa_citations" in message.response_metadata) or step[0] != "cite"
            assert (
                get_risk(message).gate is not None
                or step[0] == "cite"
                or step[2] != "span"
                or not any(risk > step[3] and part.strip() for part, risk in spans)
            )
    if not asked and not form.startswith("`"):
        assert add(list(risk_gate(0.5, on_risk="mark").transform(iter(streamed(spans))))).text == text


@pytest.mark.slow
@given(SPANS, STEPS.filter(lambda steps: ("cite",) not in steps))
def test_generations_and_dicts(spans: Any, steps: Any) -> None:
    whole = generation(*spans)
    info = {SPANS_KEY: all_spans(whole), "cocoa_risk": risk_report(whole)}
    forms: list[Any] = [
        Generation(text=whole.text, generation_info=info),
        {"text": whole.text, "risk": risk_report(whole)},
        ChatGeneration(message=message_of(spans)),
    ]
    for step in steps:
        forms = [stepped(answer, step, []) for answer in forms]
        for answer in forms:
            assert_follows(answer)
    assert len({answer["text"] if isinstance(answer, dict) else answer.text for answer in forms}) == 1
    assert_follows(RiskOutputParser().invoke(forms[2].message))


@given(SPANS, st.lists(st.tuples(st.sampled_from([*MARKS, redact]), st.sampled_from([0.3, 0.5, 0.8])), max_size=3))
def test_streams_add_up_to_the_same(spans: Any, gates: Any) -> None:
    message = message_of(spans)
    stream, whole = streamed(spans), message
    for mark, threshold in gates:
        gate = risk_gate(threshold, on_risk="mark", mark=mark)
        stream, whole = list(gate.transform(iter(stream))), gate.invoke(whole)
    total = add(stream)
    assert total.text == whole.text
    assert get_risk(total).to_dict() == get_risk(whole).to_dict()
    assert to_dicts(get_spans(total)) == to_dicts(get_spans(whole)) == get_risk(whole).to_dict()["spans"]


@pytest.mark.parametrize("text", ["Hello you!", "<think>It is a greeting.</think>\n\nHello you!"])
def test_marks_of_a_stream_after_reasoning(text: str) -> None:
    engine = reasoning_engine(PLAIN)
    chat = ChatCocoa(engine=engine, risk_metadata="full", **saying(engine, text))
    chain = chat | risk_gate(0.0, on_risk="mark", mark="<{text}>") | risk_gate(0.0, on_risk="mark", mark="({text})")
    whole, total = chain.invoke("Hi"), add(list(chain.stream("Hi")))
    assert total.text == whole.text
    assert TOKENS.sub("", total.text.translate(str.maketrans("", "", "<>()"))) == "Hello you!"
    assert to_dicts(get_spans(total)) == to_dicts(get_spans(whole)) == get_risk(total).to_dict()["spans"]
    assert get_risk(total).to_dict() == get_risk(whole).to_dict()


@pytest.mark.parametrize("detail", ["full", "compact"])
def test_a_text_that_a_person_changed_is_refused(detail: Any) -> None:
    message = reduced(message_of([("The tower", 0.9), (" is old.", 0.9)]), detail, logprobs=False)
    marked = risk_gate(0.5, on_risk="mark").invoke(message)
    for text in (f"So {marked.text}", marked.text.replace("old", "new one"), marked.text.replace("[[", "(")):
        changed = marked.model_copy(update={"content": text})
        with pytest.raises(ConfigError, match="before changing its text"):
            risk_gate(0.5, on_risk="mark").invoke(changed)


@pytest.mark.parametrize(
    "mark",
    [
        "<a title='{text}'>{text}</a>",
        "{{text}}{text}",
        lambda text, _: f"<mark>{text}</mark>",
        lambda text, _: f"{text}^{text}",
    ],
)
@pytest.mark.parametrize("text", ["a", "Text", "mark"])
def test_a_mark_that_repeats_the_text(mark: Any, text: str) -> None:
    marked = risk_gate(0.5, on_risk="mark", mark=mark).invoke(message_of([("No", 0.1), (f" {text}", 0.9), (" x", 0.1)]))
    whole = mark.format(text=text) if isinstance(mark, str) else mark(text, {})
    assert marked.text == f"No {whole} x"
    assert_follows(marked)
    [edit] = get_risk(marked).to_dict()["edits"]
    assert (edit.get("before", ""), edit.get("after", "")) in [
        (whole[:at], whole[at + len(text) :]) for at in range(99)
    ]
    again = risk_gate(0.5, on_risk="mark", mark="({text})").invoke(marked)
    assert again.text == f"No ({whole}) x"


def test_the_fields_of_json_follow() -> None:
    message = message_of([('{"a"', 0.1), (': "red', 0.9), ('", "b', 0.1), ('": 41}', 0.1)])
    places = {"$.a": (7, 10), "$.b": (18, 20)}
    measured = {"risk": 0.1, "con_mlds": 0.1, "f_mlds": 0.1, "log_prob": -1.0, "spans": [0]}
    entries = {path: {**measured, "start": start, "end": end} for path, (start, end) in places.items()}
    message.response_metadata["cocoa_risk"]["fields"] = entries
    marked = risk_gate(0.5, on_risk="mark", mark="<<{text}>>").invoke(message)
    fields = get_risk(marked).to_dict()["fields"]
    assert [marked.text[one["start"] : one["end"]].strip("<>") for one in fields.values()] == ["red", "41"]
