"""FActScore (Min et al., 2023) of summaries: the share of their atomic facts that the source document supports.

A judge splits each summary into atomic facts, and then checks each fact against the document alone. Every reply is a
line of ``factscore.jsonl`` in the folder of the run. A prompt that has a usable reply is not sent again. Unusable
replies, errors and time-outs are stored too, and their prompts are sent again by a later run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from cocoa_engine.errors import ConfigError
from cocoa_engine.output_files import write_file
from cocoa_integrations.evaluation.files import append_lines
from cocoa_integrations.evaluation.judge_calls import Asked, Asking, cost, in_words, read_replies, verdicts_of
from cocoa_integrations.evaluation.judge_prompts import yes_or_no
from cocoa_integrations.evaluation.samples import Rows, finished_run
from cocoa_integrations.evaluation.statistics import statistics
from cocoa_integrations.evaluation.table import report
from cocoa_integrations.evaluation.table_text import Report, markdown
from cocoa_integrations.evaluation.tasks import TASKS, Column

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

FACTS, FACTSCORE, FACTSCORE_TABLE = "factscore.jsonl", "factscore.json", "factscore.md"
SUMMARY_TASKS = ("samsum", "xsum")

_SPLIT = Template("""\
Split the summary into atomic facts. An atomic fact is one short, complete sentence that states a single piece of \
information and can be understood without the others: write the name that a pronoun stands for. Use only what the \
summary says, even where it may be wrong. Leave nothing out, and repeat nothing.

Summary:
$summary

Reply with a JSON array of strings and nothing else. If the summary states no fact, reply with [].""")

_CHECK = Template("""\
Does the document support the statement?

Document:
$document

Statement: $fact

The document supports the statement only if it says so, or if the statement follows from it directly. Knowledge from \
elsewhere does not count. Reply with one word, Yes or No.""")


def factscore_run(
    folder: str | Path,
    judge: BaseChatModel,
    *,
    name: str | None = None,
    gamma: float | None = None,
    attempts: int = 3,
    timeout: float = 120.0,
    concurrency: int = 4,
    begin: Callable[[int, int], None] = lambda done, total: None,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """The FActScore of every summary of a run. Stored replies are reused.

    Writes ``factscore.json`` and ``factscore.md`` to the folder, beside ``factscore.jsonl``.

    Args:
        folder: the folder of :func:`~cocoa_integrations.evaluation.harness.evaluate` for ``samsum`` or ``xsum``.
        judge: the chat model. It is called with temperature 0.
        name: the name of the judge in the file. Default: its class and model name.
        gamma: the length penalty of FActScore's code, which uses 10: a summary with F <= gamma facts is multiplied by
            exp(1 - gamma / F). `None` applies none.
        attempts: how often a prompt is sent until the reply is usable.
        timeout: time limit for one reply in seconds.
        concurrency: maximum number of concurrent prompts.
        begin: called twice, with 0 and the number of remaining prompts: before the summaries are split, and before the
            facts are checked.
        advance: called with the number of prompts that were completed.

    Returns:
        The content of ``factscore.json``. A summary that is empty or states no fact has no score. Neither has one that
        could not be split, or with a fact that has no verdict. They are counted as ``without_facts`` and ``unjudged``,
        and the means are over the others.

    Raises:
        ConfigError: the folder contains no run of summaries, ``gamma`` is not above 0, or the judge has a temperature.
        DataError: a file is invalid.
    """
    if gamma is not None and not (gamma > 0 and math.isfinite(gamma)):
        raise ConfigError(f"gamma must be above 0 (got {gamma!r}); leave it out for no length penalty")
    asking = Asking(judge, name, attempts, timeout, concurrency)
    folder = Path(folder)
    with finished_run(folder) as (settings, rows):
        task = str(settings.get("task"))
        if task not in SUMMARY_TASKS:
            raise ConfigError(f"FActScore is measured for {' and '.join(SUMMARY_TASKS)}, not for {task}")
        file = folder / FACTS
        known = verdicts_of(read_replies(file), asking.name)

        def ask(prompts: Sequence[Asked]) -> None:
            remaining = {one.key: one for one in prompts if one.key not in known}
            begin(0, len(remaining))
            for lines in asking.replies(list(remaining.values())):
                append_lines(file, lines)
                known.update(verdicts_of(lines, asking.name))
                advance(1)

        splits = {
            answer: Asked.of(asking.name, _SPLIT.substitute(summary=row["answer"]), facts_of)
            for answer, row in rows.items()
            if row["answer"]
        }
        ask(list(splits.values()))
        checks = {
            answer: [
                Asked.of(asking.name, _CHECK.substitute(document=rows[answer]["context"], fact=fact), yes_or_no)
                for fact in known.get(split.key, ())
            ]
            for answer, split in splits.items()
        }
        ask([check for of_answer in checks.values() for check in of_answer])
        supported = {
            answer: [known.get(check.key) for check in of_answer]
            for answer, of_answer in checks.items()
            if splits[answer].key in known
        }
        results: dict[str, Any] = {
            "settings": settings,
            "judge": asking.name,
            "gamma": gamma,
            "samples": len({key for _, key in rows}),
            "arms": _summary(rows, supported, gamma),
            "cost": cost(read_replies(file), asking.name),
        }
        write_file(folder / FACTSCORE, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        write_file(folder / FACTSCORE_TABLE, markdown(factscore_report(results)))
    return results


def factscore(supported: Sequence[bool], gamma: float | None = None) -> float:
    """The share of facts that are supported, times the length penalty exp(1 - gamma / F) for F <= gamma facts.

    Args:
        supported: for each fact, at least one, whether the source supports it.
        gamma: see :func:`factscore_run`.
    """
    share = sum(supported) / len(supported)
    return share if gamma is None or len(supported) > gamma else share * math.exp(1 - gamma / len(supported))


def factscore_report(results: Mapping[str, Any]) -> Report:
    """The tables and notes of the result of :func:`factscore_run`."""
    columns = (Column("factscore", "FActScore (%)"), Column("facts", "Facts per summary", scale=1))
    made = report(replace(TASKS[str(results["settings"]["task"])], columns=columns), results)
    gamma = results["gamma"]
    penalty = "without length penalty" if gamma is None else f"with the length penalty of gamma = {gamma:g}"
    made.notes.append(f"Judge: {results['judge']}. FActScore {penalty}.")
    for kind, words in (("without_facts", "empty or without a fact"), ("unjudged", "without all verdicts")):
        if count := sum(one[kind] for one in results["arms"]):
            made.notes.append(f"Summaries {words}, which are left out of the means: {count} across all arms.")
    made.notes.append(in_words(results["cost"]))
    return made


def _summary(
    answers: Rows, supported: Mapping[tuple[str, str], Sequence[bool | None]], gamma: float | None
) -> list[dict[str, Any]]:
    summary: list[dict[str, Any]] = []
    first: dict[str, dict[str, float]] = {}
    for arm in dict.fromkeys(arm for arm, _ in answers):
        rows = [row for row in answers.values() if row["arm"] == arm]
        verdicts = {row["id"]: supported.get((arm, row["id"])) for row in rows}
        judged = {key: [fact is True for fact in each] for key, each in verdicts.items() if each and None not in each}
        without = sum(not row["answer"] or verdicts[row["id"]] == [] for row in rows)
        values = {
            "factscore": {key: factscore(each, gamma) for key, each in judged.items()},
            "facts": {key: float(len(each)) for key, each in judged.items()},
        }
        summary.append(
            {
                **{name: rows[0][name] for name in ("method", "metric", "alpha")},
                "samples": len(rows),
                "empty": sum(not row["answer"] for row in rows),
                "without_facts": without,
                "unjudged": len(rows) - len(judged) - without,
                "metrics": {
                    name: statistics(each, first.get(name)) if each else {"mean": None} for name, each in values.items()
                },
            }
        )
        first = first or values
    return summary


def facts_of(reply: str) -> list[str] | None:
    """The facts in a reply: its first JSON array of texts, with or without text around it."""
    start = reply.find("[")
    while start >= 0:
        try:
            value, _ = json.JSONDecoder().raw_decode(reply, start)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, list) and all(isinstance(fact, str) and fact.strip() for fact in value):
            return list(dict.fromkeys(fact.strip() for fact in value))
        start = reply.find("[", start + 1)
    return None
