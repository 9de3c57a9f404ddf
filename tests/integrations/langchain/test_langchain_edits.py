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
from tests.helpers.reports import all_spans, risk_report, to_dicts

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
        return cited(answer, values[: len(to_dicts(get_spans(answer)))], DOCUMENTS, lowest=1.0, by="lift")
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


@settings(max_examples=150, deadline=None)
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


def test_a_citation_is_never_inside_of_a_mark() -> None:
    message, mark = (
        message_of([("The tower", 0.1), (" is", 0.2), (" old", 0.9), (".", 0.1)]),
        ("mark", MARKS[0], "span", 0.5),
    )
    values: list[list[float | None]] = [[None], [None], [2.0], [None]]
    for order in itertools.permutations([mark, ("cite",)]):
        answer = stepped(stepped(message, order[0], values), order[1], values)
        [citation] = answer.response_metadata["cocoa_citations"]
        assert answer.text == f"The tower is {OPENINGS[0]}old{CLOSINGS[0]} [1]."
        assert answer.text[citation["start"] : citation["end"]] == "old"


@settings(max_examples=75, deadline=None)
@given(SPANS, VALUES, STEPS)
def test_the_same_steps_in_any_order_and_again_change_nothing(spans: Any, values: Any, steps: Any) -> None:
    def after(message: AIMessage, steps: Any) -> AIMessage:
        for step in steps:
            message = stepped(message, step, values)
        return message

    message = after(message_of(spans), steps)
    again = after(message, steps)
    assert again.text == message.text
    assert {**get_risk(again).to_dict(), "gate": None} == {**get_risk(message).to_dict(), "gate": None}
    assert again.response_metadata.get("cocoa_citations") == message.response_metadata.get("cocoa_citations")
    if ("abstain",) not in steps and len({step[1] for step in steps if step[0] == "mark"}) <= 1:
        orders = itertools.islice(itertools.permutations(dict.fromkeys(steps)), 6)
        assert {after(message_of(spans), order).text for order in orders} == {message.text}


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=150, deadline=None)
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
