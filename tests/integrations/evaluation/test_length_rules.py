"""``cocoa length-rules``: answers of every rule as the engine generates them, resumable, with paired differences."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import Result

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_integrations.evaluation import TASKS, load_samples
from cocoa_integrations.evaluation.length_rules import RULES, make_rule_arms, study
from cocoa_integrations.evaluation.length_table import paired_difference, report, summarise
from cocoa_integrations.evaluation.run import shared_settings
from cocoa_integrations.evaluation.table_text import draw, markdown
from tests.helpers.eval_data import write_jsonl, write_truthfulqa
from tests.helpers.forward_passes import record

Cocoa = Callable[..., Result]
NQ = [
    {"question": "who wrote dune", "answer": ["Frank Herbert"]},
    {"question": "what is the capital of france", "answer": ["Paris"]},
]


def rows_of(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return {(row["arm"], row["id"]): row for row in map(json.loads, lines)}


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    truthfulqa, nq = write_truthfulqa(tmp_path / "truthfulqa.csv"), write_jsonl(tmp_path / "nq.jsonl", NQ)
    return ["--data", f"truthfulqa-gen={truthfulqa}", "--data", f"nq={nq}", "--prompts", "2"]


def test_the_command_answers_as_the_engine_generates(
    engine: CocoaEngine, cocoa: Cocoa, data: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["length-rules", *data, "--out", out, "--max-span-tokens", "6", "--max-new-tokens", "12"]
    shown = cocoa(*arguments, "--rules", "sum,mean", "--methods", "cocoa-sig")
    assert shown.exit_code == 0, shown.output
    arms = make_rule_arms(["cocoa-sig"], ["sum", "mean"])
    for name, path in (("truthfulqa_gen", tmp_path / "truthfulqa.csv"), ("nq", tmp_path / "nq.jsonl")):
        task, samples, rows = TASKS[name], load_samples(name, path, limit=2), rows_of(out / name)
        assert rows.keys() == {(str(arm), sample.id) for arm in arms for sample in samples}
        shared = shared_settings(task, CocoaConfig(max_span_tokens=6, max_new_tokens=12))
        for arm in arms:
            for sample in samples:
                answer = task.answer(engine.generate(sample.prompt, config=arm.config(shared)).text)
                assert rows[str(arm), sample.id]["answer"] == answer
                assert rows[str(arm), sample.id]["metrics"] == task.measure(sample, answer)
    assert "| greedy |" in shown.stdout
    assert (out / "table.md").read_text() == shown.stdout

    with (out / "answers.csv").open() as file:
        measured = {(row["task"], row["arm"], row["id"]): row for row in csv.DictReader(file)}
    for (arm, key), row in rows_of(out / "nq").items():
        line = measured["nq", arm, key]
        assert line["metrics"] == f"em={row['metrics']['em']:.6g} f1={row['metrics']['f1']:.6g}"
        assert line["empty"] == str(int(not row["answer"]))
    assert json.loads((out / "machine.json").read_text())["torch_threads"] >= 1

    # a later run with more rules measures those only, and uses the candidates of the first
    before = rows_of(out / "nq")
    passes = record(engine)
    assert cocoa(*arguments, "--rules", "sum,mean,end_mean,sqrt", "--methods", "cocoa-sig").exit_code == 0
    more = len(passes)
    after = rows_of(out / "nq")
    assert before.items() <= after.items()
    assert len(after) == len(before) + 2 * 2
    passes.clear()
    assert (
        cocoa(*arguments, "--rules", "sum,mean,end_mean,sqrt", "--methods", "cocoa-sig").stdout
        == (out / "table.md").read_text()
    )
    assert not passes
    fresh = [*arguments[:-6], "--out", tmp_path / "fresh", *arguments[-4:]]
    assert cocoa(*fresh, "--rules", "end_mean,sqrt", "--methods", "cocoa-sig").exit_code == 0
    assert more < len(passes)

    refused = cocoa(*arguments, "--rules", "sum", "--gamma", "0.5")
    assert refused.exit_code != 0
    assert "decoding.gamma is 0.3 there, 0.5 now" in refused.output.replace("\n", " ")


def test_an_interrupted_run_has_results_and_goes_on(
    engine: CocoaEngine, data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = load_samples("nq", tmp_path / "nq.jsonl")
    arguments: dict[str, Any] = {
        "tasks": [(TASKS["nq"], samples)],
        "arms": make_rule_arms(["cocoa-sig"], ["sum"]),
        "out": tmp_path / "out",
        "config": CocoaConfig(max_new_tokens=4),
        "model": {},
        "data": {"nq": {}},
    }

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(engine, **arguments, advance=interrupt)
    table_of_one = (tmp_path / "out" / "table.md").read_text()
    assert "\n\nnq, 1 prompts\n\n| arm |" in table_of_one
    counted: list[int] = []
    results = study(lambda: engine, **arguments, begin=lambda done, total: counted.extend((done, total)))
    assert counted == [2, 4]
    assert results["tasks"]["nq"]["prompts"] == 2
    assert study(lambda: pytest.fail("loaded"), **arguments) == results


def test_ctrl_c_says_where_the_samples_are_and_no_calibrator_is_loaded(
    cocoa: Cocoa, data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}

    def ctrl_c(**given: Any) -> CocoaEngine:
        options.update(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(CocoaEngine, "from_pretrained", ctrl_c)
    result = cocoa("length-rules", *data, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert f"are kept in {tmp_path / 'out'}: repeat the command to resume" in " ".join(result.stderr.split())
    assert options["calibrator"] is None


def test_what_is_given_is_checked_before_the_model_is_loaded(cocoa: Cocoa, data: list[str], tmp_path: Path) -> None:
    for wrong, message in (
        (["--data", "nq.jsonl"], "such as samsum=test.jsonl"),
        ([*data, "--rules", "middle"], "middle"),
        (["--data", f"truthfulqa_mc={tmp_path / 'truthfulqa.csv'}"], "generated text is measured"),
    ):
        failed = cocoa("length-rules", *wrong, "--out", tmp_path / "none")
        assert failed.exit_code != 0
        assert message in failed.output
    with pytest.raises(ConfigError, match="generated text is measured"):
        study(
            lambda: pytest.fail("loaded"),
            [(TASKS["mbpp"], [])],
            make_rule_arms(["cocoa"], RULES),
            tmp_path,
            model={},
            data={},
        )


def test_differences_are_paired() -> None:
    dice = np.random.default_rng(1)
    hard = dice.normal(0, 10, 200)  # what the prompts have in common is far larger than the difference
    better = paired_difference(list(hard + dice.normal(0.5, 1, 200)), list(hard))
    assert better.low is not None
    assert better.high is not None
    assert 0 < better.low < better.estimate < better.high < 1
    assert paired_difference([1.0, 2.0], [1.0, 2.0]) == (0.0, 0.0, 0.0)
    assert paired_difference([1.0], [0.0]) == (1.0, None, None)


def test_the_table_counts_what_a_rule_loses() -> None:
    texts = {"greedy": ["Paris", "I have no comment", "Rome"], "cocoa-sig, sum": ["", "I have no comment.", "Rome"]}
    rows = {
        (arm, str(at)): {"answer": text, "tokens": len(text), "metrics": {"em": float(text == "Rome"), "f1": 0.5}}
        for arm, answers in texts.items()
        for at, text in enumerate(answers)
    }
    rows["greedy", "unfinished"] = rows["greedy", "0"]
    found = summarise(TASKS["nq"], list(texts), rows)
    assert found["prompts"] == 3
    assert [found["arms"][arm]["empty"] for arm in texts] == [0, 1]
    assert [found["arms"][arm]["lost"] for arm in texts] == [0, 1]
    assert [found["arms"][arm]["rejected"] for arm in texts] == [1, 1]
    assert [found["arms"][arm]["differ"] for arm in texts] == [0, 2]
    assert found["arms"]["cocoa-sig, sum"]["metrics"]["em"]["mean"] == pytest.approx(1 / 3)
    tables = report({"tasks": {"nq": found}})
    assert "| cocoa-sig, sum | 33.33 | +0.00 (+0.00 – +0.00) | 0.5000 |" in markdown(tables)
    for width, whole in ((160, "+0.00 (+0.00 – +0.00)"), (80, "0.5000")):
        console = Console(file=io.StringIO(), width=width, color_system=None)
        draw(tables, console)
        drawn = console.file.getvalue()  # type: ignore[attr-defined]
        assert whole in drawn
        assert "…" not in drawn
        assert "| ---" not in drawn
