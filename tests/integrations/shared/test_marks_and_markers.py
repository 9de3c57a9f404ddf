"""Where marks of risk and markers of sources stand: around or behind words, never inside of what is one piece."""

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

from cocoa_engine.report import RiskReport, SpanReport
from cocoa_engine.risk.claims import content_words
from cocoa_engine.risk.clauses import clauses, marked_stretches
from cocoa_engine.risk.sentences import list_marks
from cocoa_engine.risk.words import Range, word_ranges
from cocoa_integrations._shared.citations import Citation, citations_of, marker_edits, with_markers
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations.langchain import risk_gate
from tests.helpers.alike import all_spans, near, risk_report, stand_in, to_dicts
from tests.helpers.made_up_answers import generation

BREAKS = ("\n", "\n\n", "\n- ", "\n1. ", "\n# ", "\n```python\nx = 1\n```\n", "\n| a. b | c |\n|---|---|\n", "> ")
ANY = st.lists(
    st.one_of(
        st.sampled_from((" tower", " Lindqvist", "3.14", " --mail-option", "塔は", " برج", " don't", " C++", "`a b`")),
        st.sampled_from(
            (" $a. b$", "\\(x", "\\)", " [a b](https://x.org/c)", " <b class=x>", "`", "$", "](", "[", "x | y", "~~~")
        ),
        st.sampled_from((".", ", ", "...", "!", " — ", " (", ")", "。", ": ", " ", "*", " 😀", "_")),
        st.sampled_from(BREAKS),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)


def message_of(spans: list[tuple[str, float]]) -> AIMessage:
    whole = generation(*spans)
    return AIMessage(whole.text, response_metadata={"cocoa_risk": risk_report(whole)})


def message_spans(spans: list[tuple[str, float]]) -> list[dict[str, Any]]:
    return all_spans(generation(*spans))


def with_marks(spans: list[tuple[str, float]], threshold: float = 0.5, mark: Any = "[[{text}]]") -> str:
    return risk_gate(threshold, on_risk="mark", mark=mark).invoke(message_of(spans)).text


@settings(max_examples=150)
@given(ANY, st.data())
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


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(st.tuples(ANY, st.sampled_from([0.1, 0.9])), max_size=6))
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
    assert kept.text == with_marks(spans)


def streamed(spans: list[tuple[str, float]], gate: Any, **report: Any) -> list[AIMessageChunk]:
    chunks = [AIMessageChunk(one["text"], additional_kwargs={"cocoa_spans": [one]}) for one in message_spans(spans)]
    last = {"cocoa_risk": {**message_of(spans).response_metadata["cocoa_risk"], **report}}
    return list(gate.transform(iter([*chunks, AIMessageChunk("", response_metadata=last, chunk_position="last")])))


SIGNS = (
    *("$", "$5", " for", "\\[", "\\]", "\\(", "\n$$\n", "$$", "\\begin{a}", "\\end{a}", "\n", "\n\n", "`", "[", "]"),
    *("(", "](x)", "[^1]", "<a b", ">", " red", "old ", " *", "**", "1", "-", '"', "{", "}", ",", "true", ".", ":"),
)
REDACT = "█"


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.lists(st.tuples(ANY, st.sampled_from([0.1, 0.9])), max_size=8),
    st.sampled_from(["[[{text}]]", lambda part, _: REDACT * len(part)]),
)
def test_a_stream_shows_what_a_whole_answer_shows(spans: list[tuple[str, float]], mark: Any) -> None:
    gate = risk_gate(0.5, on_risk="mark", mark=mark)
    assert add(streamed(spans, gate)).text == gate.invoke(message_of(spans)).text


@pytest.mark.slow
@settings(max_examples=250)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(SIGNS), max_size=9).map("".join), st.sampled_from([0.1, 0.9])), max_size=8
    )
)
def test_a_stream_of_signs_loses_no_text_and_shows_no_risky_word(spans: list[tuple[str, float]]) -> None:
    """A mark around a formula or a link may differ from that of the whole answer, which has its end."""
    text = "".join(part for part, _ in spans)
    with_marks = add(streamed(spans, risk_gate(0.5, on_risk="mark", mark="«{text}»"))).text
    assert with_marks.replace("«", "").replace("»", "") == text
    redacted = add(streamed(spans, risk_gate(0.5, on_risk="mark", mark=lambda part, _: REDACT * len(part)))).text
    assert len(redacted) == len(text)
    kept = {at for first, last in list_marks(text) for at in range(first, last)}
    risky = [risk > 0.5 for part, risk in spans for _ in part]
    for at, (shown, was) in enumerate(zip(redacted, text, strict=True)):
        assert shown in (was, REDACT)
        assert shown == REDACT or not (risky[at] and was.isalnum()) or at in kept


@pytest.mark.slow
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


def parts_of(text: str) -> list[tuple[str, float]]:
    """The spans of an answer: the risky ones stand in «», and ‖ stands between two others."""
    return [(part.strip("«»"), 0.9 if part[0] == "«" else 0.1) for part in re.findall("«[^»]*»|[^«»‖]+", text)]


@pytest.mark.parametrize(
    ("risky", "shown"),
    [
        ("Run‖:\n```sh\nexport KEY=«sk-»«1&2!»«3\n»```", "Run:\n```sh\nexport KEY=█\n```"),
        ("Run `set «p@$$w0rd!»` now", "Run `set █` now"),
        ("<a href='x'« title=Lind»qvist>Yes</a>", "<a href='x' █>Yes</a>"),
        ("See [it](https://«secret.org») now", "See [it](█) now"),
        ('{"key": "«secret»"}', '{"key": "█"}'),
        ("«1. Red»«\n# Big»", "1. █\n# █"),
        ("Use« `»«cocoa»« ask»«`» now", "Use █ █ now"),
        ("| A |« ✅»« |\nIt →» is«.»", "| A | █ |\n█ █ is."),
        ("«```json»«\n[1», 2]\n```", "```█\n█, 2]\n```"),
    ],
)
def test_redaction(risky: str, shown: str) -> None:
    spans = parts_of(risky)
    redact = risk_gate(0.5, on_risk="mark", mark=lambda part, _: REDACT)
    assert redact.invoke(message_of(spans)).text == add(streamed(spans, redact)).text == shown


@pytest.mark.parametrize(
    ("risky", "shown"),
    [
        ("Use an RSA key«.»", "Use an RSA key."),
        ("Use an« RSA»« key».", "Use an [[RSA]] [[key]]."),
        ("Marta« Lind»«qvist» did", "Marta [[Lindqvist]] did"),
        ("Pi is 3«.»14«.»", "Pi is [[3.14]]."),
        ("It costs «$»5", "It costs [[$5]]"),
        ("Red« \n\n»«...»« —»", "Red \n\n... —"),
        ("«Red»« tower\nOld» one", "[[Red]] [[tower]]\n[[Old]] one"),
        ("Run«:\n```sh\nmake now»«\n```»", "Run:\n```sh\nmake now\n```"),
        ("«1.» Red\n«2.»« Old»", "1. Red\n2. [[Old]]"),
        ("«See [the» tower](https://«x.org»«).»", "[[See]] [[[the]] tower](https://x.org)."),
        ("«The sum $x» + «1$»« is»", "[[The sum]] $x + 1$ [[is]]"),
        ("«| Red | old |»«\n|---|---|»", "| [[Red]] | [[old]] |\n|---|---|"),
        # one clause
        ("Use« an RSA key.»", "Use [[an RSA key]]."),
        ("«The tower is red. It» is old", "[[The tower is red]]. [[It]] is old"),
        ("«Ask Dr. Berg; he»« left.»", "[[Ask Dr. Berg]]; [[he]] [[left]]."),
        ("«in the U.S.» Army", "[[in the U.S.]] Army"),
        ("«红色。很高»«。»", "[[红色]]。[[很高]]。"),
        ("«red that **»is«** (»old«) — and»", "[[red that]] **is** (old) — [[and]]"),
        ("It is `x`«, the red» one", "It is `x`, [[the red]] one"),
        # formulas and footnotes
        ("«It is:\n\\[\nx»« = 3\n»«\\]\nwith x»", "[[It is]]:\n\\[\nx = 3\n\\]\n[[with x]]"),
        ("«So $$\nx»«\n\nRed»", "[[So]] $$\nx\n\n[[Red]]"),
        (
            "«\\begin{align*}\nx &= 3 \\\\\n»«y»«\n\\end{align*} so»",
            "\\begin{align*}\nx &= 3 \\\\\ny\n\\end{align*} [[so]]",
        ),
        ("«Red \\[ x»« + 1 \\] old»", "[[Red]] \\[ x + 1 \\] [[old]]"),
        ("«Red[^»«1»«] old»", "[[Red]][^1] [[old]]"),
        ("«It costs $5 for»« one and $6»« for two»", "[[It costs $5 for]] [[one and $6]] [[for two]]"),
        ("«A [b](https://x.org/y_(z»«)) d»", "[[A]] [[[b]]](https://x.org/y_(z)) [[d]]"),
        # code and tags
        ("«Run `make»« now»« all` it»", "[[Run]] `make now all` [[it]]"),
        ("A« `b» c«\nd»", "A [[`b]] c\n[[d]]"),
        ("«<b class»='x'>«Red»«</b>»", "<b class='x'>[[Red]]</b>"),
        ("«~~~\nx» =« 1»«\ny»«\n~~~\n»«z»", "~~~\nx = 1\ny\n~~~\n[[z]]"),
        ("塔«红色»«。»", "塔[[红色]]。"),
        ("البرج« أحمر»«.»", "البرج [[أحمر]]."),
    ],
)
def test_marks(risky: str, shown: str) -> None:
    spans = parts_of(risky)
    assert with_marks(spans) == shown
    passed = streamed(spans, risk_gate(0.5, on_risk="mark"))
    assert add(passed).text == shown
    assert len(passed) == len(spans) + 1


def test_marks_that_touch_have_the_highest_value() -> None:
    spans = [("Marta", 0.1), (" Lind", 0.6), ("qvist", 0.9), (" did", 0.7)]
    assert with_marks(spans, mark="<{text} {value:.1f}>") == "Marta <Lindqvist 0.9> <did 0.7>"
    seen: list[Any] = []
    assert with_marks(spans, mark=lambda text, span: seen.append(span) or f"<{text}>") == "Marta <Lindqvist> <did>"
    assert [(one.span, one.text, one.risk) for one in seen] == [(2, "Lindqvist", 0.9), (3, "did", 0.7)]


@pytest.mark.parametrize("text", ["41", '"The tower is \\" red"', "true", ' "x"\n', '[1.5, {"a": "b c"}]'])
def test_json_of_a_response_format_has_no_marks_in_a_stream(text: str) -> None:
    spans = [(part, 0.9) for part in re.findall(r"\s?\w+|\s|[^\w\s]", text)]
    assert add(streamed(spans, risk_gate(0.5, on_risk="mark"), fields={})).text == text


def test_a_gate_counts_punctuation_and_does_not_mark_it() -> None:
    message = message_of([("Use an RSA key", 0.1), (".", 0.9)])
    with_marks = risk_gate(0.5, on_risk="mark").invoke(message)
    assert (with_marks.text, with_marks.response_metadata["cocoa_risk"]["gate"]["value"]) == (message.text, 0.9)
    assert risk_gate(0.5, unit="claim", on_risk="mark").invoke(message) is message
    assert risk_gate(0.5, on_risk="abstain").invoke(message).text == "I don't know."


WORDS = ("tower", "was built", "Marta Lindqvist", "well-known", "don't", "塔は赤い", "torre", "برج", "Häuser", "हिन्दी")
PIECES = (
    *("3.14", "1,000", "10:30", "-5.5", "v1.2.3", "--mail-option", "-v", "file.py", "/etc/passwd", "C++"),
    *("https://x.org/a.b?c=d#e", "www.a.example", "a.b@c.example", "[text. More](https://x.y/z)", "&amp; then"),
    *("`a. B c`", "``x `y. Z` ``", "$$a. B$$", "(see p. 4. It)", "<b class='x. Y'>"),
    *('"It is red. It is old."', "“Yes. No.”", "„Es ist rot. Ja.“", "«Es rojo. Sí.»", "「是的。不。」", "'So. Yes.'"),
    *("Dr. Smith", "e.g. this", "U.S. Army", "J. K. Rowling", "z. B. Holz", "p. ej. uno", "am 3. Mai", "Sr. García"),
    *("No. 10", "vgl. Abb. 3", "at 10 a.m. Monday", "Ph.D. students"),
)
BLOCKS = ("\n```python\nx = 1. Y\n\ny; Z\n```\n", "\n~~~\nmake. It\n~~~\n")
LINES = ("\n", "\n\n", "\n- ", "\n1. ", "\n2. ", "\n# ", "\n> ")
ENDS = (". ", "! ", "? ", "; ", ", ", ": ", "。", "？", "؟ ", "؛ ", "… ", " — ", ".** ", '." ')
ROW = "\n| Old. Red | `a | b` 41 m. |\n|---|---|\n"


@st.composite
def cited_texts(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]], list[Citation]]:
    """A text, the ranges of its pieces, and citations of any parts of it."""
    kinds = st.one_of(*map(st.sampled_from, (WORDS, WORDS, PIECES, ENDS, LINES, (*BLOCKS, ROW))))
    text, pieces = "", list[tuple[int, int]]()
    for fragment in draw(st.lists(kinds, max_size=14)):
        if fragment in PIECES and text and not text[-1].isspace():
            text += " "
        start = len(text)
        text += fragment if fragment in (*ENDS, *LINES) else f"{fragment} "
        if fragment in (*PIECES, *BLOCKS):
            pieces.append((text.index(fragment.strip(), start), start + len(fragment.rstrip())))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    citations = [
        Citation(
            source=draw(st.integers(1, 3)), id=None, attention=0.5, start=start, end=end, text=text[start:end], spans=[]
        )
        for start, end in itertools.pairwise(cuts)
        if draw(st.booleans())
    ]
    return text, pieces, citations


def marked(text: str, citations: list[Citation]) -> str:
    for edit in reversed(marker_edits(text, citations)):
        text = text[: edit.start] + edit.after + text[edit.start :]
    return text


def cited_words(text: str, citation: Citation, words: list[Range]) -> list[str]:
    shared = (text[max(word.start, citation.start) : min(word.end, citation.end)] for word in words)
    return [part for part in shared if any(map(str.isalnum, part))]


@given(cited_texts())
@settings(max_examples=150)
def test_markers_of_any_text(cited: tuple[str, list[tuple[int, int]], list[Citation]]) -> None:
    text, pieces, citations = cited
    edits = marker_edits(text, citations)
    places = [edit.start for edit in edits]
    assert places == sorted(set(places))  # at most one group at a place, in order
    for edit in edits:
        place = edit.start
        assert (edit.end, edit.text, edit.before) == (place, None, None)
        is_line = edit.after.endswith("\n")  # before a block of code at the beginning
        assert re.fullmatch(r"(\[\d\])+\n" if is_line else r" (\[\d\])+", edit.after)
        assert not is_line or text[place:].startswith(("```", "~~~"))
        numbers = [int(number) for number in re.findall(r"\d", edit.after)]
        assert numbers == sorted(set(numbers))
        assert not any(start < place < end for start, end in pieces)
        assert not any(start < place <= end for start, end in pieces if text[start:end][:3] in ("```", "~~~")), (
            "a fence that is followed by a marker is not closed"
        )
        if not is_line:
            assert not text[:place][-1:].isspace()
            assert not (text[:place][-1:].isalnum() and text[place : place + 1].isalnum())
            line = text[text.rfind("\n", 0, place) + 1 :].partition("\n")[0]
            if line.startswith("|"):
                assert re.match(r"[.\s]*(\||$)", text[place:])
    for part in clauses(text):
        assert sum(part.start < place <= part.end for place in places) <= 1
    sources = {int(number) for edit in edits for number in re.findall(r"\d", edit.after)}
    assert sources >= {one.source for one in citations if cited_words(text, one, content_words(text))}
    assert sources <= {one.source for one in citations if cited_words(text, one, word_ranges(text))}
    # every clause of a text that is cited as a whole has a marker
    places = [edit.start for edit in marker_edits(text, [citation(text, text, 1)])]
    marks = list_marks(text)
    for part in clauses(text):
        words = [word for word in word_ranges(text) if part.start <= word.start < part.end]
        words = [word for word in words if not any(mark.start <= word.start < mark.end for mark in marks)]
        has_words = any(any(map(str.isalnum, text[word.start : word.end])) for word in words)
        assert part.is_code or not has_words or any(part.start < place <= part.end for place in places)


@given(st.text(st.one_of(st.characters(), st.sampled_from("aB1.;:!。\"'“”`|\n -*#()[]$<&~\\")), max_size=60), st.data())
@settings(max_examples=150)
def test_markers_of_any_characters(text: str, data: st.DataObject) -> None:
    offsets = st.integers(0, len(text))
    start, end = sorted(data.draw(st.tuples(offsets, offsets)))
    cited = Citation(source=1, id=None, attention=0.5, start=start, end=end, text=text[start:end], spans=[])
    places = [edit.start for edit in marker_edits(text, [cited])]
    assert places == sorted(set(places))
    assert all(0 <= place <= len(text) for place in places)
    assert not any(text[:place][-1:].isalnum() and text[place : place + 1].isalnum() for place in places)
    assert bool(places) >= bool(cited_words(text, cited, content_words(text)))
    assert bool(places) <= bool(cited_words(text, cited, word_ranges(text)))


def citation(text: str, part: str, source: int) -> Citation:
    start = text.index(part)
    return Citation(source=source, id=None, attention=0.5, start=start, end=start + len(part), text=part, spans=[])


@pytest.mark.parametrize(
    ("shown", "cited"),
    [
        # a part in the middle, and one that begins or ends inside of a clause
        ("The --mail option sends a report [1].", {"The --mail": 1}),
        ("The tower is old [1]. It is red.", {" is old. It": 1}),
        # several sources
        ("The tower is old and red [1][2].", {"old": 2, "red": 1}),
        ("The tower is old [1]. It is red [1].", {"old": 1, "red": 1}),
        ("The tower is old [1]; it is red [2].", {"old": 1, "red": 2}),
        ("The tower is old [3]. It is red [3].", {"is old. It is red": 3}),
        # no content
        ("The tower is old.", {".": 1}),
        ("The tower is old.", {" is": 1}),
        ("The tower is old [1].  \n", {"old.  \n": 1}),
        # what a full stop does not end
        ("Pi is 3.14 [1]. So what?", {"3": 1}),
        ("Dr. Smith left at 10 a.m. on Monday [1].", {"Dr": 1}),
        ("Trees, e.g. Oaks, grow [1]. So.", {"Trees": 1}),
        ("He went to the U.S. [1] Then he left.", {"went": 1}),
        ("Dr. Who left at 5 p.m. [1] It is old.", {"left": 1}),
        ("Tall trees, e.g. [1]\nOld houses, i.e. [2]", {"trees": 1, "Old": 2}),
        ("It orbits the Sun [1]. He sat [2].", {"Sun": 1, "sat": 2}),
        ("No [1]. It is red [2].", {"No": 1, "red": 2}),
        ("See https://x.org/a.b?c=d [1]. Then go.", {"x.org": 1}),
        ("Run `make. Then` now [1]! Go.", {"make": 1}),
        ('He said "It is red. It is old." [1] Then he left.', {"red": 1}),
        ("A tower (see p. 4. It) is red [1].", {"tower": 1}),
        # Markdown
        ("Run this [1]:\n```\nmake. Now\n```\nDone.", {"make": 1}),
        ("Run this [1]:\n```\nmake install", {"install": 1}),
        ("[1]\n```\nmake\n```\nDone.", {"make": 1}),
        ("1. Red [1]\n2. Old [1].\n3.", {"Red": 1, "Old": 1, "3": 2}),
        ("- **Red**: a colour [1]\n- Old", {"Red": 1}),
        ("# Towers [1]\nOld. **Red.** [2] Tall", {"Towers": 1, "Red": 2}),
        ("| Red. Old [1] | 41 m [2] |\n|---|---|", {"Red": 1, "41": 2}),
        ("red [1] | old [2]\n--- | :-:", {"red": 1, "old": 2}),
        (
            "Both:\n\nred. Big [1] | old [2]\n---|---\na tower [1] | a wall [1]\n1 [2] | 2 [1] |\n\nred | old [3]",
            {"Big": 1, "old": 2, "tower | a wall": 1, "1": 2, "2 |": 1, "\n\nred | old": 3},
        ),
        ("A tower that was built of very old and very red bricks by\nMarta [1].", {"tower": 1}),
        # other languages
        ("塔是红色的 [1]。它很高 [2]！", {"红色": 1, "很高": 2}),
        ("Él dijo: «Es rojo. Sí.» [1] ¿Es alto [2]? Sí.", {"rojo": 1, "alto": 2}),
        ("هل البرج قديم [1]؟ البرج أحمر [2].", {"قديم": 1, "أحمر": 2}),
        ("Am 3. Mai kam z. B. Dr. Berg, vgl. Abb. 3 [1]. Ende [2].", {"Berg": 1, "Ende": 2}),
        ("Er sagte: „Der Turm ist rot.“ [1] Dann ging er.", {"Turm": 1}),
        # an answer that was cut off
        ("The keeper was Jonas Ber [1]", {"Ber": 1}),
    ],
)
def test_places(shown: str, cited: dict[str, int]) -> None:
    text = re.sub(r" (\[\d\])+|(?m:^\[\d\]\n)", "", shown)
    assert marked(text, [citation(text, part, source) for part, source in cited.items()]) == shown


def entries(*texts: str) -> list[SpanReport]:
    starts = [sum(map(len, texts[:number])) for number in range(len(texts))]
    return [
        SpanReport(start=start, end=start + len(text), text=text, kind="greedy", risk=0.1, log_prob=-1.0)
        for start, text in zip(starts, texts, strict=True)
    ]


def test_the_source_that_a_part_attended_to_most() -> None:
    spans = entries("The tower", " of Hald", "en", " is", " old.", "")
    attentions = [[0.1, 0.2], [0.6, 0.2], [0.1, None], [0.0, 0.0], [0.1, 0.4], [0.9, 0.9]]
    citations, spans = citations_of(spans, attentions, 0.3)
    assert [(one.source, one.text, one.attention, one.spans) for one in citations] == [
        (1, " of Halden", near(0.5), [1, 2]),  # the mean over its characters
        (2, " old.", near(0.4), [4]),
    ]
    assert [span.source for span in spans] == [None, 1, 1, None, 2, None]
    assert spans[2].source_attentions == [0.1, None]


def test_neighbours_with_one_source_are_one_citation() -> None:
    spans = entries("The tower", " is old", " and red", ".")
    citations, _ = citations_of(spans, [[0.2], [0.3], [0.0], [0.4]], 0.1)
    assert [(one.start, one.end, one.attention) for one in citations] == [(0, 16, near(0.24375)), (24, 25, near(0.4))]


@pytest.mark.parametrize("attentions", [[[], []], [[None], [None]], [[0.05], [0.09]]])
def test_no_source(attentions: list[list[float | None]]) -> None:
    assert citations_of(entries("The", " tower"), attentions, 0.1)[0] == []


def test_markers_move_the_offsets() -> None:
    spans = entries("The tower ", "is old.", " Yes", "")
    citations, spans = citations_of(spans, [[0.2, 0.0], [0.0, 0.2], [0.0, 0.0], [0.0, 0.0]], 0.1)
    change = with_markers(EditedText("The tower is old. Yes"), citations, RiskReport.of_spans(spans))
    text, spans, citations = change.text, change.moved(spans), change.moved(citations)
    assert text == "The tower is old [1][2]. Yes"
    assert stand_in(text, to_dicts(spans))
    assert stand_in(text, to_dicts(citations))
    assert spans[-1].start == len(text)
