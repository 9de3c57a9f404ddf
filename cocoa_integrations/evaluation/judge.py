"""An LLM judge for the answers of a run: any LangChain chat model, with the paper's prompts.

Every reply is stored in ``judgements.jsonl`` in the folder of the run. A prompt for which the judge has given a verdict
is not sent again. Replies without a verdict, errors and time-outs are stored too, and their prompts are sent again. An
answer without a verdict never counts as true or informative.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from json import dumps
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from cocoa_engine.errors import ConfigError
from cocoa_integrations.evaluation.agreement import agreement, in_words, read_labels
from cocoa_integrations.evaluation.folder import RunFolder, append_lines, read_lines, reopen_folder
from cocoa_integrations.evaluation.judge_prompts import QUESTIONS
from cocoa_integrations.evaluation.statistics import statistics
from cocoa_integrations.evaluation.table import report
from cocoa_integrations.evaluation.table_text import Report, markdown
from cocoa_integrations.evaluation.tasks import TASKS, Column

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.messages import AIMessage
    from langchain_core.runnables import Runnable

    Judge = Runnable[LanguageModelInput, AIMessage]

JUDGEMENTS, JUDGED, JUDGED_TABLE = "judgements.jsonl", "judged.json", "judged.md"

_TRUTH, _INFO = Column("truth", "Truth. (%)"), Column("info", "Info. (%)")
_COLUMNS = {
    "truthfulqa_gen": (
        _TRUTH,
        _INFO,
        Column("rejected", "Rej. rate (%)", better="less"),
        Column("truth_and_info", "T×I (%)"),
        Column("truth_kept", "Truth. (%), not rejected"),
        Column("info_kept", "Info. (%), not rejected"),
        Column("truth_and_info_kept", "T×I (%), not rejected"),
    )
}


class _Asked(NamedTuple):
    """A prompt, its key in the file, and the function that extracts the verdict from a reply."""

    key: str
    prompt: str
    verdict: Callable[[str], bool | None]


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
        folder: the folder of :func:`~cocoa_integrations.evaluation.run.evaluate`.
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
    if attempts < 1 or concurrency < 1 or not timeout > 0:
        raise ConfigError("attempts, concurrency and timeout must be above 0")
    if getattr(judge, "temperature", None):
        raise ConfigError("the judge must be deterministic: make it with temperature=0")
    deterministic = judge if getattr(judge, "temperature", None) == 0 else judge.bind(temperature=0.0)
    name = name or _name(judge)
    with reopen_folder(Path(folder)) as (run, settings):
        task = str(settings.get("task"))
        if task not in QUESTIONS:
            raise ConfigError(f"{task} needs no judge; the tasks with a judge are {', '.join(QUESTIONS)}")
        criteria = [question.criterion for question in QUESTIONS[task]]
        people = {} if labels is None else read_labels(Path(labels), run.rows.keys(), criteria)
        asked = _asked(task, name, run)
        verdicts = {
            line["key"]: line["verdict"]
            for line in read_lines(run.path / JUDGEMENTS)
            if line.get("judge") == name and line.get("verdict") is not None
        }
        remaining = {one.key: one for one in asked.values() if one.key not in verdicts}
        begin(len(remaining))
        for lines in _ask_all(deterministic, list(remaining.values()), attempts, timeout, concurrency):
            append_lines(run.path / JUDGEMENTS, ({"judge": name, **line} for line in lines))
            verdicts |= {line["key"]: line["verdict"] for line in lines if line["verdict"] is not None}
            advance(1)
        judged = {answer: verdicts.get(one.key) for answer, one in asked.items()}
        results: dict[str, Any] = {"settings": settings, "judge": name, "samples": len({key for _, key in run.rows})}
        results["arms"] = _summary(task, run, judged)
        if people:
            results["agreement"] = {
                criterion: agreement({answer: judged.get((*answer, criterion)) for answer in run.rows}, labelled)
                for criterion, labelled in people.items()
            }
        run.write(JUDGED, dumps(results, indent=2, ensure_ascii=False) + "\n")
        run.write(JUDGED_TABLE, markdown(judged_report(results, paper_model)))
    return results


def judged_report(results: Mapping[str, Any], paper_model: str | None = None) -> Report:
    """The tables and notes of the result of :func:`judge_run`."""
    task = str(results["settings"]["task"])
    made = report(replace(TASKS[task], columns=_COLUMNS.get(task, (_TRUTH,))), results, paper_model)
    unjudged = sum(arm["unjudged"] for arm in results["arms"])
    made.notes.append(
        f"Judge: {results['judge']}. Answers without a verdict, which count as neither true nor informative: "
        f"{unjudged}."
    )
    for criterion, agreed in results.get("agreement", {}).items():
        made.notes.extend(["", in_words(agreed, criterion).rstrip("\n")])
    return made


def _name(judge: BaseChatModel) -> str:
    model = next((value for field in ("model_name", "model") if (value := getattr(judge, field, None))), "")
    return f"{type(judge).__name__} {model}".strip()


def _asked(task: str, judge: str, run: RunFolder) -> dict[tuple[str, str, str], _Asked]:
    """The prompt about each answer, by arm, sample and criterion. Equal answers to a question share a prompt."""
    asked = {}
    for (arm, key), row in run.rows.items():
        if task in ("nq", "nq_swap") and not row["context"]:
            raise ConfigError(f"the judge's prompt for {task} needs the passages: use a data file that contains them")
        for question in QUESTIONS[task]:
            if row["answer"]:  # an empty answer is neither true nor informative, and needs no judge
                prompt = question.prompt(row)
                identity = sha256(dumps([judge, prompt]).encode()).hexdigest()
                asked[arm, key, question.criterion] = _Asked(identity, prompt, question.verdict)
    return asked


def _ask_all(
    judge: Judge, asked: Sequence[_Asked], attempts: int, timeout: float, concurrency: int
) -> Iterator[list[dict[str, Any]]]:
    """The lines about each prompt, as soon as it is completed."""
    stopped = threading.Event()  # set on Ctrl-C, so that outstanding replies are not awaited
    with ThreadPoolExecutor(concurrency) as pool:

        def submit(count: int) -> set[Future[list[dict[str, Any]]]]:
            return {pool.submit(_ask, judge, one, attempts, timeout, stopped) for one in islice(waiting, count)}

        waiting = iter(asked)
        running = submit(concurrency)
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                running |= submit(len(done))
        finally:
            stopped.set()


def _ask(judge: Judge, asked: _Asked, attempts: int, timeout: float, stopped: threading.Event) -> list[dict[str, Any]]:
    """Send a prompt until there is a verdict. Returns a line for each attempt."""
    lines: list[dict[str, Any]] = []
    while len(lines) < attempts and not stopped.is_set():
        reply, error = _reply(judge, asked.prompt, timeout, stopped)
        verdict = None if reply is None else asked.verdict(reply)
        if verdict is None and error is None:
            error = "no verdict in the reply"
        lines.append({"key": asked.key, "verdict": verdict, "reply": reply, "error": error})
        if verdict is not None:
            break
    return lines


def _reply(judge: Judge, prompt: str, timeout: float, stopped: threading.Event) -> tuple[str | None, str | None]:
    """The reply or an error message. The judge runs in a daemon thread, which does not block the exit if it hangs."""
    answers: SimpleQueue[tuple[str | None, str | None]] = SimpleQueue()

    def ask() -> None:
        try:
            reply = str(judge.invoke(prompt).text)
            reply.encode()  # raises an error for a lone surrogate, which cannot be stored
            answers.put((reply, None))
        except Exception as error:  # the errors of providers have no common base
            message = f"{type(error).__name__}: {error}"
            answers.put((None, message.encode("utf-8", "backslashreplace").decode()))

    threading.Thread(target=ask, daemon=True).start()
    deadline = time.monotonic() + timeout
    while (remaining := deadline - time.monotonic()) > 0 and not stopped.is_set():
        with contextlib.suppress(Empty):
            return answers.get(timeout=min(remaining, 0.5))
    return None, f"no reply within {timeout:g} s"


def _summary(task: str, run: RunFolder, judged: Mapping[tuple[str, str, str], bool | None]) -> list[dict[str, Any]]:
    summary: list[dict[str, Any]] = []
    first: dict[str, dict[str, float]] = {}
    criteria = [question.criterion for question in QUESTIONS[task]]
    for arm in dict.fromkeys(arm for arm, _ in run.rows):
        rows = [row for row in run.rows.values() if row["arm"] == arm]
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
                "errors": sum("error" in row for row in rows),
                "empty": sum(not row["answer"] for row in rows),
                "unjudged": sum(
                    any(judged.get((arm, row["id"], name)) is None for name in criteria) and bool(row["answer"])
                    for row in rows
                ),
                "metrics": metrics,
            }
        )
    return summary
