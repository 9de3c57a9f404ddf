"""How well claims point at labelled errors: the figures of made-up tokens, and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from cocoa_engine import CocoaConfig, CocoaEngine, DataError
from cocoa_engine.lab.claims import Row, TokenValues, measure_claims, to_csv, to_markdown
from cocoa_engine.lab.data import LabelledSpan, LabelledText
from cocoa_engine.lab.forced import force
from cocoa_engine.lab.measured import span_risks
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

WORDS = ("Rome", " shines", ".", " Boats", " sail", " slowly", " home", " again", ".")


def answer(number: int, wrong: str, unlikely: str) -> TokenValues:
    """An answer with one wrong word, and one that attends little to the source and is improbable."""
    text = "".join(WORDS)
    start = text.index(wrong)
    record = LabelledText(
        id=str(number),
        prompt="p",
        text=text,
        question="q",
        label=True,
        spans=(LabelledSpan(start, start + len(wrong)),),
        group=str(number % 4),
    )
    ends, low = [], []
    for word in WORDS:
        ends.append((ends[-1] if ends else 0) + len(word))
        low.append(unlikely in word)
    return TokenValues(
        record,
        ends,
        [math.log(0.2) if one else math.log(0.9) for one in low],
        [0.1 if one else 0.5 for one in low],
        list(range(len(WORDS))),
    )


def value(rows: list[Row], units: str, rule: str, score: str) -> float:
    (row,) = [row for row in rows if (row.units, row.rule, row.score) == (units, rule, score)]
    return row.value.estimate


def test_a_score_that_finds_the_error_and_one_that_does_not() -> None:
    found = measure_claims([answer(number, "slowly", "slowly") for number in range(8)], draws=40)
    for score in ("source attention", "least probable token"):
        for rule in ("highest span", "mean of spans", "own tokens"):
            assert value(found, "claim", rule, score) == 1.0
        assert value(found, "span", "itself", score) == 1.0
        assert value(found, "sentence", "three riskiest claims", score) == 1.0
        assert value(found, "three claims", "lead to the error", score) == 1.0
    # six claims ("again" is a function word), one of them wrong: three at random have it in half of the cases
    chance = value(found, "three claims", "lead to the error", "at random")
    assert chance == pytest.approx(3 / 6)
    missed = measure_claims([answer(number, "home", ".") for number in range(8)], draws=40)
    assert value(missed, "claim", "highest span", "source attention") == 0.5
    assert value(missed, "three claims", "lead to the error", "source attention") == 0.0
    assert to_csv(missed).splitlines()[0] == "units,rule,score,items,value,low,high"
    assert to_markdown(missed).count("\n") == len(missed) + 2


def test_answers_without_labelled_parts_are_refused() -> None:
    with pytest.raises(DataError, match="labelled parts"):
        measure_claims([])


def test_the_values_of_a_fed_answer() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    record = answer(0, "slowly", "x").record
    (forced,) = force(engine, [record], CocoaConfig())
    values = TokenValues.of(forced)
    assert values.starts[0] == 0
    assert values.ends[-1] == len(record.text)
    assert len(values.log_probs) == len(values.ends)
    rows = measure_claims([values], draws=20)
    assert {row.units for row in rows} >= {"span", "claim", "three claims"}


def test_the_calibrated_risk_of_given_answers(engine: CocoaEngine) -> None:
    record = replace(answer(0, "slowly", "x").record, prompt="A text about a city and about boats:")
    (forced,) = force(engine, [record], engine.config)
    calibrator = engine.calibrator_for(engine.config)
    assert calibrator is not None
    risks = span_risks(forced, calibrator, engine.config, engine.num_layers)
    values = TokenValues.of(forced, risks)
    assert len(values.risks) == len(values.starts) > 1
    assert len({round(risk, 6) for risk in values.risks}) > 1
    rows = measure_claims([values], draws=20)
    assert {row.rule for row in rows if row.score == "calibrated risk"} == {
        "itself",
        "highest span",
        "mean of spans",
        "three riskiest claims",
        "lead to the error",
    }


def test_the_command(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = _command(engine, monkeypatch)
    data = tmp_path / "mushroom.en.jsonl"
    text = "Anna wrote some long books."
    row = {"lang": "EN", "model_output_text": text, "hard_labels": [[0, 4]]}
    rows = [json.dumps({"id": str(n), "model_input": f"Who {n}?", **row}) for n in range(3)]
    data.write_text("\n".join(rows) + "\n", encoding="utf-8")
    out = tmp_path / "claims.csv"
    result = run("claims", "--data", str(data), "--format", "mushroom", "--draws", "20", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "lead to the error" in result.stdout
    assert "calibrated risk" in result.stdout
    assert out.read_text(encoding="utf-8").startswith("units,rule,score")


def _command(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    from typer.testing import CliRunner

    from cocoa_engine.cli.app import app

    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: engine)
    return lambda *args: CliRunner().invoke(app, list(args), prog_name="cocoa")
