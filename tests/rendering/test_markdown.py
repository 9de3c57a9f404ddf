"""Answers as Markdown, read back by a Markdown parser."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from cocoa_engine import Candidate
from tests.helpers.made_up_answers import figures, generation, stopped

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def shown(markdown: str) -> tuple[list[str], str]:
    """The kinds of blocks of the answer, and its text: what is between the verdict and the claims to check."""
    blocks = PARSER.parse(markdown)
    first = next(number for number, block in enumerate(blocks) if block.type == "paragraph_close") + 1
    after = ("Check these:", "No claim of this answer stands out.")
    last = next(number for number, block in enumerate(blocks) if block.type == "inline" and block.content in after) - 1
    kinds = [block.type for block in blocks[first:last] if block.nesting >= 0]
    text = []
    for block in blocks[first:last]:
        if block.type == "inline":
            assert block.children is not None
            assert {child.type for child in block.children} <= {"text", "text_special", "hardbreak", "softbreak"}
            text.append("".join("\n" if "break" in child.type else child.content for child in block.children))
    return kinds, "\n\n".join(text).replace("\N{NO-BREAK SPACE}", " ")


@given(st.text(alphabet="ab*_|#-+>1.`<&[]()~\\!\n ", max_size=30))
def test_no_text_becomes_anything_else(text: str) -> None:
    kinds, words = shown(generation((text, 0.1), (".", 0.8)).to_markdown())
    assert set(kinds) <= {"paragraph_open", "inline"}
    assert "".join(words.split()) == "".join(text.split()) + "."


def test_verdict_claims_and_details() -> None:
    candidates = [
        Candidate(**figures(" in | water\n", 0.9, -2.25, -7.5), is_greedy=False),
        Candidate(**figures(" in | wood", 0.8, -1.5, -8.25), is_greedy=True),
    ]
    answer = generation(("Sound travels", 0.1), (" in | water\n", 0.9), candidates=candidates)
    text = answer.to_markdown()
    assert text.startswith('**The model was unsure about "water". Not calibrated')
    _, words = shown(text)
    assert words == "Sound travels in | [water|3]"
    assert "1. water (0.90): the model was unsure; competing: wood…" in text
    before, details = text.split("<details><summary>Details</summary>")
    assert "fMLDS" not in before
    assert details.endswith("</details>\n")
    rows = [block.content for block in PARSER.parse(details) if block.type == "inline"]
    at = rows.index("Sound travels")
    assert rows[at + 2 : at + 7] == ["-2.25", "0.020", "0.900", "-7.50", "kept"]
    assert "3: 0.75–1.00" in details
    assert "| Sound travels in \\| water | 0.37 |" in details


def test_the_span_that_reached_max_risk_is_marked_whatever_its_level() -> None:
    text = stopped(("Dune", 0.9), (" is", 0.8)).to_markdown().replace("\\", "")
    assert "[Dune|3] [is|0!]" in text
    assert "!: reached max_risk" in text
    assert stopped(("Dune", 0.9), ("\n", 0.8)).to_markdown().replace("\\", "").count("|0!]") == 1
    assert "max_risk" not in generation(("Dune", 0.9), (" is", 0.8)).to_markdown().replace("\\", "")
