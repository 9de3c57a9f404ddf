"""Where marks of risk stand: around whole words, on one line, never on punctuation alone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables.utils import add

from cocoa_engine.risk.clauses import clauses, marked_stretches
from cocoa_engine.risk.sentences import list_marks
from cocoa_engine.risk.words import word_ranges
from cocoa_integrations.langchain import risk_gate
from tests.helpers.made_up_answers import generation
from tests.helpers.reports import all_spans, risk_report

LINES = ("\n", "\n\n", "\n- ", "\n1. ", "\n# ", "\n```python\nx = 1\n```\n", "\n| a. b | c |\n|---|---|\n", "> ")
TEXTS = st.lists(
    st.one_of(
        st.sampled_from((" tower", " Lindqvist", "3.14", " --mail-option", "塔は", " برج", " don't", " C++", "`a b`")),
        st.sampled_from(
            (" $a. b$", "\\(x", "\\)", " [a b](https://x.org/c)", " <b class=x>", "`", "$", "](", "[", "x | y", "~~~")
        ),
        st.sampled_from((".", ", ", "...", "!", " — ", " (", ")", "。", ": ", " ", "*", " 😀", "_")),
        st.sampled_from(LINES),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)


def message_of(spans: list[tuple[str, float]]) -> AIMessage:
    whole = generation(*spans)
    return AIMessage(whole.text, response_metadata={"cocoa_risk": risk_report(whole)})


def message_spans(spans: list[tuple[str, float]]) -> list[dict[str, Any]]:
    return all_spans(generation(*spans))


def marked(spans: list[tuple[str, float]], threshold: float = 0.5, mark: Any = "[[{text}]]") -> str:
    return risk_gate(threshold, on_risk="mark", mark=mark).invoke(message_of(spans)).text


@settings(max_examples=300)
@given(TEXTS, st.data())
def test_stretches_of_any_text(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    ranges = [one for one in itertools.pairwise(cuts) if data.draw(st.booleans())]
    words = [
        word
        for word in word_ranges(text, (at for one in ranges for at in one))
        if any(map(str.isalnum, text[word.start : word.end]))
    ]
    found = marked_stretches(text, ranges)
    code = [one for one in clauses(text) if one.is_code]
    assert all(before.end < after.start for before, after in itertools.pairwise(found))
    for start, end, numbers, _ in found:
        part = text[start:end]
        assert any(map(str.isalnum, part))
        assert part == part.strip()
        assert "\n" not in part
        assert not any(word.start < edge < word.end for word in words for edge in (start, end))
        line = text[text.rfind("\n", 0, start) + 1 :].partition("\n")[0]
        assert not line.lstrip(" \t>").startswith(("```", "~~~"))
        assert not any(one.start < place < one.end for one in code for place in (start, end))
        assert not any(start < one.place < end for one in clauses(text)), "a marker would stand inside"
        if line.startswith("|"):
            assert "|" not in part
        assert numbers
    for number, (low, high) in enumerate(ranges):
        inside = [word for word in words if word.start < high and low < word.end and low < high]
        if inside and not set("`~|\n$<[(\\") & set(text):
            assert any(number in one.numbers for one in found)


@settings(max_examples=300)
@given(st.lists(st.tuples(TEXTS, st.sampled_from([0.1, 0.9])), max_size=6))
def test_no_risky_word_is_left_after_redaction(spans: list[tuple[str, float]]) -> None:
    """In code, tags and links too; marks of lists and headings stay."""
    text, ranges = "".join(part for part, _ in spans), []
    for part, risk in spans:
        start = ranges[-1][1] if ranges else 0
        ranges.append((start, start + len(part), risk))
    risky = {at for start, end, risk in ranges if risk > 0.5 for at in range(start, end) if text[at].isalnum()}
    risky -= {at for mark in list_marks(text) for at in range(*mark)}
    edits = risk_gate(0.5, on_risk="mark", mark=lambda part, _: "█").invoke(message_of(spans))
    replaced = edits.response_metadata["cocoa_risk"].get("edits", [])
    assert risky <= {at for one in replaced for at in range(one["start"], one["end"])}
    for one in replaced:
        assert one["was"] == text[one["start"] : one["end"]]
        assert any(start < one["end"] and one["start"] < end and risk > 0.5 for start, end, risk in ranges)
    kept = risk_gate(0.5, on_risk="mark", mark=lambda part, _: f"[[{part}]]").invoke(message_of(spans))
    assert kept.text == marked(spans)


def streamed(spans: list[tuple[str, float]], gate: Any, **report: Any) -> list[AIMessageChunk]:
    chunks = [AIMessageChunk(one["text"], additional_kwargs={"cocoa_spans": [one]}) for one in message_spans(spans)]
    last = {"cocoa_risk": {**message_of(spans).response_metadata["cocoa_risk"], **report}}
    return list(gate.transform(iter([*chunks, AIMessageChunk("", response_metadata=last, chunk_position="last")])))


SIGNS = (
    *("$", "$5", " for", "\\[", "\\]", "\\(", "\n$$\n", "$$", "\\begin{a}", "\\end{a}", "\n", "\n\n", "`", "[", "]"),
    *("(", "](x)", "[^1]", "<a b", ">", " red", "old ", " *", "**", "1", "-", '"', "{", "}", ",", "true", ".", ":"),
)
REDACT = "█"


@settings(max_examples=300)
@given(
    st.lists(st.tuples(TEXTS, st.sampled_from([0.1, 0.9])), max_size=8),
    st.sampled_from(["[[{text}]]", lambda part, _: REDACT * len(part)]),
)
def test_a_stream_shows_what_a_whole_answer_shows(spans: list[tuple[str, float]], mark: Any) -> None:
    gate = risk_gate(0.5, on_risk="mark", mark=mark)
    assert add(streamed(spans, gate)).text == gate.invoke(message_of(spans)).text


@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(SIGNS), max_size=9).map("".join), st.sampled_from([0.1, 0.9])), max_size=8
    )
)
def test_a_stream_of_signs_loses_no_text_and_shows_no_risky_word(spans: list[tuple[str, float]]) -> None:
    """A mark around a formula or a link may differ from that of the whole answer, which has its end."""
    text = "".join(part for part, _ in spans)
    marked = add(streamed(spans, risk_gate(0.5, on_risk="mark", mark="«{text}»"))).text
    assert marked.replace("«", "").replace("»", "") == text
    redacted = add(streamed(spans, risk_gate(0.5, on_risk="mark", mark=lambda part, _: REDACT * len(part)))).text
    assert len(redacted) == len(text)
    kept = {at for first, last in list_marks(text) for at in range(first, last)}
    risky = [risk > 0.5 for part, risk in spans for _ in part]
    for at, (shown, was) in enumerate(zip(redacted, text, strict=True)):
        assert shown in (was, REDACT)
        assert shown == REDACT or not (risky[at] and was.isalnum()) or at in kept


@pytest.mark.parametrize(
    "text",
    [
        *("It costs $5 for each", "The cost is $", "See [the docs", "If a <b", "Run `make", "The sum \\[x"),
        *("[1] The tower", "{see} the", "-1 is less", "A [link](x"),
    ],
)
def test_a_stream_waits_for_the_end_of_few_characters(text: str) -> None:
    arrived, shown = "", ""

    def chunks() -> Iterator[AIMessageChunk]:
        nonlocal arrived
        for one in message_spans([(text, 0.1), *((f" word{number}", 0.9) for number in range(60))]):
            arrived += one["text"]
            yield AIMessageChunk(one["text"], additional_kwargs={"cocoa_spans": [one]})
            assert len(arrived) - len(shown.replace("[[", "").replace("]]", "")) < 130

    stream = risk_gate(0.5, on_risk="mark").transform(chunks())
    for _ in range(60):
        shown += next(stream).text


@pytest.mark.parametrize(
    ("spans", "shown"),
    [
        ([("Run", 0.1), (":\n```sh\nexport KEY=", 0.1), ("sk-", 0.9), ("1&2!", 0.9), ("3\n", 0.9), ("```", 0.1)],
         "Run:\n```sh\nexport KEY=█\n```"),
        ([("Run `set ", 0.1), ("p@$$w0rd!", 0.9), ("` now", 0.1)], "Run `set █` now"),
        ([("<a href='x'", 0.1), (" title=Lind", 0.9), ("qvist>Yes</a>", 0.1)], "<a href='x' █>Yes</a>"),
        ([("See [it](https://", 0.1), ("secret.org", 0.9), (") now", 0.1)], "See [it](█) now"),
        ([('{"key": "', 0.1), ("secret", 0.9), ('"}', 0.1)], '{"key": "█"}'),
        ([("1. Red", 0.9), ("\n# Big", 0.9)], "1. █\n# █"),
        ([("Use", 0.1), (" `", 0.9), ("cocoa", 0.9), (" ask", 0.9), ("`", 0.9), (" now", 0.1)], "Use █ █ now"),
        ([("| A |", 0.1), (" ✅", 0.9), (" |\nIt →", 0.9), (" is", 0.1), (".", 0.9)], "| A | █ |\n█ █ is."),
        ([("```json", 0.9), ("\n[1", 0.9), (", 2]\n```", 0.1)], "```█\n█, 2]\n```"),
    ],
)  # fmt: skip
def test_redaction(spans: list[tuple[str, float]], shown: str) -> None:
    redact = risk_gate(0.5, on_risk="mark", mark=lambda part, _: REDACT)
    assert redact.invoke(message_of(spans)).text == add(streamed(spans, redact)).text == shown


@pytest.mark.parametrize(
    ("spans", "shown"),
    [
        ([("Use an RSA key", 0.1), (".", 0.9)], "Use an RSA key."),
        ([("Use an", 0.1), (" RSA", 0.9), (" key", 0.8), (".", 0.1)], "Use an [[RSA]] [[key]]."),
        ([("Marta", 0.1), (" Lind", 0.9), ("qvist", 0.9), (" did", 0.1)], "Marta [[Lindqvist]] did"),
        ([("Pi is 3", 0.1), (".", 0.9), ("14", 0.1), (".", 0.9)], "Pi is [[3.14]]."),
        ([("It costs ", 0.1), ("$", 0.9), ("5", 0.1)], "It costs [[$5]]"),
        ([("Red", 0.1), (" \n\n", 0.9), ("...", 0.9), (" —", 0.9)], "Red \n\n... —"),
        ([("Red", 0.9), (" tower\nOld", 0.9), (" one", 0.1)], "[[Red]] [[tower]]\n[[Old]] one"),
        ([("Run", 0.1), (":\n```sh\nmake now", 0.9), ("\n```", 0.9)], "Run:\n```sh\nmake now\n```"),
        ([("1.", 0.9), (" Red\n", 0.1), ("2.", 0.9), (" Old", 0.9)], "1. Red\n2. [[Old]]"),
        (
            [("See [the", 0.9), (" tower](https://", 0.1), ("x.org", 0.9), (").", 0.9)],
            "[[See]] [[[the]] tower](https://x.org).",
        ),
        ([("The sum $x", 0.9), (" + ", 0.1), ("1$", 0.9), (" is", 0.9)], "[[The sum]] $x + 1$ [[is]]"),
        ([("| Red | old |", 0.9), ("\n|---|---|", 0.9)], "| [[Red]] | [[old]] |\n|---|---|"),
        # one clause
        ([("Use", 0.1), (" an RSA key.", 0.9)], "Use [[an RSA key]]."),
        ([("The tower is red. It", 0.9), (" is old", 0.1)], "[[The tower is red]]. [[It]] is old"),
        ([("Ask Dr. Berg; he", 0.9), (" left.", 0.9)], "[[Ask Dr. Berg]]; [[he]] [[left]]."),
        ([("in the U.S.", 0.9), (" Army", 0.1)], "[[in the U.S.]] Army"),
        ([("红色。很高", 0.9), ("。", 0.9)], "[[红色]]。[[很高]]。"),
        (
            [("red that **", 0.9), ("is", 0.1), ("** (", 0.9), ("old", 0.1), (") — and", 0.9)],
            "[[red that]] **is** (old) — [[and]]",
        ),
        ([("It is `x`", 0.1), (", the red", 0.9), (" one", 0.1)], "It is `x`, [[the red]] one"),
        # formulas and footnotes
        ([("It is:\n\\[\nx", 0.9), (" = 3\n", 0.9), ("\\]\nwith x", 0.9)], "[[It is]]:\n\\[\nx = 3\n\\]\n[[with x]]"),
        ([("So $$\nx", 0.9), ("\n\nRed", 0.9)], "[[So]] $$\nx\n\n[[Red]]"),
        (
            [("\\begin{align*}\nx &= 3 \\\\\n", 0.9), ("y", 0.9), ("\n\\end{align*} so", 0.9)],
            "\\begin{align*}\nx &= 3 \\\\\ny\n\\end{align*} [[so]]",
        ),
        ([("Red \\[ x", 0.9), (" + 1 \\] old", 0.9)], "[[Red]] \\[ x + 1 \\] [[old]]"),
        ([("Red[^", 0.9), ("1", 0.9), ("] old", 0.9)], "[[Red]][^1] [[old]]"),
        (
            [("It costs $5 for", 0.9), (" one and $6", 0.9), (" for two", 0.9)],
            "[[It costs $5 for]] [[one and $6]] [[for two]]",
        ),
        ([("A [b](https://x.org/y_(z", 0.9), (")) d", 0.9)], "[[A]] [[[b]]](https://x.org/y_(z)) [[d]]"),
        # code and tags
        ([("Run `make", 0.9), (" now", 0.9), (" all` it", 0.9)], "[[Run]] `make now all` [[it]]"),
        ([("A", 0.1), (" `b", 0.9), (" c", 0.1), ("\nd", 0.9)], "A [[`b]] c\n[[d]]"),
        ([("<b class", 0.9), ("='x'>", 0.1), ("Red", 0.9), ("</b>", 0.9)], "<b class='x'>[[Red]]</b>"),
        (
            [("~~~\nx", 0.9), (" =", 0.1), (" 1", 0.9), ("\ny", 0.9), ("\n~~~\n", 0.9), ("z", 0.9)],
            "~~~\nx = 1\ny\n~~~\n[[z]]",
        ),
        ([("塔", 0.1), ("红色", 0.9), ("。", 0.9)], "塔[[红色]]。"),
        ([("البرج", 0.1), (" أحمر", 0.9), (".", 0.9)], "البرج [[أحمر]]."),
    ],
)
def test_marks(spans: list[tuple[str, float]], shown: str) -> None:
    assert marked(spans) == shown
    passed = streamed(spans, risk_gate(0.5, on_risk="mark"))
    assert add(passed).text == shown
    assert len(passed) == len(spans) + 1


def test_marks_that_touch_have_the_highest_value() -> None:
    spans = [("Marta", 0.1), (" Lind", 0.6), ("qvist", 0.9), (" did", 0.7)]
    assert marked(spans, mark="<{text} {value:.1f}>") == "Marta <Lindqvist 0.9> <did 0.7>"
    seen: list[Any] = []
    assert marked(spans, mark=lambda text, span: seen.append(span) or f"<{text}>") == "Marta <Lindqvist> <did>"
    assert [(one.span, one.text, one.risk) for one in seen] == [(2, "Lindqvist", 0.9), (3, "did", 0.7)]


@pytest.mark.parametrize("text", ["41", '"The tower is \\" red"', "true", ' "x"\n', '[1.5, {"a": "b c"}]'])
def test_json_of_a_response_format_has_no_marks_in_a_stream(text: str) -> None:
    spans = [(part, 0.9) for part in re.findall(r"\s?\w+|\s|[^\w\s]", text)]
    assert add(streamed(spans, risk_gate(0.5, on_risk="mark"), fields={})).text == text


def test_a_gate_counts_punctuation_and_does_not_mark_it() -> None:
    message = message_of([("Use an RSA key", 0.1), (".", 0.9)])
    marked = risk_gate(0.5, on_risk="mark").invoke(message)
    assert (marked.text, marked.response_metadata["cocoa_risk"]["gate"]["value"]) == (message.text, 0.9)
    assert risk_gate(0.5, unit="claim", on_risk="mark").invoke(message) is message
    assert risk_gate(0.5, on_risk="abstain").invoke(message).text == "I don't know."
