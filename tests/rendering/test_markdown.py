"""Answers as Markdown, read back by a Markdown parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from cocoa_engine import Candidate, CocoaEngine
from cocoa_engine.safe_text import safe
from tests.helpers.made_up_answers import figures, generation, stopped

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
HOSTILE = [
    "# no heading",
    "- no list\n1. no list\n+ none\n* none",
    "a | b\n---|---\nc | d",
    "<script>alert(1)</script> &amp; <!-- x -->",
    "*not* **bold** _this_ ~~that~~ `code` $x$ ![i](u) [l](u)",
    "```\ncode\n```",
    "> quote\n===",
    "https://example.org <http://example.org> @name",
    "def f(x):\n\treturn [x]\n        indented",
    "שלום עולם",
    "\\* \\",
]


def shown(markdown: str) -> tuple[list[str], str]:
    """The kinds of blocks, and the text of the paragraphs before the legend."""
    blocks = PARSER.parse(markdown)
    kinds = [block.type for block in blocks if block.nesting >= 0]
    text = []
    for block in blocks:
        if block.type == "inline":
            if block.content.startswith("Risk"):
                break
            assert block.children is not None
            assert {child.type for child in block.children} <= {"text", "text_special", "hardbreak", "softbreak"}
            text.append("".join("\n" if "break" in child.type else child.content for child in block.children))
    return kinds, "\n\n".join(text).replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("text", HOSTILE)
def test_a_models_markdown_is_shown_as_it_was_written(text: str) -> None:
    answer = generation((text, 0.8), (" end", 0.9))
    kinds, words = shown(answer.to_markdown())
    assert set(kinds) <= {"paragraph_open", "inline"}
    assert words == safe(text).replace("\t", "    ") + " [end|3]"


@given(st.text(alphabet="ab*_|#-+>1.`<&[]()~\\!\n ", max_size=30))
def test_no_text_becomes_anything_else(text: str) -> None:
    kinds, words = shown(generation((text, 0.8), (".", 0.8)).to_markdown())
    assert set(kinds) <= {"paragraph_open", "inline"}
    assert "".join(words.split()) == "".join(text.split()) + "."


def test_legend_and_table() -> None:
    candidates = [
        Candidate(**figures(" in | water\n", 0.9, -2.25, -7.5), is_greedy=False),
        Candidate(**figures(" [red]", 0.8, -1.5, -8.25), is_greedy=True),
    ]
    answer = generation(("Sound travels", 0.8), (" in | water\n", 0.9), candidates=candidates)
    text = answer.to_markdown()
    kinds, words = shown(text)
    assert words == "Sound travels [in | water|3]"
    assert kinds.count("tr_open") == 3
    cells = [block.content for block in PARSER.parse(text) if block.type == "inline"][-15:-1]
    assert cells[0] == "Sound travels"
    assert cells[2:7] == ["-2.25", "0.020", "0.900", "-7.50", "kept"]
    assert "relative to this text's own range" in text.replace("\\", "")
    assert "3: 0.875–0.900" in text


def test_a_real_answer(engine: CocoaEngine) -> None:
    answer = engine.generate("The three primary colours are", max_new_tokens=12)
    rows = sum(len(span.candidates) for span in answer.spans)
    kinds, _ = shown(answer.to_markdown())
    assert rows
    assert kinds.count("tr_open") == rows + 1


def test_the_span_that_reached_max_risk_is_marked_whatever_its_level() -> None:
    text = stopped(("Dune", 0.9), (" is", 0.8)).to_markdown().replace("\\", "")
    assert text.startswith("[Dune|3] [is|0!]")
    assert "!: reached max_risk" in text
    assert stopped(("Dune", 0.9), ("\n", 0.8)).to_markdown().replace("\\", "").count("|0!]") == 1
    assert "max_risk" not in generation(("Dune", 0.9), (" is", 0.8)).to_markdown().replace("\\", "")
