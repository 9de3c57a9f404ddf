"""The registry of document formats, and what each writes."""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from cocoa_engine import ConfigError
from cocoa_engine.rendering.documents import DOCUMENTS
from tests.helpers.made_up_answers import generation

FIRST = generation((" Paris", 0.9), (" is it.", 0.1), method="greedy")
OTHER = generation((" Rome", 0.7), (" is it.", 0.1), method="cocoa-sig")


@pytest.mark.parametrize("format", DOCUMENTS)
def test_every_format_shows_both_answers_and_the_title(format):
    document = FIRST.render(format, compared=[OTHER], title="Which city?")
    for part in ("Paris", "Rome", "Which", "greedy", "cocoa-sig"):
        assert part in document


@pytest.mark.parametrize("format", DOCUMENTS)
def test_every_format_says_where_risks_are_not_comparable(format):
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


def test_each_format_for_itself():
    lines = FIRST.render("markdown", compared=[OTHER], title="*Which*\ncity?").splitlines()
    assert lines[0] == r"# \*Which\* city?"
    assert [line for line in lines if line.startswith("## ")] == ["## greedy", "## cocoa-sig"]
    picture = FIRST.render("svg", title="Which city?")
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "@font-face" not in picture
    with pytest.raises(ConfigError, match=r"unknown format 'htm' \(did you mean 'html'\?\)"):
        FIRST.render("htm")
