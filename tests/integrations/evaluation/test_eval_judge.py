"""The LLM judge: its verdicts, what is no verdict, what it is not asked again, and how far it agrees with people.

The judges here are chat models that answer by rule: what is tested is what becomes of a reply, not how good a judge is.
"""

from __future__ import annotations

import csv
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sklearn.metrics import cohen_kappa_score
from typer.testing import Result

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_engine.errors import ConfigError, DataError
from cocoa_integrations.evaluation import TASKS, Arm, evaluate, load_samples
from cocoa_integrations.evaluation.agreement import agreement, in_words, read_labels
from cocoa_integrations.evaluation.judge import Judge, judge_run
from cocoa_integrations.evaluation.prompts import QUESTIONS, yes_or_no
from tests.helpers.eval_data import rows_of, write_truthfulqa
from tests.helpers.judges import RuleJudge

ARMS = [Arm("greedy"), Arm("cocoa-sig", "f_mlds", 2.5)]
CORRECT, WRONG = '{"verdict": "Correct"}', '```json\n{"verdict": "Wrong"}\n```'


def _of(prompt: str) -> str:
    """The answer that a prompt of ours asks about."""
    found = re.search(r"Candidate Answer to Evaluate: (.*?)\nEvaluation", prompt, re.DOTALL)
    return found[1] if found else re.findall(r"A: (.*?)\nIs the", prompt, re.DOTALL)[-1]


def _long_is_true(prompt: str) -> str:
    if "truthfulness" in prompt.split("\n")[0]:
        return CORRECT if len(_of(prompt)) % 2 else WRONG
    return "Yes" if len(_of(prompt)) % 3 else "No."


@pytest.fixture(scope="module")
def finished(engine: CocoaEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    samples = load_samples("truthfulqa_gen", write_truthfulqa(folder / "data.csv"))
    config = CocoaConfig(max_new_tokens=10)
    evaluate(engine, TASKS["truthfulqa_gen"], samples, ARMS, folder / "out", config=config)
    return folder / "out"


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A run of two arms on three questions, its own copy."""
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("settings.json", "samples.jsonl"):
        (copy / name).write_bytes((finished / name).read_bytes())
    return copy


def test_verdicts_become_the_papers_figures(folder: Path) -> None:
    judge = RuleJudge(rule=_long_is_true)
    results = judge_run(folder, judge)
    for number, arm in enumerate(ARMS):
        rows = [row for row in rows_of(folder) if row["arm"] == str(arm)]
        truth = sum(len(row["answer"]) % 2 == 1 for row in rows) / 3
        info = sum(len(row["answer"]) % 3 > 0 for row in rows) / 3
        figures = {name: figure["mean"] for name, figure in results["arms"][number]["metrics"].items()}
        assert figures["truth"] == pytest.approx(truth)
        assert figures["info"] == pytest.approx(info)
        assert figures["truth_and_info"] == pytest.approx(truth * info)
        assert results["arms"][number]["unjudged"] == 0
    assert json.loads((folder / "judged.json").read_text()) == results
    table = (folder / "judged.md").read_text()
    assert "| Truth. (%) ↑ | Info. (%) ↑ | Rej. rate (%) ↓ | T×I (%) ↑ |" in table
    assert "| 66.00 | 57.28 | 13.50 | 37.81 | 60.69 | 65.92 | 40.01 |" in table  # the paper's baseline
    assert all(options["temperature"] == 0.0 for options in judge.options)


def test_what_was_judged_is_not_asked_again(folder: Path) -> None:
    judge = RuleJudge(rule=_long_is_true)
    first = judge_run(folder, judge)
    distinct = {(row["question"], row["answer"]) for row in rows_of(folder)}
    assert len(judge.prompts) == len(set(judge.prompts)) == 2 * len(distinct)
    asked = len(judge.prompts)
    assert judge_run(folder, judge) == first
    assert len(judge.prompts) == asked
    other = RuleJudge(rule=lambda prompt: "No" if "informativeness" in prompt else WRONG)
    assert judge_run(folder, other, name="another judge")["arms"][0]["metrics"]["truth"]["mean"] == 0.0
    assert len(other.prompts) == asked  # another judge has verdicts of its own
    assert judge_run(folder, judge) == first


@pytest.mark.parametrize("rubbish", ["", "I think it is Correct.", '{"verdict": "Maybe"}', '{"verdict": true}', "[]"])
def test_rubbish_is_kept_retried_and_never_true(folder: Path, rubbish: str) -> None:
    judge = RuleJudge(rule=lambda _: rubbish)
    results = judge_run(folder, judge, attempts=2)
    distinct = {(row["question"], row["answer"]) for row in rows_of(folder)}
    assert len(judge.prompts) == 2 * 2 * len(distinct)
    for arm in results["arms"]:
        assert arm["unjudged"] == 3
        assert arm["metrics"]["truth"]["mean"] == arm["metrics"]["info"]["mean"] == 0.0
    lines = rows_of(folder, "judgements.jsonl")
    assert [line["reply"] for line in lines] == [rubbish] * len(judge.prompts)
    assert {line["error"] for line in lines} == {"no verdict in the reply"}
    assert "count as neither true nor informative: 6" in (folder / "judged.md").read_text()
    assert judge_run(folder, RuleJudge(rule=_long_is_true))["arms"][0]["unjudged"] == 0  # asked again, and answered


def test_faults_and_time_outs_are_retried(folder: Path) -> None:
    unwritable = "\ud83d"
    long = ['{"verdict": ' * 5_000, '{"verdict": ' + "1" * 5000]
    faults = iter([RuntimeError("overloaded"), "sleep", unwritable, RuntimeError(unwritable), *long])

    def rule(prompt: str) -> str:
        fault = next(faults, None)
        if isinstance(fault, Exception):
            raise fault
        if fault == "sleep":
            time.sleep(3)
        return fault or _long_is_true(prompt)

    results = judge_run(folder, RuleJudge(rule=rule), timeout=1.0, concurrency=1, attempts=7)
    assert all(arm["unjudged"] == 0 for arm in results["arms"])
    errors = [line["error"] for line in rows_of(folder, "judgements.jsonl") if line["error"]]
    assert errors[:2] == ["RuntimeError: overloaded", "no reply within 1 s"]
    assert errors[2].startswith("UnicodeEncodeError")
    assert errors[3:] == [r"RuntimeError: \ud83d", "no verdict in the reply", "no verdict in the reply"]


def test_a_stopped_judging_goes_on_and_does_not_wait_for_a_judge_that_hangs(folder: Path) -> None:
    release, calls = threading.Event(), list[str]()

    def rule(prompt: str) -> str:
        calls.append(prompt)
        if "informativeness" in prompt and len(calls) > 3:
            release.wait(60)
        return _long_is_true(prompt)

    def stop(_: int) -> None:
        if len(calls) >= 3:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        judge_run(folder, RuleJudge(rule=rule), concurrency=2, advance=stop)
    assert time.monotonic() - start < 30
    release.set()
    kept = rows_of(folder, "judgements.jsonl")
    with (folder / "judgements.jsonl").open("a") as file:
        file.write('{"key": "torn')
    done: list[int] = []
    results = judge_run(folder, RuleJudge(rule=_long_is_true), begin=done.append)
    distinct = {(row["question"], row["answer"]) for row in rows_of(folder)}
    assert kept
    assert done == [2 * len(distinct) - len(kept)]
    assert all(arm["unjudged"] == 0 for arm in results["arms"])


def test_verdicts_of_each_prompt() -> None:
    (summary,), (grounded,) = QUESTIONS["xsum"], QUESTIONS["nq"]
    assert summary.verdict('{"reasoning_process": [], "final_verdict": "Not Hallucination"}') is True
    assert summary.verdict('{"final_verdict": "Hallucination"}') is False
    assert grounded.verdict('```json\n{"evaluation": "Incorrect"}\n```') is False
    assert grounded.verdict('{"evaluation": "Correct"}') is True
    assert grounded.verdict('{"evaluation": "Correct"') is None
    reasoned = 'Let me see: {so}.\n```json\n{"thinking_and_reasoning": "a, b", "evaluation": "Correct",\n}\n```'
    assert grounded.verdict(reasoned) is True  # with the comma of the prompt's own example
    assert grounded.verdict('{"evaluation": "Correct"} or {"evaluation": "Incorrect"}') is None
    assert grounded.verdict('{"evaluation": "Correct"} or {"evaluation": "perhaps"}') is None
    row = {"question": "q?", "answer": "$5", "references": ["a", "b"], "incorrect": [], "context": "the passage"}
    assert "Context: the passage\nQuestion: q?\nGround_Truth_Answer: a; b\nModel_Response: $5\n" in grounded.prompt(row)
    assert summary.prompt(row).endswith("<summary_to_evaluate> $5 </summary_to_evaluate>\n")


PLACES: dict[str, dict[str, Any]] = {  # of what is filled in, by prompt, as the paper writes them
    "truth": {
        "references": ["{correct_answers}"],
        "incorrect": ["{incorrect_answers}"],
        "answer": "{candidate_answer}",
    },
    "info": {"answer": "{answer}"},
    "summary": {"answer": "{summary}"},
    "grounded": {"references": ["{ground_truth}"], "answer": "{response}"},
}
NAMES = {
    "truthfulqa_gen": ["truth", "info"],
    **{task: ["summary"] for task in ("samsum", "xsum")},
    **{task: ["grounded"] for task in ("nq", "nq_swap")},
}


@pytest.mark.parametrize("task", NAMES)
def test_prompts_are_the_papers_word_by_word(task: str) -> None:
    """Against what its appendix prints, line by line; its examples in context, which it does not print, aside."""
    row = {"question": "{question}", "context": "{context}", "references": [], "incorrect": []}
    for asked, name in zip(QUESTIONS[task], NAMES[task], strict=True):
        printed = (Path(__file__).parent / "judge_prompts" / f"{name}.txt").read_text(encoding="utf-8")
        lines = asked.prompt({**row, **PLACES[name]}).splitlines()
        assert [line for line in lines if line] == printed.splitlines()


def test_bad_requests(folder: Path, tmp_path: Path) -> None:
    judge = RuleJudge(rule=_long_is_true)
    with pytest.raises(ConfigError, match="contains no run"):
        judge_run(tmp_path / "none", judge)
    with pytest.raises(ConfigError, match="temperature=0"):
        judge_run(folder, RuleJudge(rule=_long_is_true, temperature=0.7))
    settings = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps({**settings, "task": "mbpp"}))
    with pytest.raises(ConfigError, match="mbpp needs no judge"):
        judge_run(folder, judge)


def test_command_with_an_unknown_judge(folder: Path, cocoa: Callable[..., Result]) -> None:
    shown = cocoa("judge", folder, "--judge", "nobody:model")
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)
    assert "nobody" in shown.stderr
    assert not (folder / "judged.md").exists()


def test_command(folder: Path, cocoa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def made(name: str, **options: Any) -> RuleJudge:
        asked.append((name, options))
        return RuleJudge(rule=_long_is_true, temperature=0.0)

    monkeypatch.setattr("langchain.chat_models.init_chat_model", made)
    shown = cocoa("judge", folder, "--judge", "openai:gpt-4o")
    assert shown.exit_code == 0, shown.output
    assert asked == [("openai:gpt-4o", {"temperature": 0.0})]
    assert shown.stdout == (folder / "judged.md").read_text()
    assert "Judge: openai:gpt-4o." in shown.stdout


def write_labels(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_agreement(tmp_path: Path) -> None:
    judge = [True, True, True, False, False, False, True, False, None]
    first = ["1", "true", "Yes", "0", "wrong", "1", "0", "", "1"]
    second = ["1", "1", "0", "0", "0", "1", "0", "0", "1"]
    judged = {("greedy", str(n)): verdict for n, verdict in enumerate(judge)}
    pairs = enumerate(zip(first, second, strict=True))
    rows = [{"arm": "greedy", "id": str(n), "ann": one, "bob": two} for n, (one, two) in pairs]
    people = read_labels(write_labels(tmp_path / "labels.csv", rows), judged, ["truth"])
    assert list(people) == ["truth"]
    found = agreement(judged, people["truth"])
    # ann: 7 in common, 5 alike; she says true 4, the judge 4: p_e = (4*4 + 3*3) / 49
    ann = (5 / 7 - 25 / 49) / (1 - 25 / 49)
    # bob: 8 in common, 5 alike (0, 1, 3, 4, 7); he says true 3, the judge 4: p_e = (3*4 + 5*4) / 64
    bob = (5 / 8 - 1 / 2) / (1 - 1 / 2)
    # each other: 8 in common (0..6, 8), 7 alike; ann says true 5, bob 4: p_e = (5*4 + 3*4) / 64
    both = (7 / 8 - 1 / 2) / (1 - 1 / 2)
    assert found["judge"] == {
        "ann": {"kappa": pytest.approx(ann), "pairs": 7},
        "bob": {"kappa": pytest.approx(bob), "pairs": 8},
    }
    assert found["people"] == {"ann, bob": {"kappa": pytest.approx(both), "pairs": 8}}
    assert found["mean_people"] == pytest.approx(both)
    assert found["mean_judge"] == pytest.approx((ann + bob) / 2)
    assert found["ratio"] == pytest.approx((ann + bob) / 2 / both)
    assert found["labelled"] == {"ann": 8, "bob": 9}
    words = in_words(found, "truth")
    assert words.startswith("Cohen's kappa, about truth:\n")
    assert f"- judge and ann: {ann:.3f} (labels in common: 7)\n" in words
    assert "- ann, bob: 0.750 (labels in common: 8)\n" in words


def test_labels_of_a_run(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"arm": row["arm"], "id": row["id"], "ann": str(len(row["answer"]) % 2), "bob:info": str(number % 2)}
        for number, row in enumerate(rows_of(folder))
    ]
    rows[-1]["bob:info"] = ""
    labels = write_labels(tmp_path / "labels.csv", rows)
    results = judge_run(folder, RuleJudge(rule=_long_is_true), labels=labels)
    alike = len({row["ann"] for row in rows}) == 1
    kappa = None if alike else pytest.approx(1.0)
    assert results["agreement"]["truth"]["judge"] == {"ann": {"kappa": kappa, "pairs": len(rows)}}
    informative = {(row["arm"], row["id"]): row["bob:info"] == "1" for row in rows[:-1]}
    judged = [len(row["answer"]) % 3 > 0 for row in rows_of(folder)[:-1]]
    by_bob = results["agreement"]["info"]["judge"]["bob"]
    assert by_bob["pairs"] == len(rows) - 1
    assert by_bob["kappa"] == pytest.approx(cohen_kappa_score(judged, list(informative.values())))
    shown = (folder / "judged.md").read_text()
    assert f"- judge and ann: {'not' if alike else '1.000'}" in shown.split("about truth:")[1]
    assert f"- judge and bob: {by_bob['kappa']:.3f}" in shown.split("about informativeness:")[1]


def test_an_empty_answer_has_labels_but_no_verdict(folder: Path, tmp_path: Path) -> None:
    rows = rows_of(folder)
    rows[0]["answer"] = ""
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels = [{"arm": row["arm"], "id": row["id"], "ann": "1"} for row in rows]
    results = judge_run(folder, RuleJudge(rule=_long_is_true), labels=write_labels(tmp_path / "labels.csv", labels))
    found = results["agreement"]["truth"]
    assert found["labelled"] == {"ann": len(rows)}
    assert found["judge"]["ann"]["pairs"] == len(rows) - 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"ann": "perhaps"}], "line 2: the label 'perhaps' of 'ann' is neither true nor false"),
        ([{"id": "77", "ann": "1"}], "line 2: the run has no sample '77' of the arm 'greedy'"),
        ([{"ann": "1"}, {"id": "1", "ann": "1"}, {"ann": "0"}], "line 4: the answer '0' of 'greedy' already has"),
        ([{"ann": ""}], "contains no labels"),
        ([{"ann:style": "1"}], "the column 'ann:style'; answers are judged by truth, info"),
        ([{":info": "1"}], "the column ':info'; answers are judged by"),
        ([{"ann": "1", "ann: truth": "1"}], "two columns contain the labels of 'ann' about truth"),
    ],
)
def test_bad_labels_are_refused_before_judging(
    folder: Path, tmp_path: Path, rows: list[dict[str, str]], message: str
) -> None:
    judge = RuleJudge(rule=_long_is_true)
    labels = write_labels(tmp_path / "bad.csv", [{"arm": "greedy", "id": "0", **row} for row in rows])
    with pytest.raises(DataError, match=message):
        judge_run(folder, judge, labels=labels)
    assert not judge.prompts


@pytest.mark.parametrize("usage", [None, 3, [], {"input_tokens": None}, {"input_tokens": "x", "output_tokens": [1]}])
def test_a_verdict_counts_whatever_its_provider_says_of_tokens(usage: object) -> None:
    reply = SimpleNamespace(text="yes", usage_metadata=usage)
    judge = Judge(cast(Any, SimpleNamespace(temperature=0, invoke=lambda prompt: reply)), "judge", attempts=1)
    [[line]] = judge.replies([judge.asked("Is it?", yes_or_no)])
    assert (line["verdict"], line["tokens"]) == (True, None)
