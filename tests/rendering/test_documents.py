"""The document formats, HTML and Markdown read back by parsers, and the sentences about the risk in everyday words."""

from __future__ import annotations

import re
from html import unescape
from itertools import accumulate
from math import log
from typing import get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from cocoa_engine import Candidate, ConfigError, Generation, RiskSource, Span
from cocoa_engine.rendering import wording
from cocoa_engine.rendering.documents import DOCUMENTS
from cocoa_engine.rendering.highlights import Answer, RiskScale
from cocoa_engine.rendering.wording import NOT_CALIBRATED, SOURCES, statistics, verdict
from cocoa_engine.risk import LOWEST_SHADE
from cocoa_engine.safe_text import safe
from tests.helpers.drawn import Page
from tests.helpers.made_up_answers import figures, generation, stopped

FIRST = generation((" Paris", 0.9), (" is it.", 0.1), method="greedy")
OTHER = generation((" Rome", 0.7), (" is it.", 0.1), method="cocoa-sig")


@pytest.mark.parametrize("format", DOCUMENTS)
def test_every_format_shows_both_answers_and_the_title_and_says_where_risks_are_not_comparable(format):
    document = FIRST.render(format, compared=[OTHER], title="Which city?")
    for part in ("Paris", "Rome", "Which", "greedy", "cocoa-sig"):
        assert part in document

    def words(*answers):
        document = answers[0].render(format, compared=answers[1:])
        return " ".join(unescape(re.sub("<.*?>", " ", document)).split())

    probability = generation((" Rome", 0.7), (" is it.", 0.1), risk_source="calibrator")
    warning = (
        "The risks of these answers are of different kinds, so do not compare them: "
        "how unsure the model was; estimated probability."
    )
    assert words(FIRST, OTHER, probability).count(warning) == 1
    assert "different kinds" not in words(FIRST, OTHER, generation())
    assert "different kinds" not in words(FIRST)


def test_titles_and_an_unknown_format():
    lines = FIRST.render("markdown", compared=[OTHER], title="*Which*\ncity?").splitlines()
    assert lines[0] == r"# \*Which\* city?"
    assert [line for line in lines if line.startswith("## ")] == ["## greedy", "## cocoa-sig"]
    picture = FIRST.render("svg", title="Which city?")
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "@font-face" not in picture
    with pytest.raises(ConfigError, match=r"unknown format 'htm' \(did you mean 'html'\?\)"):
        FIRST.render("htm")


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


TERMS = re.compile(r"MLDS|\b(p|log|tokens?|rank\w*|quantiles?|logits?)\b", re.IGNORECASE)
"""Terms of the field, which belong into documentation and JSON."""


def sentences(answer: Answer) -> list[str]:
    """What a person is told about the risk of an answer."""
    other = generation(("all", 0.1), risk_source="calibrator" if answer.risk_source != "calibrator" else "f_mlds")
    return [
        verdict(answer),
        wording.describe_scale([answer], RiskScale.of(answer.spans)),
        wording.describe_different_kinds([answer, other]) or "",
        wording.summary(answer).partition("; ")[2],
        statistics(answer.spans[0])[0][2],
    ]


def test_every_figure_of_a_span_is_listed_with_its_meaning() -> None:
    span = generation(("It", 0.5)).spans[0].model_copy(update={"probe": 0.1, "token_source_attention": [0.2]})
    figures = {name for name in (*Span.model_fields, *Span.model_computed_fields) if type(getattr(span, name)) is float}
    rows = [row for row in statistics(span) if row[0] not in ("tokens", "entropy")]
    assert len(rows) == len(figures - {"self_information"}) >= 8  # which is -log p
    assert all(meaning for _, _, meaning in rows)


@pytest.mark.parametrize("source", get_args(RiskSource))
@pytest.mark.parametrize("risk", [0.1, 0.9])
def test_no_sentence_needs_statistics(source: RiskSource, risk: float) -> None:
    answer = generation(("It was", 0.05), (" built", 0.05), (" in 1847", risk), risk_source=source)
    assert [one for one in sentences(answer) if TERMS.search(one)] == []
    assert verdict(answer).count(NOT_CALIBRATED) == (source != "calibrator")
    assert TERMS.search(SOURCES[source]) is None  # also in the errors and comments of adapters


@pytest.mark.parametrize(
    ("source", "risk", "words"),
    [
        ("token_probability", 0.93, 'The model was unsure about "1847".'),
        ("token_probability", 0.3, 'The model was a little unsure about "1847".'),
        ("source_attention", 0.93, 'The model looked little at the source for "1847".'),
        ("source_attention", 0.3, 'The model looked a little less at the source for "1847".'),
        ("token_probability", 0.2, "The model was fairly sure of every word."),
        ("source_attention", 0.2, "The model looked at the source for every part of this answer."),
    ],
)
def test_the_verdict_names_the_riskiest_claim(source: RiskSource, risk: float, words: str) -> None:
    answer = generation(("It was built in", 0.05), (" 1847", risk), risk_source=source)
    assert verdict(answer) == f"{words} {NOT_CALIBRATED}"


def test_a_risk_outside_all_claims_and_one_of_spans_alone_are_said() -> None:
    answer = generation(("It was built", 0.05), (" by", 0.9), risk_source="source_attention")
    assert verdict(answer).startswith("The model looked little at the source for a part of this answer.")
    answer = generation(("It was built", 0.05), risk_source="calibrator")
    assert verdict(answer).startswith("The risk of the answer as a whole was not measured.")


@given(
    st.lists(st.tuples(st.sampled_from(["Rome", "the", "1847", ".", ""]), st.floats(0.01, 1)), min_size=1, max_size=6),
    st.booleans(),
)
def test_the_model_is_unsure_about_a_listed_claim_or_the_word_of_its_least_probable_token(
    tokens: list[tuple[str, float]], known: bool
) -> None:
    texts = [f" {text}" if text.isalnum() else text for text, _ in tokens]
    probabilities = [probability for _, probability in tokens]
    ends = list(accumulate(map(len, texts)))
    risk = 1 - min(probabilities)
    (span,) = generation(("".join(texts), risk)).spans
    measured = {"token_ids": [7] * len(tokens), "token_log_probs": [log(one) for one in probabilities]}
    span = span.model_copy(update={**measured, "token_ends": ends if known else []})
    answer = generation(("".join(texts), risk)).model_copy(update={"spans": [span]})
    words = [text.strip() for text in texts if text.strip(" .")]
    word = texts[probabilities.index(min(probabilities))].strip(" .") if known else words[0] if len(words) == 1 else ""
    listed = [" ".join(one.text.split()) for one in answer.check_these()]
    if listed:  # the sentence and the list agree
        word = next((one for one in listed if word and word in one.split()), listed[0])
    named = f'"{word}"' if word else "a part of this answer"
    said = verdict(answer).removesuffix(f" {NOT_CALIBRATED}")
    unsure = {f"The model was unsure about {named}.", f"The model was a little unsure about {named}."}
    assert said in (unsure if risk >= LOWEST_SHADE else {"The model was fairly sure of every word."})


@given(
    st.lists(st.tuples(st.sampled_from([" Rome", " the", " 1847", "."]), st.floats(0, 1), st.booleans()), min_size=1),
    st.sampled_from(["token_probability", "source_attention"]),
)
def test_the_verdict_names_a_part_wherever_anything_is_shaded_or_listed(
    parts: list[tuple[str, float, bool]], source: RiskSource
) -> None:
    answer = generation(*((text, risk) for text, risk, _ in parts), risk_source=source)
    flagged = [span.model_copy(update={"flagged": part[2]}) for span, part in zip(answer.spans, parts, strict=True)]
    answer = answer.model_copy(update={"spans": flagged})
    shown = answer.check_these() or any(RiskScale().level(span.risk) for span in answer.spans)
    assert ("every" in verdict(answer)) == (not shown)


@given(st.lists(st.tuples(st.text(max_size=60), st.sampled_from([0.1, 0.9, float("nan")])), min_size=1, max_size=4))
def test_the_verdict_is_one_short_line_whatever_the_model_wrote(parts: list[tuple[str, float]]) -> None:
    answer: Generation = generation(*parts)
    said = verdict(answer)
    assert len(said) < 450  # a character that is shown by its name has eight
    assert said.splitlines() == [said]
    assert safe(said) == said


# --- HTML: what a parser finds in it, whatever a model wrote


def answer_in(page: Page) -> str:
    """The text of the answers, which the details repeat."""
    return page.text("cocoa-text", without="cocoa-card")


class Both(Page):
    """A page without its details, and the details."""

    def __init__(self, html: str) -> None:
        parts = re.split(r"<details>.*?</details>", html, flags=re.DOTALL)
        self.details = Page("".join(re.findall(r"<details>.*?</details>", html, flags=re.DOTALL)))
        super().__init__("".join(parts))


CANDIDATES = [
    Candidate(**figures(" <b>Dune</b>", 0.9, -2.25, -7.5), is_greedy=False),
    Candidate(**figures(" “Emma”\n" + "very " * 60, 0.8, -1.5, -8.25), is_greedy=True),
    Candidate(**figures("", 0.7, -3.0, -9.0), is_greedy=False),
]
LEVELS = generation(
    ("It", 0.95), (" low", 0.20), (" mild", 0.30), (" raised", 0.60), (" <Dune>", 0.90), candidates=CANDIDATES
)


def test_the_riskiest_claims_are_shaded_and_reachable_by_keyboard() -> None:
    page = Both(LEVELS.to_html(full=False))
    assert page.text("cocoa-verdict").startswith('The model was unsure about "Dune". Not calibrated')
    claims = page.of_class("cocoa-span")
    assert [one["class"] for one in claims] == [f"cocoa-span cocoa-level-{level}" for level in (1, 2, 3)]
    assert page.text("cocoa-level-3", without="cocoa-bars") == "Dune"
    assert page.text("cocoa-check").startswith("Dune (0.90): the model was unsure; competing: Emma")
    assert page.text("cocoa-check").endswith("raised (0.60): the model was unsuremild (0.30): the model was unsure")
    assert {one["tabindex"] for one in claims} == {"0"}
    cards = page.of_class("cocoa-card")
    assert [one["aria-describedby"] for one in claims] == [card["id"] for card in cards]
    assert {card["role"] for card in cards} == {"tooltip"}
    assert "Other candidates say:" in page.text("cocoa-card")


def test_sentences_have_bars_and_their_words() -> None:
    two = generation(("Rome is old.", 0.2), (" Paris is new", 0.8), (".", 0.1))
    page = Page(two.to_html())
    assert len(page.of_class("cocoa-bars")) == 1
    assert page.text("cocoa-words") == "Rome is old.Paris is new."
    assert page.text("cocoa-number") == "0.200.80"
    assert "width:80%" in two.to_html()
    assert Page(LEVELS.to_html()).of_class("cocoa-bars") == []  # one sentence


def test_every_span_is_among_the_details_with_a_card_of_its_figures_and_rivals() -> None:
    page = Both(LEVELS.to_html()).details
    spans = page.of_class("cocoa-span")
    assert [span["class"] for span in spans] == [f"cocoa-span cocoa-level-{level}" for level in (3, 0, 1, 2, 3)]
    assert {span["tabindex"] for span in spans} == {"0"}
    assert [span["aria-describedby"] for span in spans] == [card["id"] for card in page.of_class("cocoa-card")]
    words = " ".join(page.text("cocoa-card").split())
    for part in ("chosen from 3 competing candidates", "risk level 3 of 0 to 3", "log p", "-2.25", "0.900", "-7.50"):
        assert part in words
    assert page.text("cocoa-clip") == "␣<b>Dune</b>␣“Emma”\\n" + "very " * 59 + "very␣(end)"
    assert page.text("cocoa-kept").startswith("␣<b>Dune</b>-2.25")
    assert "greedy" in words


def test_the_legend_says_what_the_levels_are() -> None:
    words = Page(LEVELS.to_html()).text("cocoa-about")
    assert "Risk, 0 to 1 (how unsure the model was):" in words
    assert "0.25–0.50" in words
    assert "highest risk 0.950, mean 0.590" in words
    raw = Page(generation(("sure", 0.8), (" not", 0.9), risk_source="f_mlds").to_html())
    assert "the layers of the model disagree, not a probability: it has no levels." in raw.text("cocoa-about")
    assert raw.of_class("cocoa-legend") == []


def test_answers_and_risk_points_without_a_word() -> None:
    for text in ("", " ", "\n\n"):
        page = Both(generation(*([(text, 0.9)] if text else [])).to_html())
        assert answer_in(page) == answer_in(page.details) == text
        assert page.of_class("cocoa-span") == []
    # a risk point without a word can be pointed at, and adds no text
    ended = generation(("Yes.", 0.8), ("", 0.9), candidates=[CANDIDATES[2]])
    page = Both(ended.to_html()).details
    assert answer_in(page) == "Yes."
    assert page.of_class("cocoa-end")
    broken = generation(("Yes.", 0.8), ("\n", 0.9), candidates=[CANDIDATES[2]])
    assert answer_in(Both(broken.to_html()).details) == "Yes.\n"
    assert Page(broken.to_html()).of_class("cocoa-line")


def test_answers_stand_side_by_side_with_their_differences_marked() -> None:
    first = generation(("It is", 0.8), (" Paris, <of course>.", 0.9))
    other = generation(("It is Rome", 0.8), (", <of course>.", 0.85), method="greedy")
    page = Both(first.to_html(compared=[other], title="Which city?"))
    assert page.text("cocoa-name") == "cocoa-siggreedy"
    assert answer_in(page) == first.text + other.text
    assert page.text("cocoa-differs") == "ParisRomemarked"
    assert "<strong>The answers are the same.</strong>" in first.to_html(compared=[first.model_copy()])
    names = [attributes["id"] for one in (page, page.details) for _, attributes in one.elements if "id" in attributes]
    assert len(set(names)) == len(names) == 8 + 2  # four spans and the one claim that stands out, with their cards
    # answers of one method are told apart by their settings
    weights = [generation(("Yes.", 0.8), alpha=alpha, stop=stop) for alpha, stop in ((1.0, ()), (2.5, ("<b>",)))]
    page = Page(weights[0].to_html(compared=weights[1:]))
    assert page.text("cocoa-name") == "cocoa-sig, alpha 1.0, stop ()cocoa-sig, alpha 2.5, stop ('<b>',)"


def test_notebooks_show_the_fragment_and_it_does_not_change_from_run_to_run() -> None:
    assert LEVELS._repr_html_() == LEVELS.to_html(full=False)
    again = Generation.model_validate_json(LEVELS.model_dump_json())
    assert again._repr_html_() == LEVELS._repr_html_()
    assert "<html" not in LEVELS._repr_html_()
    assert "default-src 'none'" in LEVELS.to_html()
    assert not re.search(r"url\(|@import|https?://", LEVELS.to_html())


@pytest.mark.parametrize("last", [" is", "\n", ""])
def test_the_span_that_reached_max_risk_has_its_sign_in_html_whatever_its_level(last: str) -> None:
    page = Both(stopped(("Dune", 0.9), (last, 0.8)).to_html())
    assert answer_in(page) == answer_in(page.details) == "Dune" + last
    assert len(page.of_class("cocoa-reached")) == 1
    classes = [span["class"] or "" for span in page.details.of_class("cocoa-span")]
    assert ["cocoa-reached" in one for one in classes] == [False, True]
    assert page.details.text("cocoa-card").count("reached max_risk") == 1
    assert "reached max_risk" in page.details.text("cocoa-about")
    assert "reached max_risk" not in Page(LEVELS.to_html()).text("cocoa-about")
