"""``cocoa score`` on answers from elsewhere: JSON lines in and out, and a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cocoa_engine import CocoaConfig, CocoaEngine, DataError
from cocoa_engine.cli.score import risk_of_row, score_rows, scored_row
from cocoa_engine.rendering.wording import NOT_CALIBRATED
from tests.helpers.made_up_answers import generation
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

Cocoa = Callable[..., Result]

ROWS: list[Any] = [
    {"id": 7, "prompt": "abc def", "text": " ghi jkl mno.", "source": "abc"},
    {"prompt": "abc", "text": ""},
    {"prompt": "abc"},
    ["no object"],
    {"prompt": "abc", "text": " ghi", "source": "not in it"},
]


@pytest.fixture
def tiny() -> CocoaEngine:
    return CocoaEngine(tiny_model("llama"), tiny_tokenizer())


def test_rows_keep_what_they_have_and_their_errors(tiny: CocoaEngine, tmp_path: Path) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("\n".join([*map(json.dumps, ROWS), "", "{broken"]), encoding="utf-8")
    assert score_rows(tiny, given, out, CocoaConfig()) == (5, 6)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 6
    first = rows[0]
    assert {key: first[key] for key in ROWS[0]} == ROWS[0]
    scored = tiny.score("abc def", " ghi jkl mno.", divide=True, source=["abc"])
    assert first["risk"] == risk_of_row(scored)
    risk = first["risk"]
    assert risk["verdict"].endswith(NOT_CALIBRATED)
    assert (risk["max_risk"], risk["threshold"], risk["out_of_domain"]) == (scored.max_risk, scored.threshold, False)
    attention = [span.source_attention for span in scored.spans if span.text.strip()]
    assert risk["source_attention"] == pytest.approx(sum(attention) / len(attention))
    passage = [span.passage_attention[0] for span in scored.spans if span.text.strip()]
    assert risk["passage_attention"] == pytest.approx(sum(passage) / len(passage))
    without = risk_of_row(tiny.score("abc def", " ghi jkl mno.", divide=True))
    assert without["passage_attention"] is None
    assert without["max_risk"] > 0
    assert first["risk"]["sentences"][0]["end"] == len(" ghi jkl mno.")
    for number, (row, message) in enumerate(
        zip(rows[1:], ("empty", "text: ", "not a JSON object", "not in it", ""), strict=True), start=2
    ):
        assert row["error"].startswith(f"row {number}: ")
        assert message in row["error"]
        assert "risk" not in row


def test_a_row_that_is_nested_too_deeply_keeps_its_error_only(tiny: CocoaEngine) -> None:
    lines = {}
    for depth in range(800, 1000):
        row = f'{{"prompt": "p", "text": "", "deep": {"[" * depth}{"]" * depth}}}'
        lines[depth], has_error = scored_row(tiny, 1, row, CocoaConfig())
        assert has_error
    kept = {"deep" in json.loads(line) for line in lines.values()}
    assert kept == {True, False}


@pytest.mark.parametrize("method", ["dola", "diver"])
def test_a_method_that_divides_no_text_scores_it_as_one_span(tiny: CocoaEngine, tmp_path: Path, method: Any) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps(ROWS[0]), encoding="utf-8")
    assert score_rows(tiny, given, out, CocoaConfig(method=method)) == (0, 1)
    scored = tiny.score("abc def", " ghi jkl mno.", method=method, source=["abc"])
    assert json.loads(out.read_text(encoding="utf-8"))["risk"] == risk_of_row(scored)


def test_a_page_by_a_method_that_divides_no_text(cocoa: Cocoa, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = cocoa("score", "--method", "dola", "--prompt", "The capital is", "--text", " Paris.", "--html", str(page))
    assert result.exit_code == 0, result.stderr
    assert "Paris" in page.read_text(encoding="utf-8")


def test_values_are_valid_json() -> None:
    risky = generation(("Rome", float("nan")), (" is old", 0.2))
    json.dumps(risk_of_row(risky), allow_nan=False)
    assert risk_of_row(risky)["check"][0]["text"] == "Rome"
    assert risk_of_row(risky)["max_risk"] is None


def test_a_file_without_rows_is_refused(tiny: CocoaEngine, tmp_path: Path) -> None:
    empty = tmp_path / "in.jsonl"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        score_rows(tiny, tmp_path / "none.jsonl", tmp_path / "out.jsonl", CocoaConfig())
    with pytest.raises(DataError, match="no rows"):
        score_rows(tiny, empty, tmp_path / "out.jsonl", CocoaConfig())


def test_the_command(cocoa: Cocoa, engine: CocoaEngine, tmp_path: Path) -> None:
    given, out, page = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "page.html"
    row = {"prompt": "The capital of France is", "text": " Paris, on the Seine."}
    given.write_text(json.dumps(row) + "\n{}\n", encoding="utf-8")
    result = cocoa("score", f"--rows={given}", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "2 rows written" in result.stderr
    assert "1 of them with an error" in result.stderr
    scored = json.loads(out.read_text(encoding="utf-8").splitlines()[0])
    assert {"Paris", "Seine"} >= {one["text"] for one in scored["risk"]["check"]}
    result = cocoa("score", "--prompt", row["prompt"], "--text", row["text"], "--html", str(page))
    assert result.exit_code == 0, result.stderr
    html = page.read_text(encoding="utf-8")
    assert 'class="cocoa-verdict"' in html
    assert "Seine" in html
