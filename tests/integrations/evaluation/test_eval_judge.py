"""The LLM judge: its verdicts, what is no verdict, and FActScore.

The judges here are chat models that answer by rule: what is tested is what becomes of a reply, not how good a judge is.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cocoa_engine.cli import output
from cocoa_engine.errors import ConfigError
from cocoa_integrations.evaluation.harness import SAMPLES, new_run
from cocoa_integrations.evaluation.judge import Judge, factscore, factscore_report, factscore_run, judge_run
from cocoa_integrations.evaluation.prompts import QUESTIONS, facts_of, yes_or_no
from tests.helpers.cocoa import Cocoa, assert_refused, successful
from tests.helpers.eval_data import RUN_ARMS as ARMS
from tests.helpers.eval_data import TRUTHFULQA, rows_of, run_rows, run_settings, write_jsonl
from tests.helpers.judges import RuleJudge

CORRECT, WRONG = '{"verdict": "Correct"}', '```json\n{"verdict": "Wrong"}\n```'


def _of(prompt: str) -> str:
    """The answer that a prompt of ours asks about."""
    found = re.search(r"Candidate Answer to Evaluate: (.*?)\nEvaluation", prompt, re.DOTALL)
    return found[1] if found else re.findall(r"A: (.*?)\nIs the", prompt, re.DOTALL)[-1]


def _long_is_true(prompt: str) -> str:
    if "truthfulness" in prompt.split("\n")[0]:
        return CORRECT if len(_of(prompt)) % 2 else WRONG
    return "Yes" if len(_of(prompt)) % 3 else "No."


ANSWERS = {
    ("greedy", "0"): "Paris.",
    ("greedy", "1"): "Pigs can.",
    ("greedy", "2"): "It is flat.",
    (str(ARMS[1]), "0"): "Paris.",
    (str(ARMS[1]), "1"): "They can not.",
    (str(ARMS[1]), "2"): "Round",
}
QUESTIONS_ASKED = {str(number): question for number, (question, *_) in enumerate(TRUTHFULQA)}
DOCUMENTS = {"1": "Ann baked a cake on Monday.", "2": "Bob sold his car."}
SUMMARIES = {
    ("greedy", "1"): "Ann baked two cakes.",
    ("greedy", "2"): "Bob sold a car.",
    (str(ARMS[1]), "1"): "Ann baked.",
    (str(ARMS[1]), "2"): "",
}
REPLIES = {
    "Summary:\nAnn baked two cakes.": 'Here: ["Ann baked.", "There were two cakes.", "Ann baked."]',
    "Summary:\nBob sold a car.": '```json\n["Bob sold a car."]\n```',
    "Summary:\nAnn baked.": '["Ann baked."]',
    "Statement: Ann baked.": "Yes",
    "Statement: There were two cakes.": "no.",
    "Statement: Bob sold a car.": "Yes.",
}


def run_of(task: str, path: Path) -> Path:
    """The folder of a run of two arms: three questions, or summaries of two documents."""
    answers, texts = (ANSWERS, QUESTIONS_ASKED) if task == "truthfulqa_gen" else (SUMMARIES, DOCUMENTS)
    with new_run(path, run_settings(task)):
        write_jsonl(path / SAMPLES, run_rows(answers, texts))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_of("truthfulqa_gen", tmp_path / "run")


@pytest.fixture
def summaries(tmp_path: Path) -> Path:
    return run_of("samsum", tmp_path / "summaries")


def recording(replies: dict[str, str]) -> RuleJudge:
    """A judge whose reply is the last whose key is in a prompt."""

    def rule(prompt: str) -> str:
        reply = next(reply for key, reply in reversed(replies.items()) if key in prompt)
        if reply == "error":
            raise ValueError("status 500")
        return reply

    return RuleJudge(rule=rule, temperature=0.0)


@pytest.fixture
def recorded() -> RuleJudge:
    return recording(REPLIES)


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


@pytest.mark.parametrize("of_facts", [False, True])
def test_nothing_is_asked_twice(folder: Path, summaries: Path, recorded: RuleJudge, of_facts: bool) -> None:
    run, judge, name = judge_run, RuleJudge(rule=_long_is_true), "judgements.jsonl"
    if of_facts:
        run, judge, name, folder = factscore_run, recorded, "factscore.jsonl", summaries
    first = run(folder, judge)
    asked = len(judge.prompts)
    assert asked == len(set(judge.prompts)) == (6 if of_facts else 2 * 5)  # a text that both arms have is asked of once
    assert run(folder, judge) == first
    assert len(judge.prompts) == asked
    other = RuleJudge(rule=lambda prompt: "[]" if "Summary:" in prompt else "No" if "informative" in prompt else WRONG)
    by_other = run(folder, other, name="another judge")
    assert len(other.prompts) == (3 if of_facts else asked)  # another judge has verdicts of its own
    assert of_facts or by_other["arms"][0]["metrics"]["truth"]["mean"] == 0.0
    assert run(folder, judge) == first
    write_jsonl(folder / name, rows_of(folder, name)[:2])  # as after an interruption
    assert run(folder, judge)["arms"] == first["arms"]
    assert len(judge.prompts) == 2 * asked - 2


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


@pytest.mark.slow
def test_faults_and_time_outs_are_retried(folder: Path) -> None:
    unwritable = "\ud83d"
    long = ['{"verdict": ' * 5_000, '{"verdict": ' + "1" * 5000]
    faults = iter([RuntimeError("overloaded"), "sleep", unwritable, RuntimeError(unwritable), *long])

    def rule(prompt: str) -> str:
        fault = next(faults, None)
        if isinstance(fault, Exception):
            raise fault
        if fault == "sleep":
            time.sleep(2)
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

    def stopped(replies: Iterator[Any], total: int) -> Iterator[Any]:
        for lines in replies:
            yield lines
            if len(calls) >= 3:
                raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        judge_run(folder, RuleJudge(rule=rule), concurrency=2, track=stopped)
    assert time.monotonic() - start < 30
    release.set()
    kept = rows_of(folder, "judgements.jsonl")
    with (folder / "judgements.jsonl").open("a") as file:
        file.write('{"key": "torn')
    done: list[int] = []
    results = judge_run(folder, RuleJudge(rule=_long_is_true), track=lambda lines, total: done.append(total) or lines)
    distinct = {(row["question"], row["answer"]) for row in rows_of(folder)}
    assert kept
    assert done == [2 * len(distinct) - len(kept)]
    assert all(arm["unjudged"] == 0 for arm in results["arms"])


def test_verdicts_of_each_prompt() -> None:
    (summary,), (grounded,) = QUESTIONS["xsum"], QUESTIONS["nq"]
    reasoned = 'Let me see: {so}.\n```json\n{"thinking_and_reasoning": "a, b", "evaluation": "Correct",\n}\n```'
    for prompt, reply, verdict in (
        (summary, '{"reasoning_process": [], "final_verdict": "Not Hallucination"}', True),
        (summary, '{"final_verdict": "Hallucination"}', False),
        (grounded, '```json\n{"evaluation": "Incorrect"}\n```', False),
        (grounded, '{"evaluation": "Correct"}', True),
        (grounded, '{"evaluation": "Correct"', None),
        (grounded, reasoned, True),  # with the comma of the prompt's own example
        (grounded, '{"evaluation": "Correct"} or {"evaluation": "Incorrect"}', None),
        (grounded, '{"evaluation": "Correct"} or {"evaluation": "perhaps"}', None),
    ):
        assert prompt.verdict(reply) is verdict
    row = {"question": "q?", "answer": "$5", "references": ["a", "b"], "incorrect": [], "context": "the passage"}
    assert "Context: the passage\nQuestion: q?\nGround_Truth_Answer: a; b\nModel_Response: $5\n" in grounded.prompt(row)
    assert summary.prompt(row).endswith("<summary_to_evaluate> $5 </summary_to_evaluate>\n")


NAMES = {
    "truthfulqa_gen": ["truth", "info"],
    **{task: ["summary"] for task in ("samsum", "xsum")},
    **{task: ["grounded"] for task in ("nq", "nq_swap")},
}
PLACES = {"correct_answers": "references", "incorrect_answers": "incorrect", "ground_truth": "references"}
PLACES |= dict.fromkeys(("candidate_answer", "summary", "response"), "answer")
"""The names in a row of what is filled in, by those that the paper writes."""


@pytest.mark.parametrize("task", NAMES)
def test_prompts_are_the_papers_word_by_word(task: str) -> None:
    """Against what its appendix prints, line by line; its examples in context, which it does not print, aside."""
    row: dict[str, Any] = {name: f"{{{name}}}" for name in ("question", "context", "answer")}
    row |= {name: [f"{{{name}}}"] for name in ("references", "incorrect")}
    for asked, name in zip(QUESTIONS[task], NAMES[task], strict=True):
        printed = (Path(__file__).parent / "judge_prompts" / f"{name}.txt").read_text(encoding="utf-8")
        printed = re.sub(r"\{(\w+)\}", lambda place: f"{{{PLACES.get(place[1], place[1])}}}", printed)
        assert [line for line in asked.prompt(row).splitlines() if line] == printed.splitlines()


def test_bad_requests(folder: Path, summaries: Path, tmp_path: Path, recorded: RuleJudge) -> None:
    judge = RuleJudge(rule=_long_is_true)
    with pytest.raises(ConfigError, match="contains no run"):
        judge_run(tmp_path / "none", judge)
    with pytest.raises(ConfigError, match="temperature=0"):
        judge_run(folder, RuleJudge(rule=_long_is_true, temperature=0.7))
    settings = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps({**settings, "task": "mbpp"}))
    with pytest.raises(ConfigError, match="mbpp needs no judge"):
        judge_run(folder, judge)
    with pytest.raises(ConfigError, match="samsum and xsum, not for mbpp"):
        factscore_run(folder, recorded)
    for gamma in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="gamma must be above 0"):
            factscore_run(summaries, recorded, gamma=gamma)
    assert not recorded.prompts
    assert not (summaries / "factscore.jsonl").exists()


@pytest.mark.parametrize("of_facts", [False, True])
def test_command(
    summaries: Path, recorded: RuleJudge, cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch, of_facts: bool
) -> None:
    options, file, words = (), "judged.md", "Judge: openai:gpt-4o."
    if of_facts:
        options, file, words = ("--factscore", "--gamma", "10"), "factscore.md", f"{words} FActScore with the length"
    unknown = cocoa("judge", summaries, "--judge", "nobody:model", *options)
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (2, 1)
    assert "nobody" in unknown.stderr
    assert not (summaries / file).exists()
    asked: list[tuple[str, Any]] = []

    def made(name: str, **settings: Any) -> RuleJudge:
        asked.append((name, settings))
        return recorded if of_facts else RuleJudge(rule=lambda _: '{"final_verdict": "Hallucination"}', temperature=0.0)

    monkeypatch.setattr("langchain.chat_models.init_chat_model", made)
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.0)
    shown = successful(cocoa("judge", summaries, "--judge", "openai:gpt-4o", *options))
    assert asked == [("openai:gpt-4o", {"temperature": 0.0})]
    assert shown.stdout == (summaries / file).read_text()
    assert words in shown.stdout
    assert all(
        re.search(rf"^judge: \d+ of \d+ {unit}, ", shown.stderr, re.MULTILINE)
        for unit in ("summaries", "facts")
        if of_facts
    )
    assert_refused(cocoa("judge", summaries, "--judge", "openai:gpt-4o", "--gamma", "10"), "--factscore")


def test_the_verdict_about_each_answer_is_in_the_results(folder: Path) -> None:
    answers = [row["answer"] if number else "" for number, row in enumerate(rows_of(folder))]
    write_jsonl(
        folder / SAMPLES, [{**row, "answer": answer} for row, answer in zip(rows_of(folder), answers, strict=True)]
    )
    judge_run(folder, RuleJudge(rule=_long_is_true))
    verdicts = json.loads((folder / "judged.json").read_text())["verdicts"]
    assert [(row["arm"], row["id"]) for row in verdicts] == [(row["arm"], row["id"]) for row in rows_of(folder)]
    assert [row["truth"] for row in verdicts] == [None, *(len(answer) % 2 == 1 for answer in answers[1:])]
    assert [row["info"] for row in verdicts] == [None, *(len(answer) % 3 > 0 for answer in answers[1:])]


@pytest.mark.parametrize("usage", [None, 3, [], {"input_tokens": None}, {"input_tokens": "x", "output_tokens": [1]}])
def test_a_verdict_counts_whatever_its_provider_says_of_tokens(usage: object) -> None:
    reply = SimpleNamespace(text="yes", usage_metadata=usage)
    judge = Judge(cast(Any, SimpleNamespace(temperature=0, invoke=lambda prompt: reply)), "judge", attempts=1)
    [[line]] = judge.replies([judge.asked("Is it?", yes_or_no)])
    assert (line["verdict"], line["tokens"]) == (True, None)


# --- FActScore


def test_the_share_of_facts_that_the_document_supports(summaries: Path, recorded: RuleJudge) -> None:
    results = factscore_run(summaries, recorded)
    greedy, cocoa = results["arms"]
    assert greedy["metrics"]["factscore"]["mean"] == pytest.approx((1 / 2 + 1) / 2)
    assert greedy["metrics"]["facts"]["mean"] == 1.5
    assert (cocoa["metrics"]["factscore"]["mean"], cocoa["without_facts"], cocoa["unjudged"]) == (1.0, 1, 0)
    assert cocoa["metrics"]["factscore"]["difference"]["estimate"] == 0.5  # of the one summary that both have
    assert json.loads((summaries / "factscore.json").read_text()) == results
    read = sum(len(prompt.split()) for prompt in recorded.prompts)
    written = sum(len(line["reply"].split()) for line in rows_of(summaries, "factscore.jsonl"))
    assert results["cost"] == {"calls": 6, "without_verdict": 0, "input_tokens": read, "output_tokens": written}
    shown = (summaries / "factscore.md").read_text()
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


def test_errors_are_kept_and_asked_again(summaries: Path, recorded: RuleJudge) -> None:
    faults = {"Statement: There were two cakes.": "error", "Summary:\nBob sold a car.": "I cannot do that."}
    results = factscore_run(summaries, recording(REPLIES | faults), attempts=2)
    greedy = results["arms"][0]
    assert (greedy["unjudged"], greedy["metrics"]["factscore"]["mean"]) == (2, None)
    assert results["cost"]["without_verdict"] == 4
    errors = [line for line in rows_of(summaries, "factscore.jsonl") if line["error"]]
    kinds = ["ValueError: status 500"] * 2 + ["no verdict in the reply"] * 2
    assert sorted(line["error"] for line in errors) == kinds
    assert {line["reply"] for line in errors} == {None, "I cannot do that."}
    assert (
        "Summaries without all verdicts, which are left out of the means: 2" in (summaries / "factscore.md").read_text()
    )
    mended = factscore_run(summaries, recorded)
    assert mended["arms"][0]["metrics"]["factscore"]["mean"] == 0.75
    assert mended["cost"]["without_verdict"] == 4


def test_the_length_penalty_is_that_of_the_papers_code(summaries: Path, recorded: RuleJudge) -> None:
    assert factscore([True, True, False]) == pytest.approx(2 / 3)
    assert factscore([True, True, False], gamma=10) == pytest.approx(2 / 3 * math.exp(1 - 10 / 3))
    assert factscore([True] * 10, gamma=10) == 1.0
    assert factscore([True] * 5 + [False] * 6, gamma=10) == 5 / 11
    results = factscore_run(summaries, recorded, gamma=10)
    expected = (0.5 * math.exp(1 - 10 / 2) + math.exp(1 - 10)) / 2
    assert results["arms"][0]["metrics"]["factscore"]["mean"] == pytest.approx(expected)
    assert "FActScore with the length penalty of gamma = 10." in (summaries / "factscore.md").read_text()


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
