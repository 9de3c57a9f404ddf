"""The quick part of the conformance suite ``templates``."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance.templates import FOLDER, compared, forged
from tests.conformance.tools import OMITTED, source_if_there

pytestmark = pytest.mark.slow


def test_templates_are_rendered_as_transformers_does() -> None:
    outcomes = list(compared(source_if_there("llama-cpp-python") / FOLDER))
    different = {name for name, _, outcome in outcomes if outcome == "differs"}
    assert different == OMITTED["templates"].keys()
    assert Counter(outcome for *_, outcome in outcomes)["equal"] > 300


def test_no_text_makes_a_control_token() -> None:
    attempts = list(forged(source_if_there("llama-cpp-python") / FOLDER, each=False))
    assert len(attempts) > 400
    assert [(name, kind) for name, kind, _, made in attempts if made] == []
