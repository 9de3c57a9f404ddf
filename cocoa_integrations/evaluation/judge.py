"""An LLM judge for the answers of a run: any LangChain chat model, with the paper's prompts.

Every reply is stored in ``judgements.jsonl`` in the folder of the run. A prompt for which the judge has given a verdict
is not sent again. Replies without a verdict, errors and time-outs are stored too, and their prompts are sent again. An
answer without a verdict never counts as true or informative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine.errors import ConfigError
from cocoa_engine.output_files import write_file
from cocoa_integrations.evaluation.agreement import agreement, in_words, read_labels
from cocoa_integrations.evaluation.files import append_lines
from cocoa_integrations.evaluation.judge_calls import Asked, Asking, cost, read_replies, verdicts_of
from cocoa_integrations.evaluation.judge_calls import in_words as cost_in_words
from cocoa_integrations.evaluation.judge_prompts import QUESTIONS
from cocoa_integrations.evaluation.samples import Rows, finished_run
from cocoa_integrations.evaluation.statistics import statistics
from cocoa_integrations.evaluation.table import report
from cocoa_integrations.evaluation.table_text import Report, markdown
from cocoa_integrations.evaluation.tasks import TASKS, Column

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

JUDGEMENTS, JUDGED, JUDGED_TABLE = "judgements.jsonl", "judged.json", "judged.md"

TRUTH, _INFO = Column("truth", "Truth. (%)"), Column("info", "Info. (%)")
"""The first is the column of tasks that are not in :data:`COLUMNS`."""

COLUMNS = {
    "truthfulqa_gen": (
        TRUTH,
        _INFO,
        Column("rejected", "Rej. rate (%)", better="less"),
        Column("truth_and_info", "T×I (%)"),
        Column("truth_kept", "Truth. (%), not rejected"),
        Column("info_kept", "Info. (%), not rejected"),
        Column("truth_and_info_kept", "T×I (%), not rejected"),
    )
}


def judge_run(
    folder: str | Path,
    judge: BaseChatModel,
    *,
    name: str | None = None,
    labels: str | Path | None = None,
    attempts: int = 3,
    timeout: float = 120.0,
    concurrency: int = 4,
    paper_model: str | None = None,
    begin: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Judge every answer of a run. Stored verdicts are reused.

    Writes ``judged.json`` and ``judged.md`` to the folder, beside ``judgements.jsonl``.

    Args:
        folder: the folder of :func:`~cocoa_integrations.evaluation.harness.evaluate`.
        judge: the chat model. It is called with temperature 0.
        name: the name of the judge in the file. Default: its class and model name.
        labels: a CSV file with the columns ``arm`` and ``id``, a column for the labels of each human annotator about
            truth, and columns ``NAME:info`` for labels about informativeness.
        attempts: how often a prompt is sent until there is a verdict.
        timeout: time limit for one reply in seconds.
        concurrency: maximum number of concurrent prompts.
        paper_model: as in ``evaluate``.
        begin: called with the number of remaining prompts.
        advance: called with the number of prompts that were completed.

    Raises:
        ConfigError: the folder contains no run, the task needs no judge, or the judge has a temperature.
        DataError: a file is invalid.
        MissingExtraError: labels are given and scikit-learn is not installed.
    """
    asking = Asking(judge, name, attempts, timeout, concurrency)
    name = asking.name
    folder = Path(folder)
    with finished_run(folder) as (settings, rows):
        task = str(settings.get("task"))
        if task not in QUESTIONS:
            raise ConfigError(f"{task} needs no judge; the tasks with a judge are {', '.join(QUESTIONS)}")
        criteria = [question.criterion for question in QUESTIONS[task]]
        people = {} if labels is None else read_labels(Path(labels), rows.keys(), criteria)
        asked = _asked(task, name, rows)
        verdicts = verdicts_of(read_replies(folder / JUDGEMENTS), name)
        remaining = {one.key: one for one in asked.values() if one.key not in verdicts}
        begin(len(remaining))
        for lines in asking.replies(list(remaining.values())):
            append_lines(folder / JUDGEMENTS, lines)
            verdicts |= {line["key"]: line["verdict"] for line in lines if line["verdict"] is not None}
            advance(1)
        judged = {answer: verdicts.get(one.key) for answer, one in asked.items()}
        results: dict[str, Any] = {"settings": settings, "judge": name, "samples": len({key for _, key in rows})}
        results["arms"] = _summary(task, rows, judged)
        results["cost"] = cost(read_replies(folder / JUDGEMENTS), name)
        if people:
            results["agreement"] = {
                criterion: agreement({answer: judged.get((*answer, criterion)) for answer in rows}, labelled)
                for criterion, labelled in people.items()
            }
        write_file(folder / JUDGED, dumps(results, indent=2, ensure_ascii=False) + "\n")
        write_file(folder / JUDGED_TABLE, markdown(judged_report(results, paper_model)))
    return results


def judged_report(results: Mapping[str, Any], paper_model: str | None = None) -> Report:
    """The tables and notes of the result of :func:`judge_run`."""
    task = str(results["settings"]["task"])
    made = report(replace(TASKS[task], columns=COLUMNS.get(task, (TRUTH,))), results, paper_model)
    unjudged = sum(arm["unjudged"] for arm in results["arms"])
    made.notes.append(
        f"Judge: {results['judge']}. Answers without a verdict, which count as neither true nor informative: "
        f"{unjudged}."
    )
    made.notes.append(cost_in_words(results["cost"]))
    for criterion, agreed in results.get("agreement", {}).items():
        made.notes.extend(["", in_words(agreed, criterion).rstrip("\n")])
    return made


def _asked(task: str, judge: str, rows: Rows) -> dict[tuple[str, str, str], Asked]:
    """The prompt about each answer, by arm, sample and criterion. Equal answers to a question share a prompt."""
    asked = {}
    for (arm, key), row in rows.items():
        if task in ("nq", "nq_swap") and not row["context"]:
            raise ConfigError(f"the judge's prompt for {task} needs the passages: use a data file that contains them")
        for question in QUESTIONS[task]:
            if row["answer"]:  # an empty answer is neither true nor informative, and needs no judge
                prompt = question.prompt(row)
                asked[arm, key, question.criterion] = Asked.of(judge, prompt, question.verdict)
    return asked


def _summary(task: str, answers: Rows, judged: Mapping[tuple[str, str, str], bool | None]) -> list[dict[str, Any]]:
    summary: list[dict[str, Any]] = []
    first: dict[str, dict[str, float]] = {}
    criteria = [question.criterion for question in QUESTIONS[task]]
    for arm in dict.fromkeys(arm for arm, _ in answers):
        rows = [row for row in answers.values() if row["arm"] == arm]
        kept = [row for row in rows if not row["metrics"].get("rejected")]
        means: dict[str, float | None] = {}
        for suffix, chosen in (("", rows), ("_kept", kept)):
            for criterion in criteria:
                favourable = [judged.get((arm, row["id"], criterion)) is True for row in chosen]
                means[criterion + suffix] = sum(favourable) / len(favourable) if favourable else None
            truth, info = means["truth" + suffix], means.get("info" + suffix)
            if truth is not None and info is not None:
                means["truth_and_info" + suffix] = truth * info  # as in the paper, the product of the two shares
        each = {
            name: {row["id"]: float(judged.get((arm, row["id"], name)) is True) for row in rows} for name in criteria
        }
        each["rejected"] = {row["id"]: row["metrics"].get("rejected", 0.0) for row in rows}
        metrics = {name: {"mean": means.get(name)} for name in (*means, "truth_and_info", "truth_and_info_kept")}
        metrics |= {name: statistics(values, first.get(name)) for name, values in each.items()}
        first = first or each
        summary.append(
            {
                **{name: rows[0][name] for name in ("method", "metric", "alpha")},
                "samples": len(rows),
                "empty": sum(not row["answer"] for row in rows),
                "unjudged": sum(
                    any(judged.get((arm, row["id"], name)) is None for name in criteria) and bool(row["answer"])
                    for row in rows
                ),
                "metrics": metrics,
            }
        )
    return summary
