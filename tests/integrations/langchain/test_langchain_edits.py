"""Steps that change the text of an answer, in any order: the offsets of its report follow."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables.utils import add

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_engine.report import SPANS_KEY
from cocoa_integrations._shared.citations import Citation
from cocoa_integrations._shared.reasoning import split_generation
from cocoa_integrations.langchain import ChatCocoa, RiskOutputParser, get_risk, get_spans, max_risk, risk_gate
from cocoa_integrations.langchain.answers import reduced
from cocoa_integrations.langchain.citations import cited
from cocoa_integrations.langchain.messages import message_content
from tests.helpers import edited_answers as edited
from tests.helpers.edited_answers import MARKS, SPANS, VALUES, assert_offsets_follow, redact
from tests.helpers.made_up_answers import generation
from tests.helpers.reasoning_models import PLAIN, reasoning_engine, saying
from tests.helpers.reports import all_spans, risk_report, to_dicts

DOCUMENTS = [Document("a", id="a"), Document("b"), Document("c")]
UNITS = ("span", "claim", "sentence")
KINDS: list[tuple[Any, ...]] = [
    *(("cite",), ("abstain",), ("mark", redact, "span", 0.8), ("mark", redact, "claim", 0.5)),
    *(("mark", mark, unit, threshold) for mark in MARKS for unit in UNITS for threshold in (0.3, 0.5)),
]
STEPS = st.lists(st.sampled_from(KINDS), max_size=4)
GATES = st.lists(st.tuples(*map(st.sampled_from, ([*MARKS, redact], UNITS, (0.3, 0.5, 0.8)))), max_size=3)


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


def streamed(message: AIMessage) -> list[Any]:
    spans = to_dicts(get_spans(message))
    chunks = [AIMessageChunk(span["text"], additional_kwargs={SPANS_KEY: [span]}) for span in spans]
    return [*chunks, AIMessageChunk("", response_metadata=message.response_metadata)]


def stepped(answer: Any, steps: Any, values: Any = ()) -> Any:
    for kind, *step in steps:
        if kind == "cite":
            answer = cited(answer, values[: len(to_dicts(get_spans(answer)))], DOCUMENTS, lowest=1.0, by="lift")
        elif kind == "abstain":
            answer = risk_gate(0.9, on_risk="abstain", answer=2 * edited.REDACTED).invoke(answer)
        else:
            answer = risk_gate(step[2], on_risk="mark", mark=step[0], unit=step[1]).invoke(answer)
        assert_follows(answer)
    return answer


def text_of(answer: Any) -> str:
    return answer["text"] if isinstance(answer, dict) else answer.text


def assert_follows(answer: Any) -> None:
    report, begin = get_risk(answer).to_dict(), get_risk(answer).begin
    citations = answer.response_metadata.get("cocoa_citations", []) if isinstance(answer, AIMessage) else []
    for spans in (report["spans"], to_dicts(get_spans(answer))):
        shown = [one for one in spans if one.get("part") != "reasoning"]
        assert_offsets_follow(text_of(answer), shown, begin=begin)
    for units in (report.get("claims", []), report.get("sentences", [])):
        assert_offsets_follow(text_of(answer), units, begin=begin)
    assert_offsets_follow(text_of(answer), report["check"], begin=begin, ordered=False)
    assert_offsets_follow(text_of(answer), citations)
    assert all(Citation.from_wire(one).to_dict() == one for one in citations)


@settings(max_examples=75, deadline=None)
@given(SPANS, st.none() | st.just("Well.</think>\n\n") | st.just("Hm </think>"), VALUES, STEPS, st.booleans())
def test_steps_in_any_order_and_again(spans: Any, reasoning: Any, values: Any, steps: Any, compact: bool) -> None:
    """The risks stay, and the same steps again, in any order, change nothing."""

    def measured(message: AIMessage) -> list[Any]:
        return [
            [one["risk"] for one in to_dicts(get_spans(message))],
            *(max_risk(message, unit=unit) for unit in UNITS),
        ]

    def whole(message: AIMessage) -> Any:
        kept = {**get_risk(message).to_dict(), "gate": None}
        return message.text, kept, message.response_metadata.get("cocoa_citations")

    original = message_of(spans, reasoning)
    if compact:
        original = reduced(original, "compact", logprobs=False)
    assert_follows(original)
    message = stepped(original, steps, values)
    assert measured(message) == measured(original)
    if not {("cite",), ("abstain",)} <= {*steps}:  # nothing of a text that took the place of an answer is cited
        assert whole(stepped(message, steps, values)) == whole(message)
    if any(step[0] == "abstain" or redact in step for step in steps):
        return
    assert edited.squeezed(message.text) == "".join(original.text.split())
    marks = [step[1:] for step in steps if step[0] == "mark"]
    if len({unit for _, unit, _ in marks}) <= 1:
        edited.assert_nested(message.text)
    if len({mark for mark, _, _ in marks}) <= 1:
        orders = itertools.islice(itertools.permutations(dict.fromkeys(steps)), 6)
        assert {stepped(original, order, values).text for order in orders} == {message.text}


def test_a_citation_is_never_inside_of_a_mark() -> None:
    message = message_of([("The tower", 0.1), (" is", 0.2), (" old", 0.9), (".", 0.1)])
    for order in itertools.permutations([("mark", "<{text}>", "span", 0.5), ("cite",)]):
        answer = stepped(message, order, [[None], [None], [2.0], [None]])
        [citation] = answer.response_metadata["cocoa_citations"]
        assert answer.text == "The tower is <old> [1]."
        assert answer.text[citation["start"] : citation["end"]] == "old"


@settings(max_examples=100, deadline=None)
@given(SPANS, GATES)
def test_one_mark_of_several_gates_is_never_inside_itself(spans: Any, gates: Any) -> None:
    steps = [("mark", MARKS[0], *gate) for _, *gate in gates]
    alone = [get_risk(stepped(message_of(spans), [step])).edits for step in steps]
    message = stepped(message_of(spans), steps)
    opens, closes = edited.OPENINGS[0], edited.CLOSINGS[0]
    assert opens not in re.sub(rf"{opens}[^{opens}]*?{closes}", "", message.text)
    marks = [(one.start, one.end) for one in get_risk(message).edits]
    covered = {at for edits in alone for one in edits for at in range(one.start, one.end)}
    assert {at for start, end in marks for at in range(start, end)} == covered
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(marks))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('aB 7é"{[', max_size=9),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text("ab ", max_size=5), values, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(JSON, st.sampled_from(["{}", " {}\n", "```json\n{}\n```"]), st.data(), VALUES, STEPS)
def test_json_stays_as_it_is(value: Any, form: str, data: st.DataObject, values: Any, steps: Any) -> None:
    text = form.format(json.dumps(value, ensure_ascii=False, indent=data.draw(st.none() | st.just(1))))
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    spans = [(text[low:high], data.draw(st.sampled_from([0.1, 0.9]))) for low, high in itertools.pairwise(cuts)]
    message = message_of(spans)
    asked = not isinstance(value, (dict, list))  # a report with fields says that JSON was asked for
    message.response_metadata["cocoa_risk"] |= {"fields": {}} if asked else {}
    shown = reduced(message, data.draw(st.sampled_from(["full", "compact"])), logprobs=False)
    for step in steps:
        if step[0] != "abstain" and redact not in step:
            shown = stepped(shown, [step], values)
            assert shown.text == text
            assert step[0] != "cite" or "cocoa_citations" in shown.response_metadata
            risky = "span" in step and any(risk > step[3] and part.strip() for part, risk in spans)
            assert get_risk(shown).gate is not None or not risky
    if not asked and not form.startswith("`"):
        assert add(list(risk_gate(0.5, on_risk="mark").transform(iter(streamed(message))))).text == text


@settings(max_examples=75, deadline=None)
@given(SPANS, GATES)
def test_streams_generations_and_dicts_show_what_messages_show(spans: Any, gates: Any) -> None:
    message = message_of(spans)
    info, text = {**message.additional_kwargs, **message.response_metadata}, message.text
    dictionary = {"text": text, "risk": info["cocoa_risk"]}
    forms = [Generation(text=text, generation_info=info), dictionary, ChatGeneration(message=message)]
    steps = [("mark", *gate) for gate in gates]
    whole = stepped(message, steps)
    assert {text_of(stepped(form, steps)) for form in forms} == {whole.text}
    assert_follows(RiskOutputParser().invoke(whole))
    whole, stream = message, streamed(message)
    for mark, _, threshold in gates:
        gate = risk_gate(threshold, on_risk="mark", mark=mark)
        stream, whole = list(gate.transform(iter(stream))), gate.invoke(whole)
    assert_same(add(stream), whole)


def assert_same(total: Any, whole: AIMessage) -> None:
    assert total.text == whole.text
    assert get_risk(total).to_dict() == get_risk(whole).to_dict()
    assert to_dicts(get_spans(total)) == to_dicts(get_spans(whole)) == get_risk(whole).to_dict()["spans"]


@pytest.mark.parametrize("text", ["Hello you!", "<think>It is a greeting.</think>\n\nHello you!"])
def test_marks_of_a_stream_after_reasoning(text: str) -> None:
    engine = reasoning_engine(PLAIN)
    chat = ChatCocoa(engine=engine, risk_metadata="full", **saying(engine, text))
    chain = chat | risk_gate(0.0, on_risk="mark", mark="<{text}>") | risk_gate(0.0, on_risk="mark", mark="({text})")
    total = add(list(chain.stream("Hi")))
    assert_same(total, chain.invoke("Hi"))
    assert re.sub("[<>()]", "", total.text) == "Hello you!"


@pytest.mark.parametrize("detail", ["full", "compact"])
def test_a_text_that_a_person_changed_is_refused(detail: Any) -> None:
    message = reduced(message_of([("The tower", 0.9), (" is old.", 0.9)]), detail, logprobs=False)
    marked = risk_gate(0.5, on_risk="mark").invoke(message)
    for text in (f"So {marked.text}", marked.text.replace("old", "new one"), marked.text.replace("[[", "(")):
        with pytest.raises(ConfigError, match="before changing its text"):
            risk_gate(0.5, on_risk="mark").invoke(marked.model_copy(update={"content": text}))


@pytest.mark.parametrize(
    "mark", ["<a title='{text}'>{text}</a>", "{{text}}{text}", "<mark>{text}</mark>", "{text}^{text}"]
)
@pytest.mark.parametrize("text", ["a", "Text", "mark"])
def test_a_mark_that_repeats_the_text(mark: str, text: str) -> None:
    whole = mark.format(text=text)
    for one in (mark, lambda text, _: mark.format(text=text)):
        marked = stepped(message_of([("No", 0.1), (f" {text}", 0.9), (" x", 0.1)]), [("mark", one, "span", 0.5)])
        assert marked.text == f"No {whole} x"
        [edit] = get_risk(marked).to_dict()["edits"]
        around = [(whole[:at], whole[at + len(text) :]) for at in range(len(whole))]
        assert (edit.get("before", ""), edit.get("after", "")) in around
        assert stepped(marked, [("mark", "({text})", "span", 0.5)]).text == f"No ({whole}) x"


def test_the_fields_of_json_follow() -> None:
    message = message_of([('{"a"', 0.1), (': "red', 0.9), ('", "b', 0.1), ('": 41}', 0.1)])
    measured = {"risk": 0.1, "con_mlds": 0.1, "f_mlds": 0.1, "log_prob": -1.0, "spans": [0]}
    fields = {path: {**measured, "start": start, "end": end} for path, start, end in (("$.a", 7, 10), ("$.b", 18, 20))}
    message.response_metadata["cocoa_risk"]["fields"] = fields
    marked = risk_gate(0.5, on_risk="mark", mark="<<{text}>>").invoke(message)
    fields = get_risk(marked).to_dict()["fields"]
    assert [marked.text[one["start"] : one["end"]].strip("<>") for one in fields.values()] == ["red", "41"]
