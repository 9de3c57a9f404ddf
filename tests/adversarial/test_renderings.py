"""What a model wrote stays text in every rendering: no markup, no script, no terminal codes, no reversed text."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from cocoa_engine import Candidate, Generation
from cocoa_engine.cli.output import print_note
from cocoa_engine.rendering.terminal import report, show, table
from tests.helpers.alike import risk_report
from tests.helpers.drawn import Page, drawn
from tests.helpers.made_up_answers import ATTACK, figures, generation
from tests.helpers.mutations import CONTROLS, ESCAPES, fuzz

MARKUP = [
    *ATTACK,
    "</text></svg><svg onload=alert(1)>",
    "]]><!--",
    "<style>*{display:none}</style>",
    '"><a href="javascript:alert(1)">x</a>',
    "![x](https://example.org/x.png) [y](javascript:alert(1))",
    "| a | b |\n| --- | --- |",
    "[bold red]x[/bold red] [link=https://example.org]y[/link]",
    "$\\frac{1}{0}$ $\\input{/etc/passwd}$",
    "\x1b]8;;https://example.org\x07click\x1b]8;;\x07",
    "\x1b[2J\x1b[H\x9b31m\x90q\x9c",
    "\u202egnp.exe",
    "\u0378\U000e0001\ufdd0\uffff",  # unassigned, a tag, no characters
    "e\u0301\u0301\u0301" * 10 + "\u200d\u200b\ufeff",
]
NOT_SURROGATE = st.characters(exclude_categories=("Cs",))
TEXTS = st.one_of(
    st.sampled_from(MARKUP),
    st.text(NOT_SURROGATE, max_size=40),
    st.text(alphabet="<>&\"'`|[](){}*_#\\/=!$-;:\n\t " + ESCAPES, max_size=40),
)
ANSWERS = st.lists(st.tuples(TEXTS, st.sampled_from([0.1, 0.5, 0.9])), min_size=1, max_size=4)


def answered(parts: list[tuple[str, float]], rival: str = "") -> Generation:
    """An answer of these spans; the last one beat another candidate."""
    candidates = [
        Candidate(**figures(parts[-1][0], parts[-1][1]), is_greedy=True),
        Candidate(**figures(rival or "x", 0.5), is_greedy=False),
    ]
    return generation(*parts, candidates=candidates)


OURS = [
    answered([("plain", 0.1), (" text", 0.9)], "rival").to_html(title="title"),
    generation(("plain", 0.1), (" text", 0.9)).to_html(compared=[generation(("text", 0.9))]),
]
TAGS = {"strong"}.union(*({tag for tag, _ in Page(html).elements} for html in OURS))
assert not TAGS & {"script", "img", "svg", "iframe", "object", "embed", "form", "base", "link"}


@fuzz(40)
@given(ANSWERS, TEXTS, TEXTS)
@example([(MARKUP[0], 0.9)], MARKUP[1], MARKUP[0])
def test_html(parts: list[tuple[str, float]], rival: str, title: str) -> None:
    answer = answered(parts, rival)
    for html in (answer.to_html(title=title), answer._repr_html_(), answer.to_html(compared=[answer], title=title)):
        assert not CONTROLS.search(html)
        page = Page(html)
        assert {tag for tag, _ in page.elements} <= TAGS
        assert not page.comments
        for name, value in (pair for _, attributes in page.elements for pair in attributes.items()):
            assert not name.startswith("on")
            assert name not in ("href", "src", "action", "srcdoc")
            assert "javascript:" not in value or name in ("title", "aria-label")


def test_a_title_with_a_lone_surrogate_can_be_written() -> None:
    for format in ("html", "markdown", "svg"):
        assert b"U+D800" in answered([("text", 0.9)]).render(format, title="\ud800").encode()


PARSER = MarkdownIt("gfm-like", {"linkify": False, "html": True})


@fuzz(40)
@given(ANSWERS, TEXTS, TEXTS)
@example([("<script>alert(1)</script>\n\n<div>", 0.9)], "<!--", "<b>")
def test_markdown(parts: list[tuple[str, float]], rival: str, title: str) -> None:
    answer = answered(parts, rival)
    for text in (answer.to_markdown(), answer.render("markdown", title=title)):
        assert not CONTROLS.search(text)
        for block in PARSER.parse(text):
            if block.type == "html_block":  # those of the rendering itself
                assert re.fullmatch(r"(<details><summary>Details</summary>|</details>)\s*", block.content)
            assert block.type not in ("fence", "code_block", "blockquote_open", "hr")
            for child in block.children or ():
                assert child.type not in ("html_inline", "image", "link_open", "code_inline")


SGR = re.compile(r"\x1b\[[0-9;]*m")
"""What rich writes for colours: nothing else of a terminal's language may be there."""


@pytest.mark.slow
@fuzz(40)
@given(ANSWERS, TEXTS, st.booleans())
@example([(MARKUP[8], 0.9)], MARKUP[9], True)
def test_terminals(parts: list[tuple[str, float]], rival: str, table: bool) -> None:
    answer = answered(parts, rival)
    compared = report([answer, answered([("other", 0.2)])], table=table)
    for shown in (report([answer], table=table), compared, answer.to_rich()):
        text = SGR.sub("", drawn(shown, 100, color=True))
        assert not CONTROLS.search(text)
        assert "\x1b]8" not in text


def tags_of(picture: str) -> set[str]:
    assert not CONTROLS.search(picture)
    return {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(picture).iter()}


@fuzz(30)
@given(ANSWERS, TEXTS)
@example([("</text></svg><script>", 0.9)], "\x1b[2J\x00")
def test_pictures(parts: list[tuple[str, float]], title: str) -> None:
    allowed = {"svg", "style", "defs", "clipPath", "rect", "text", "g", "circle", "path"}
    assert tags_of(answered(parts).render("svg", title=title)) <= allowed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph")  # missing from the font
@fuzz(5)
@given(ANSWERS)
@example([("$\\frac{1}{0}$ </text><script>\x00", 0.9)])
def test_plots(parts: list[tuple[str, float]]) -> None:
    pytest.importorskip("matplotlib")
    buffer = io.StringIO()
    answered(parts).plot().savefig(buffer, format="svg", metadata={"Date": None})
    assert not tags_of(buffer.getvalue()) & {"script", "image", "a", "foreignObject"}


@fuzz(40)
@given(ANSWERS, TEXTS)
def test_json(parts: list[tuple[str, float]], rival: str) -> None:
    answer = answered(parts, rival)
    assert Generation.model_validate_json(answer.model_dump_json()) == answer
    text = json.dumps(risk_report(answer), allow_nan=False)
    assert "".join(span["text"] for span in json.loads(text)["spans"]) == answer.text


@fuzz(30)
@given(TEXTS, TEXTS, TEXTS)
@example("a | b\n| c |", "\x1b[2J", "\u202e")
@example("model", "1", "![x](https://example.org/x.png) [y](https://example.org)")
def test_tables_of_evaluations(name: str, cell: str, heading: str) -> None:
    lines = table([name, heading], [[name, f"**{cell}**"]], left=1)
    assert len(lines) == 3
    (start,) = [block for block in PARSER.parse("\n".join(lines)) if block.type == "table_open"]
    assert start
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system="truecolor")
    for as_markdown in (True, False):
        show("\n".join([*lines, ""]), console, as_markdown=as_markdown)
    assert not CONTROLS.search(SGR.sub("", console.file.getvalue()))  # type: ignore[attr-defined]


@fuzz(30)
@given(TEXTS)
def test_notes_of_commands(capsys: pytest.CaptureFixture[str], text: str) -> None:
    print_note(text)
    assert not CONTROLS.search(capsys.readouterr().err)
