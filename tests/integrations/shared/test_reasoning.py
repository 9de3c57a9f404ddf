"""Reasoning is told from the answer, however the text arrives, and whether the prompt opens it or the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.report import RiskReport, SpanReport
from cocoa_integrations._shared.chat_template import (
    ends_inside_reasoning,
)
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.limits import Limit
from cocoa_integrations._shared.reasoning import split_generation
from cocoa_integrations.chat_service.local import GrowingAnswer
from cocoa_integrations.tool_calling import Plan, ToolRequest
from tests.helpers.made_up_answers import generation
from tests.helpers.made_up_risk import fitted
from tests.helpers.reasoning_models import HYBRID, OPENS, PLAIN, reasoning_engine
from tests.helpers.reports import risk_report

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
USER = {"role": "user", "content": "Hi"}
THINKING = {**USER, "content": "<think>"}


@pytest.fixture(scope="module")
def thinker() -> CocoaEngine:
    return reasoning_engine()


def cuts(text: str) -> Iterator[list[str]]:
    """The text in pieces of one, two, three and seven characters, and in two pieces at every place."""
    for size in (1, 2, 3, 7):
        yield [text[at : at + size] for at in range(0, len(text), size)]
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "answer", "calls"),
    [
        (False, "Hello </think> x", "", "Hello </think> x", 0),
        (False, "\n Hello", "", "\n Hello", 0),
        (False, "<thin ice", "", "<thin ice", 0),
        (False, "<thi", "", "<thi", 0),
        (False, "Use <think> and </think>.", "", "Use <think> and </think>.", 0),
        (False, "<think>\nWell.\n</think>\n\nHello!\n", "Well.", "Hello!\n", 0),
        (False, "\n<think>Well", "Well", "", 0),
        (False, "<think>\n\n</think>\n\nHello", "", "Hello", 0),
        (True, "Well, a < b.</think>\n\nHello", "Well, a < b.", "Hello", 0),
        (True, "\n<think>\nWell </thin</think>Hello</think>", "Well </thin", "Hello</think>", 0),
        (True, "Well </thi", "Well </thi", "", 0),
        (True, " \n", "", "", 0),
        (True, "</think>Hello", "", "Hello", 0),
        (True, f"I could {CALL} but…</think>\n\nHello!", f"I could {CALL} but…", "Hello!", 0),
        (True, f"I could {CALL} and</think>\n{CALL}", f"I could {CALL} and", "", 1),
        (False, f"<think>{CALL}", CALL, "", 0),
        (False, f" {CALL}", "", "", 1),
    ],
)
def test_the_parts_add_up_however_the_text_is_cut(
    thinker: CocoaEngine, inside: bool, text: str, reasoning: str, answer: str, calls: int
) -> None:
    for pieces in cuts(text):
        whole = generation(*((piece, 0.5) for piece in pieces))
        plan = Plan(ToolRequest.of([ADD]), thinker)
        plan.inside_reasoning = inside
        growing = GrowingAnswer(plan)
        seen = []
        for span in whole.spans:
            seen += growing.add(span)
        held, rest, reading = growing.finish()
        seen += [*held, rest]
        split = plan.split(whole)
        assert ("".join(piece.reasoning for piece in seen), split.reasoning) == (reasoning, reasoning)
        assert ("".join(piece.content for piece in seen), reading.content) == (answer, answer)
        assert [call.error for call in reading.calls] == [None] * calls
        assert [(piece.entry.span, piece.entry.part) for piece in seen[:-1]] == [
            (number, None if split.parts is None else split.parts[number]) for number in range(len(whole.spans))
        ]
        assert all(piece.calls == [] for piece in seen) == (calls == 0)
        if calls:
            assert whole.text[slice(*reading.calls[0].values["a"])] == "1"


def test_a_span_belongs_to_where_its_visible_text_is(thinker: CocoaEngine) -> None:
    texts = ["Well.", " </thi", "nk>\n", "\n", "Hello", "!"]
    split = split_generation(generation(*((text, 0.5) for text in texts)), thinker, inside=True)
    assert split.parts == ("reasoning", "reasoning", "reasoning", "answer", "answer", "answer")
    straddles = split_generation(generation(("Well.</think> Hi", 0.9), ("!", 0.1)), thinker, inside=True)
    assert straddles.parts == ("answer", "answer")
    assert split_generation(generation(("Hi", 0.5)), thinker).parts is None


def test_reports_and_limits_count_the_answer(thinker: CocoaEngine) -> None:
    whole = generation(("Well, ", 0.9), ("ok.</think>", 0.7), ("\n\nHel", 0.2), ("lo", 0.4))
    report = split_generation(whole, thinker, inside=True).report(whole)
    assert (report.max_risk, report.mean_risk) == (0.4, pytest.approx(0.3))
    assert report.reasoning is not None
    assert report.reasoning.to_dict() == {
        "max_risk": 0.9,
        "mean_risk": pytest.approx(0.8),
        "risk_points": 0,
        "spans": [0, 1],
        "answer_start": 19,
    }
    assert [span.part for span in report.spans] == ["reasoning", "reasoning", "answer", "answer"]
    assert [span.span for span, _ in Limit(0.3).risky(report.spans) if isinstance(span, SpanReport)] == [3]

    def marked(threshold: float, text: str, report: RiskReport) -> str:
        edited = EditedText.of(text, report)
        return edited.changed(Limit(threshold).mark_edits(edited.spans(report.spans), "[{text}]")).text

    assert marked(0.2, "Hello", report) == "[Hello]"
    straddles = generation(("Well.</think> Hi", 0.9), ("!", 0.1))
    straddling = split_generation(straddles, thinker, inside=True).report(straddles)
    assert marked(0.5, "Hi!", straddling) == "[Hi]!"
    for wrong in ("i!", "Hello", "Well. Hi!"):
        with pytest.raises(ConfigError, match="differs from the text of its spans"):
            marked(0.5, wrong, straddling)
    plain = risk_report(whole, split_generation(whole, thinker))
    assert plain == risk_report(whole)
    assert "reasoning" not in plain
    assert "part" not in plain["spans"][0]


@pytest.mark.slow
def test_the_risk_of_the_answer_as_a_whole_is_that_of_the_answer() -> None:
    calibrator = fitted(levels=("answer",))
    thinker = reasoning_engine(calibrator=calibrator)
    whole = generation(("Well.</think>", 0.9), ("Hello", 0.1), ("!", 0.4)).model_copy(update={"answer_risk": 0.5})
    split = split_generation(whole, thinker, inside=True)
    alone = generation(("Hello", 0.1), ("!", 0.4))
    assert risk_report(whole, split)["answer_risk"] == calibrator.answer_risk(alone)
    assert risk_report(whole)["answer_risk"] == 0.5
    cut_off = generation(("Well", 0.9)).model_copy(update={"answer_risk": 0.5})
    assert risk_report(cut_off, split_generation(cut_off, thinker, inside=True))["answer_risk"] is None


@pytest.mark.parametrize(
    ("template", "chat", "kwargs", "inside"),
    [
        (OPENS, [USER], {}, True),
        (PLAIN, [USER], {}, False),
        (PLAIN, [{**USER, "content": "What is <think>"}], {}, False),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", [THINKING], {}, False),
        ("{{ messages[0].content if add_generation_prompt else raise_exception('') }}", [THINKING], {}, False),
        (HYBRID, [USER], {}, False),
        (HYBRID, [USER], {"enable_thinking": False}, False),
        (OPENS, [USER, {"role": "assistant", "content": "a </think> b"}, USER], {}, True),
        (PLAIN, [USER, {"role": "assistant", "content": "<think>Well"}], {"continue_final_message": True}, True),
        (PLAIN, [USER, {"role": "assistant", "content": "<think>a</think>b"}], {"continue_final_message": True}, False),
        (OPENS, [USER, {"role": "assistant", "content": "Hello"}], {"continue_final_message": True}, False),
    ],
)
def test_the_rendered_prompt_says_whether_the_answer_begins_inside(
    template: str, chat: list[dict[str, str]], kwargs: dict[str, bool], inside: bool
) -> None:
    if "continue_final_message" in kwargs:
        kwargs = {**kwargs, "add_generation_prompt": False}
    assert ends_inside_reasoning(reasoning_engine(template), chat, kwargs) is inside
