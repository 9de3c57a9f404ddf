"""FActScore: what becomes of a judge's replies, which are recorded."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cocoa_engine import CocoaConfig
from cocoa_engine.cli import progress
from cocoa_engine.cli.app import app
from cocoa_engine.errors import ConfigError
from cocoa_integrations.evaluation.files import json_lines
from cocoa_integrations.evaluation.harness import SAMPLES, new_run
from cocoa_integrations.evaluation.judge import factscore, factscore_report, factscore_run
from cocoa_integrations.evaluation.prompts import facts_of
from tests.helpers.eval_data import rows_of
from tests.helpers.judges import RuleJudge

DOCUMENTS = {"1": "Ann baked a cake on Monday.", "2": "Bob sold his car."}
SUMMARIES = {
    ("greedy", "1"): "Ann baked two cakes.",
    ("greedy", "2"): "Bob sold a car.",
    ("cocoa-sig fMLDS (α=2.5)", "1"): "Ann baked.",
    ("cocoa-sig fMLDS (α=2.5)", "2"): "",
}
ANSWERS = {
    "Summary:\nAnn baked two cakes.": 'Here: ["Ann baked.", "There were two cakes.", "Ann baked."]',
    "Summary:\nBob sold a car.": '```json\n["Bob sold a car."]\n```',
    "Summary:\nAnn baked.": '["Ann baked."]',
    "Statement: Ann baked.": "Yes",
    "Statement: There were two cakes.": "no.",
    "Statement: Bob sold a car.": "Yes.",
}


def judge(answers: dict[str, str]) -> RuleJudge:
    """Its replies are the last whose key is in a prompt."""

    def rule(prompt: str) -> str:
        reply = next(reply for key, reply in reversed(answers.items()) if key in prompt)
        if reply == "error":
            raise ValueError("status 500")
        return reply

    return RuleJudge(rule=rule, temperature=0.0)


@pytest.fixture
def recorded() -> RuleJudge:
    return judge(ANSWERS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two methods on two documents."""
    return run_of("samsum", tmp_path / "run")


def run_of(task: str, path: Path) -> Path:
    decoding = CocoaConfig().model_dump(mode="json", exclude={"method", "metric", "alpha"})
    settings = {"task": task, "model": {"name": "tiny"}, "decoding": decoding, "limit": None}
    rows = []
    for (arm, key), answer in SUMMARIES.items():
        penalty = {"metric": None, "alpha": None} if arm == "greedy" else {"metric": "f_mlds", "alpha": 2.5}
        row = {"arm": arm, "id": key, "method": arm.split()[0], **penalty, "sample": key, "question": DOCUMENTS[key]}
        row |= {"context": DOCUMENTS[key], "references": ["A reference."], "incorrect": [], "answer": answer}
        rows.append({**row, "metrics": {"rouge_l": 0.5}})
    with new_run(path, settings):
        (path / SAMPLES).write_text(json_lines(rows), encoding="utf-8")
    return path


def test_the_share_of_facts_that_the_document_supports(folder: Path, recorded: RuleJudge) -> None:
    results = factscore_run(folder, recorded)
    greedy, cocoa = results["arms"]
    assert greedy["metrics"]["factscore"]["mean"] == pytest.approx((1 / 2 + 1) / 2)
    assert greedy["metrics"]["facts"]["mean"] == 1.5
    assert (cocoa["metrics"]["factscore"]["mean"], cocoa["without_facts"], cocoa["unjudged"]) == (1.0, 1, 0)
    assert cocoa["metrics"]["factscore"]["difference"]["estimate"] == 0.5  # of the one summary that both have
    assert json.loads((folder / "factscore.json").read_text()) == results
    read = sum(len(prompt.split()) for prompt in recorded.prompts)
    written = sum(len(line["reply"].split()) for line in rows_of(folder, "factscore.jsonl"))
    assert results["cost"] == {"calls": 6, "without_verdict": 0, "input_tokens": read, "output_tokens": written}
    shown = (folder / "factscore.md").read_text()
    assert shown == factscore_report(results)
    assert f"Calls of the judge: 6, 0 of them without a verdict; {read} tokens read and {written} written." in shown
    assert "| Baseline (greedy) | - | 75.00 ± 25.00 | 1.50 ± 0.50 | 0 |" in shown
    assert "Summaries empty or without a fact, which are left out of the means: 1 across all arms." in shown
    # three summaries, and three facts: "Ann baked." is checked once for both methods
    prompts = recorded.prompts
    assert len(prompts) == len(set(prompts)) == 6
    checks = [prompt for prompt in prompts if "Statement: " in prompt]
    assert all(DOCUMENTS["2" if "Bob" in prompt else "1"] in prompt for prompt in checks)
    assert not any(document in prompt for prompt in prompts if prompt not in checks for document in DOCUMENTS.values())


def test_nothing_is_asked_twice(folder: Path, recorded: RuleJudge) -> None:
    first = factscore_run(folder, recorded)
    asked = len(recorded.prompts)
    assert factscore_run(folder, recorded) == first
    assert len(recorded.prompts) == asked
    lines = rows_of(folder, "factscore.jsonl")
    kept = lines[:2]  # as after an interruption
    (folder / "factscore.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    again = factscore_run(folder, recorded)
    assert again["arms"] == first["arms"]
    assert len(recorded.prompts) == asked + 4


def test_errors_are_kept_and_asked_again(folder: Path, recorded: RuleJudge) -> None:
    faults = {"Statement: There were two cakes.": "error", "Summary:\nBob sold a car.": "I cannot do that."}
    results = factscore_run(folder, judge(ANSWERS | faults), attempts=2)
    greedy = results["arms"][0]
    assert (greedy["unjudged"], greedy["metrics"]["factscore"]["mean"]) == (2, None)
    assert results["cost"]["without_verdict"] == 4
    errors = [line for line in rows_of(folder, "factscore.jsonl") if line["error"]]
    kinds = ["ValueError: status 500"] * 2 + ["no verdict in the reply"] * 2
    assert sorted(line["error"] for line in errors) == kinds
    assert {line["reply"] for line in errors} == {None, "I cannot do that."}
    assert "Summaries without all verdicts, which are left out of the means: 2" in (folder / "factscore.md").read_text()
    mended = factscore_run(folder, recorded)
    assert mended["arms"][0]["metrics"]["factscore"]["mean"] == 0.75
    assert mended["cost"]["without_verdict"] == 4


def test_the_length_penalty_is_that_of_the_papers_code(folder: Path, recorded: RuleJudge) -> None:
    assert factscore([True, True, False]) == pytest.approx(2 / 3)
    assert factscore([True, True, False], gamma=10) == pytest.approx(2 / 3 * math.exp(1 - 10 / 3))
    assert factscore([True] * 10, gamma=10) == 1.0
    assert factscore([True] * 5 + [False] * 6, gamma=10) == 5 / 11
    results = factscore_run(folder, recorded, gamma=10)
    expected = (0.5 * math.exp(1 - 10 / 2) + math.exp(1 - 10)) / 2
    assert results["arms"][0]["metrics"]["factscore"]["mean"] == pytest.approx(expected)
    assert "FActScore with the length penalty of gamma = 10." in (folder / "factscore.md").read_text()


@pytest.mark.parametrize(
    ("reply", "facts"),
    [
        ('["A.", "B."]', ["A.", "B."]),
        ('Of [1]: ["A."]', ["A."]),
        ("[]", []),
        ('["A.", ""]', None),
        ('{"facts": "A."}', None),
        ('["A."', None),
        ("None.", None),
    ],
)
def test_facts_in_a_reply(reply: str, facts: list[str] | None) -> None:
    assert facts_of(reply) == facts


def test_refused(folder: Path, tmp_path: Path, recorded: RuleJudge) -> None:
    with pytest.raises(ConfigError, match="samsum and xsum, not for nq"):
        factscore_run(run_of("nq", tmp_path / "nq"), recorded)
    for gamma in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="gamma must be above 0"):
            factscore_run(folder, recorded, gamma=gamma)
    assert not recorded.prompts
    assert not (folder / "factscore.jsonl").exists()


def test_command(folder: Path, recorded: RuleJudge, entry_point: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(entry_point))
    monkeypatch.setattr("langchain.chat_models.init_chat_model", lambda name, **_: recorded)

    def cocoa(*options: str) -> Any:
        return CliRunner().invoke(app, ["judge", str(folder), "--judge", "openai:recorded", *options])

    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    shown = cocoa("--factscore", "--gamma", "10")
    assert shown.exit_code == 0, shown.output
    for unit in ("summaries", "facts"):
        assert re.search(rf"^judge: \d+ of \d+ {unit}, ", shown.stderr, re.MULTILINE)
    assert shown.stdout == (folder / "factscore.md").read_text()
    assert "Judge: openai:recorded. FActScore with the length penalty" in shown.stdout
    for options, message in ((("--gamma", "10"), "--factscore"), (("--factscore", "--labels", "x.csv"), "--labels")):
        refused = cocoa(*options)
        assert refused.exit_code == 2
        assert message in refused.stderr
