"""What is drawn in documents and in a terminal, for any text of a model, and the sentences about the risk."""

import math
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
from cocoa_engine.errors import safe
from cocoa_engine.rendering import terminal, wording
from cocoa_engine.rendering.documents import DOCUMENTS
from cocoa_engine.rendering.highlights import Answer, Range, RiskScale, differences, marked, pieces
from cocoa_engine.rendering.terminal import STYLES, Comparison, answer_text, report, risk_point_table
from cocoa_engine.rendering.wording import NOT_CALIBRATED, SOURCES, finding, statistics, verdict
from cocoa_engine.risk import LOWEST_SHADE, Check
from tests.helpers.drawn import Page, drawn
from tests.helpers.made_up_answers import figures, generation, stopped


def rivals(*texts: str) -> list[Candidate]:
    """Up to three candidates that competed; the second is the greedy one."""
    values = ((0.9, -2.25, -7.5), (0.8, -1.5, -8.25), (0.7, -3.0, -9.0))
    return [Candidate(**figures(text, *values[at]), is_greedy=at == 1) for at, text in enumerate(texts)]


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
    candidates = rivals(" in | water\n", " in | wood")
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


CANDIDATES = rivals(" <b>Dune</b>", " “Emma”\n" + "very " * 60, "")
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


SEVEN = generation(
    *(("It is", 0.99), (" low", 0.20), (",", 0.95), (" mild", 0.30)), (" raised", 0.60), (" high", 0.90), (".", 0.99)
)


def test_the_riskiest_claims_have_the_style_of_their_level_and_nothing_else_has() -> None:
    rendered = answer_text(SEVEN)
    assert rendered.plain == "It is low, mild raised high."
    styled = {str(span.style): rendered.plain[span.start : span.end] for span in rendered.spans if span.style}
    assert styled == dict(zip(STYLES[1:], ("mild", "raised", "high"), strict=True))
    assert STYLES[1:] == ("underline", "#000000 on #ffd75f", "bold #ffffff on #c00000")


def test_the_verdict_comes_first_and_the_claims_to_check_beneath() -> None:
    lines = drawn(report([SEVEN], marks=True)).splitlines()
    assert " ".join(lines[:2]).split() == f'The model was unsure about "high". {NOT_CALIBRATED}'.split()
    assert lines[-4:] == [
        "Check these:",
        "1. high (0.90): the model was unsure",
        "2. raised (0.60): the model was unsure",
        "3. mild (0.30): the model was unsure",
    ]
    assert "fMLDS" not in "".join(lines)  # only among the details
    whole = SEVEN.model_copy(update={"answer_risk": 0.714, "calibrated_on": "questions about a passage"})
    assert whole.verdict == "Whole answer: 71 % likely wrong; calibrated on questions about a passage."
    first = drawn(report([whole])).splitlines()[0]
    assert first.strip() == "Whole answer: 71 % likely wrong; calibrated on questions about a passage."
    unlike = " ".join(drawn(report([whole.model_copy(update={"answer_out_of_domain": True})])).split())
    assert "about a passage. This answer is unlike those, so the probability may be unreliable." in unlike
    raw = generation(("It is", 0.4), (" low", 3.1), risk_source="f_mlds")
    raw = raw.model_copy(update={"answer_risk": 0.714})
    assert raw.verdict == f"Whole answer: 71 % likely wrong. {finding(raw)}"
    assert "not probabilities" in raw.verdict


def test_a_claim_has_one_colour_in_any_view() -> None:
    """No scale is relative to the texts beside it."""
    alone = answer_text(SEVEN, marks=True).plain
    assert alone == "It is low, [mild|1] [raised|2] [high|3]."
    other = generation(("It is low, mild raised high", 0.1), (" now", 0.95))
    beside = Comparison([SEVEN, other], marks=True).answers[0].plain
    assert beside.replace("{", "").replace("}", "") == alone
    shorter = SEVEN.model_copy(update={"spans": SEVEN.spans[:4], "text": "It is low, mild"})
    assert answer_text(shorter, marks=True).plain == "It is low, [mild|1]"


def test_a_raw_mlds_has_no_levels() -> None:
    raw = generation(("all", 0.8), (" alike", 0.9), risk_source="f_mlds")
    assert answer_text(raw, marks=True).plain == "all alike"
    words = " ".join(drawn(report([raw], table=True)).split())
    assert "layers of the model disagree; they are not probabilities, so nothing is shaded. Not calibrated" in words
    assert "it has no levels" in words
    page = Page(raw.to_html())
    assert "the layers of the model disagree, not a probability: it has no levels." in page.text("cocoa-about")
    assert page.of_class("cocoa-legend") == []
    for document in (words, raw.to_html(), raw.render("markdown")):
        assert "Check these" not in document
        assert "stands out" not in document  # which no raw MLDS can tell


@given(risk=st.one_of(st.floats(0, 1), st.just(math.nan)))
def test_levels_are_fixed_steps(risk: float) -> None:
    scale = RiskScale()
    assert scale.level(risk) == (3 if math.isnan(risk) else min(int(risk * 4), 3))
    assert scale.level(None) == 0
    assert RiskScale(absolute=False).level(risk) == 0
    assert scale.ranges == ["0.00–0.25", "0.25–0.50", "0.50–0.75", "0.75–1.00"]


def test_details_have_every_span_and_sentence() -> None:
    shown = drawn(report([SEVEN], table=True, marks=True))
    assert "[It is|3] low[,|3] [mild|1] [raised|2] [high|3][.|3]" in shown
    assert "██████░░░░ 0.60 It is low, mild raised high." in shown
    assert "cocoa-sig: 7 tokens, 7 spans" in shown


def test_the_span_that_reached_max_risk_is_marked_in_a_terminal() -> None:
    answer = stopped(("Dune", 0.2), (" is", 0.1))
    assert answer_text(answer, marks=True).plain == "Dune [is|0!]"
    assert "! reached max_risk" in drawn(report([answer], marks=True))
    coloured = answer_text(answer)
    assert coloured.plain == answer.text
    style = next(str(span.style) for span in coloured.spans if coloured.plain[span.start : span.end] == "is")
    assert style not in STYLES
    assert style in {str(span.style) for span in terminal.legend(answer).spans}
    assert answer_text(stopped(("Dune", 0.9), ("", 0.8)), marks=True).plain.endswith("[(end)|0!]")
    assert "{[is|0!]}" in drawn(Comparison([answer, generation(("Dune", 0.9))], marks=True))
    assert "max_risk" not in drawn(report([SEVEN], table=True, marks=True))
    assert terminal.spans_text(answer.spans, marks=True).plain == "Dune [is|0!]"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[bold]not markup[/bold] [/] [link=x]",
        ":smile: 🙂 👩‍👩‍👧 🇦🇺",
        "שלום עולם, مرحبا بالعالم",
        "日本語のテキストがここにありますそしてもっと続きます",
        "def f(x):\n\treturn [x]\n",
    ],
)
@pytest.mark.parametrize("width", [24, 80])
def test_text_is_drawn_as_it_is(text: str, width: int) -> None:
    answer = generation(("Xylophone ", 0.1), (text, 0.9), (" y", 0.8))
    assert answer_text(answer).plain == "Xylophone " + text + " y"
    shown = drawn(answer_text(answer), width)
    assert "".join(shown.split()) == "".join(("Xylophone" + text + "y").split())
    assert "\x1b[" in drawn(answer_text(answer), width, color=True)


def test_words_are_not_torn_at_narrow_widths() -> None:
    answer = generation(("The quick brown fox", 0.8), (" jumps over the lazy", 0.9), (" dog", 0.85))
    for width in range(8, 40):
        lines = drawn(answer_text(answer), width).splitlines()
        assert " ".join(" ".join(lines).split()) == answer.text
        assert max(map(len, lines)) <= width


def test_where_all_is_alike_nothing_is_shaded() -> None:
    alike = generation(("Paris", 0.9), (" shines", 0.9))
    shown = drawn(report([alike], marks=True))
    assert "Paris shines" in shown
    assert "|" not in shown
    for document in (shown, alike.to_html(), alike.to_markdown()):
        assert "No claim of this answer stands out." in document
        assert "Check these" not in document


IN_WATER = rivals(" in water\n", " [red]", "")
RISKY = generation(("Sound travels faster", 0.8), (" in water\n", 0.9), candidates=IN_WATER)


def test_table_shows_every_candidate_with_its_figures() -> None:
    rows = [line.split() for line in drawn(risk_point_table(RISKY)).splitlines()]
    assert rows[0] == ["#", "candidates", "log", "p", "ConMLDS", "fMLDS", "score", "taken"]
    assert rows[2] == ["1", "after", "“Sound", "travels", "faster”"]
    assert rows[3] == ["␣in", "water\\n", "-2.25", "0.020", "0.900", "-7.50", "kept"]
    assert rows[4] == ["␣[red]", "-1.50", "0.020", "0.800", "-8.25", "greedy"]
    assert rows[5] == ["(end)", "-3.00", "0.020", "0.700", "-9.00"]
    same = generation((" water", 0.9), candidates=[Candidate(**figures(" water"), is_greedy=True)])
    assert drawn(risk_point_table(same)).splitlines()[3].split()[-1] == "both"


def test_narrow_terminals_are_filled_and_every_figure_is_whole() -> None:
    for width in (44, 60, 200):
        shown = drawn(risk_point_table(RISKY), width)
        assert max(map(len, shown.splitlines())) <= width
        for figure in ("-2.25", "0.020", "0.900", "-7.50", "kept", "greedy", "-9.00"):
            assert figure in shown
    for width in (24, 40):
        shown = drawn(report([RISKY, SEVEN], table=True, marks=True), width)
        assert max(map(len, shown.splitlines())) <= width


SOUND = generation(("Sound travels", 0.1), (" faster in water.", 0.9))
WOOD = generation(("Sound travels faster in", 0.2), (" wood.", 0.9), method="greedy")


def test_a_comparison_stands_side_by_side_with_its_verdicts_first_and_its_differences_marked() -> None:
    lines = drawn(Comparison([SOUND, WOOD], marks=True), 280).splitlines()
    assert lines[0].split() == ["cocoa-sig", "greedy"]
    assert lines[1].count("The model was unsure about") == 2
    texts = " ".join(lines[3].split())
    assert texts == "Sound travels [faster|3] in {[water|3]}. Sound travels faster in {[wood|3]}."
    assert lines[5].count("Check these:") == 2


def test_a_claim_that_differs_in_part_has_the_braces_inside() -> None:
    first = generation(("The", 0.1), (" post-World", 0.9), (" era", 0.1))
    other = generation(("The", 0.1), (" pre-war", 0.1), (" era", 0.1))
    assert Comparison([first, other], marks=True).answers[0].plain == "The [{post}-{World}|3] era"


@st.composite
def marked_answers(draw: st.DrawFn) -> tuple[Generation, list[Check], list[Range]]:
    """An answer, claims to check, and ranges that differ; the claims and the ranges may cut each other."""
    text = draw(st.text(alphabet="ab -\n\x1c", min_size=1, max_size=16))

    def ranges() -> list[Range]:
        at = draw(st.lists(st.integers(0, len(text)), unique=True, max_size=8).map(sorted))
        return list(zip(at[::2], at[1::2], strict=False))

    risks = st.sampled_from([0.1, 0.3, 0.6, 0.9])
    checks = [Check(text=text[start:end], start=start, end=end, risk=draw(risks)) for start, end in ranges()]
    at = draw(st.integers(0, len(text)))
    answer = draw(st.sampled_from([generation, stopped]))((text[:at], 0.1), (text[at:], 0.8))
    return answer, draw(st.permutations(checks)), ranges()


@given(marked_answers())
def test_brackets_and_braces_nest(made: tuple[Generation, list[Check], list[Range]]) -> None:
    answer, checks, differing = made
    text = marked(pieces(answer, checks, RiskScale(), differing))
    opened: list[str] = []
    in_braces: list[bool] = []  # of each character of the answer
    for one in re.findall(r"[{}\[]|\|\d?!?\]|.", text, re.DOTALL):
        if one in ("{", "["):
            assert one not in opened
            opened.append(one)
        elif one in ("}", "]") or len(one) > 1:
            assert opened.pop() == ("{" if one == "}" else "[")
        else:
            in_braces.append("{" in opened)
    assert not opened
    assert "".join(re.findall(r"[ab\s\u241c-]", text)) == safe(answer.text)
    for at, one in enumerate(safe(answer.text)):
        if not one.isspace():
            assert in_braces[at] == any(low <= at < high for low, high in differing)


def test_a_comparison_in_colour_dims_what_the_answers_share() -> None:
    first, other = Comparison([SOUND, WOOD]).answers
    assert first.plain == SOUND.text
    assert other.plain == WOOD.text
    dim = "".join(other.plain[span.start : span.end] for span in other.spans if "dim" in str(span.style))
    assert "".join(dim.split()) == "Soundtravelsfasterin."
    (differing,) = (span for span in first.spans if first.plain[span.start : span.end] == "water")
    assert str(differing.style) == "bold #ffffff on #c00000"


def test_a_comparison_too_wide_for_the_terminal_stands_one_below_the_other() -> None:
    shown = drawn(Comparison([SOUND, WOOD], marks=True), 50)
    assert max(map(len, shown.splitlines())) <= 50
    assert [" ".join(part.split()) for part in shown.split("\n\n")] == [
        f'cocoa-sig The model was unsure about "faster". {NOT_CALIBRATED}',
        "Sound travels [faster|3] in {[water|3]}.",
        "Check these: 1. faster (0.90): the model was unsure 2. water (0.90): the model was unsure",
        f'greedy The model was unsure about "wood". {NOT_CALIBRATED}',
        "Sound travels faster in {[wood|3]}.",
        "Check these: 1. wood (0.90): the model was unsure",
    ]


def test_reports_of_equal_answers_and_of_an_empty_one() -> None:
    assert "The answers are the same." in drawn(report([SOUND, SOUND.model_copy()]))
    assert "The answers are the same." not in drawn(report([SOUND, WOOD]))
    shown = drawn(report([generation()], table=True), 200)
    assert "There is nothing to measure in this answer." in shown
    assert "cocoa-sig: 0 tokens, 0 spans, 0 risk points, 5 forward passes, ended by the model." in shown


WORDS = st.lists(st.sampled_from(["the", " ", "\n", "sea", "日", "本", ".", "é", " a"]), max_size=12).map("".join)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("It is Paris.", "It is Rome."), [["Paris"], ["Rome"]]),
        (("It is  Paris.", "It\nis Paris."), [[], []]),
        (("", "Paris."), [[], ["Paris."]]),
        (("in the old town", "in town"), [["the old"], []]),
        (("東京は首都", "京都は首都"), [["東"], ["都"]]),
        (("a b c", "a x c", "a b y"), [["b c"], ["x"], ["y"]]),
        (("alone",), [[]]),
    ],
)
def test_differing_words(texts: tuple[str, ...], expected: list[list[str]]) -> None:
    ranges = differences(texts)
    assert [[text[start:end] for start, end in each] for text, each in zip(texts, ranges, strict=True)] == expected


@given(WORDS, WORDS)
def test_what_is_not_marked_is_the_same(one: str, other: str) -> None:
    rest = []
    for text, ranges in zip((one, other), differences((one, other)), strict=True):
        for start, end in reversed(ranges):
            text = text[:start] + text[end:]
        rest.append("".join(text.split()))
    assert rest[0] == rest[1]
