"""Answers as HTML: what a parser finds in it, whatever a model wrote."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from cocoa_engine import Candidate, Generation
from tests.helpers.made_up_answers import figures, generation, stopped

VOID = {"meta"}


class Page(HTMLParser):
    """The elements of a page, well nested, and the text inside those of one class."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, set[str]]] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[list[set[str]], str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, set(attributes.get("class", "").split())))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(([classes for _, classes in self.open], data))

    def text(self, wanted: str, *, without: str = "no such class") -> str:
        classes = ((set().union(*inside), data) for inside, data in self.texts)
        return "".join(data for inside, data in classes if wanted in inside and without not in inside)

    def of_class(self, wanted: str) -> list[dict[str, str]]:
        return [one for _, one in self.elements if wanted in one.get("class", "").split()]


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


def test_answers_without_a_word() -> None:
    for text in ("", " ", "\n\n"):
        page = Both(generation(*([(text, 0.9)] if text else [])).to_html())
        assert answer_in(page) == answer_in(page.details) == text
        assert page.of_class("cocoa-span") == []


def test_a_risk_point_without_a_word_can_be_pointed_at_and_adds_no_text() -> None:
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
def test_the_span_that_reached_max_risk_has_its_sign_whatever_its_level(last: str) -> None:
    page = Both(stopped(("Dune", 0.9), (last, 0.8)).to_html())
    assert answer_in(page) == answer_in(page.details) == "Dune" + last
    assert len(page.of_class("cocoa-reached")) == 1
    classes = [span["class"] or "" for span in page.details.of_class("cocoa-span")]
    assert ["cocoa-reached" in one for one in classes] == [False, True]
    assert page.details.text("cocoa-card").count("reached max_risk") == 1
    assert "reached max_risk" in page.details.text("cocoa-about")
    assert "reached max_risk" not in Page(LEVELS.to_html()).text("cocoa-about")
