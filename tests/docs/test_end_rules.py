"""The tables of the page about the end of an answer are those of the measures that lie beside it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow

PAGES = ROOT / "docs" / "explanation"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load(PAGES / "decoding-default" / "tables.py")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("end_rules_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(marker: str) -> list[str]:
    """The lines of a table of the page."""
    text = (PAGES / "evaluation.md").read_text(encoding="utf-8")
    return text.split(f"<!-- study: {marker} -->\n")[1].split("<!-- end of the study -->")[0].splitlines()


def test_quality_rejections_and_lost_answers(tables: ModuleType) -> None:
    assert shown("rules") == list(tables.quality())


def test_lengths_and_empty_answers(tables: ModuleType) -> None:
    assert shown("lengths") == list(tables.lengths())
