"""LLM judges of the answers of a run: any LangChain chat model, with the paper's prompts, and FActScore of summaries.

Every reply is a line of ``judgements.jsonl`` or ``factscore.jsonl`` in the folder of the run. A prompt for which there
is a verdict is not sent again. Replies without a verdict, errors and time-outs are stored too, and their prompts are
sent again by a later run. An answer without a verdict never counts as true or informative.

FActScore (Min et al., 2023) is the share of the atomic facts of a summary that the source document supports: the judge
splits each summary into facts, and then checks each fact against the document alone.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import StrictInt

from cocoa_engine.errors import ConfigError
from cocoa_engine.lab.files import RowModel
from cocoa_integrations.evaluation.files import append_lines, read_lines
from cocoa_integrations.evaluation.harness import Measure, Measured, Row, Rows, finished_run, summarise, write_results
from cocoa_integrations.evaluation.prompts import CHECK, QUESTIONS, SPLIT, facts_of, yes_or_no
from cocoa_integrations.evaluation.table import report
from cocoa_integrations.evaluation.tasks import TASKS, Column

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.messages import AIMessage
    from langchain_core.runnables import Runnable

TOKENS = ("input_tokens", "output_tokens")
TRUTH = Column("truth", "Truth. (%)")  # of tasks that are not in COLUMNS

COLUMNS = {
    "truthfulqa_gen": (
        TRUTH,
        Column("info", "Info. (%)"),
        Column("rejected", "Rej. rate (%)", better="less"),
        Column("truth_and_info", "T×I (%)"),
        Column("truth_kept", "Truth. (%), not rejected"),
        Column("info_kept", "Info. (%), not rejected"),
        Column("truth_and_info_kept", "T×I (%), not rejected"),
    )
}
FACT_COLUMNS = (Column("factscore", "FActScore (%)"), Column("facts", "Facts per summary", scale=1))
SUMMARY_TASKS = ("samsum", "xsum")


Lines = list[dict[str, Any]]
Track = Callable[[Iterator[Lines], int], Iterable[Lines]]


class Asked(NamedTuple):
    """A prompt, its key in the file, and the function for the verdict in a reply: any JSON value, or `None`."""

    key: str
    prompt: str
    verdict: Callable[[str], Any]


class _Line(RowModel):
    judge: str
    key: str
    tokens: dict[str, StrictInt] | None = None


class Judge:
    """A judge, and how prompts are sent to it.

    Args:
        model: the chat model. It is called with temperature 0.
        name: the name of the judge in the file. Default: its class and model name.
        attempts: how often a prompt is sent until there is a verdict.
        timeout: time limit for one reply in seconds.
        concurrency: maximum number of concurrent prompts.

    Raises:
        ConfigError: an option is out of range, or the model has a temperature.
    """

    def __init__(
        self,
        model: BaseChatModel,
        name: str | None = None,
        attempts: int = 3,
        timeout: float = 120.0,
        concurrency: int = 4,
    ) -> None:
        if attempts < 1 or concurrency < 1 or not timeout > 0:
            raise ConfigError("attempts, concurrency and timeout must be above 0")
        if getattr(model, "temperature", None):
            raise ConfigError("the judge must be deterministic: make it with temperature=0")
        served = next((value for field in ("model_name", "model") if (value := getattr(model, field, None))), "")
        self.name = name or f"{type(model).__name__} {served}".strip()
        self._model: Runnable[LanguageModelInput, AIMessage] = (
            model if getattr(model, "temperature", None) == 0 else model.bind(temperature=0.0)
        )
        self._attempts, self._timeout, self._concurrency = attempts, timeout, concurrency

    def asked(self, prompt: str, verdict: Callable[[str], Any]) -> Asked:
        """A prompt for this judge. Equal prompts have the same key."""
        return Asked(sha256(dumps([self.name, prompt]).encode()).hexdigest(), prompt, verdict)

    def verdicts(
        self,
        file: Path,
        prompts: Iterable[Asked],
        track: Track = lambda replies, total: replies,
    ) -> dict[str, Any]:
        """The verdicts about prompts by key: those in the file of replies, and those that the judge gives now.

        ``track`` passes on the replies to each of the prompts that are sent, whose number it is told.
        """
        verdicts = {line["key"]: line["verdict"] for line in self._own_lines(file) if line.get("verdict") is not None}
        remaining = {asked.key: asked for asked in prompts if asked.key not in verdicts}
        for lines in track(self.replies(list(remaining.values())), len(remaining)):
            append_lines(file, lines)
            verdicts |= {line["key"]: line["verdict"] for line in lines if line["verdict"] is not None}
        return verdicts

    def _own_lines(self, file: Path) -> list[dict[str, Any]]:
        return [line for line in read_lines(file, _Line) if line["judge"] == self.name]

    def results(self, file: Path, settings: Mapping[str, Any], rows: Rows, measure: Measure) -> dict[str, Any]:
        """The results of a run, and their cost: the calls, those that failed, and the tokens, as far as reported."""
        own = self._own_lines(file)
        tokens = {name: sum((line.get("tokens") or {}).get(name, 0) for line in own) for name in TOKENS}
        return {
            "settings": settings,
            "judge": self.name,
            "samples": len({key for _, key in rows}),
            "arms": summarise(rows.values(), measure),
            "cost": {"calls": len(own), "without_verdict": sum(line.get("verdict") is None for line in own), **tokens},
        }

    def replies(self, asked: Sequence[Asked]) -> Iterator[list[dict[str, Any]]]:
        """The lines about each prompt, one for each attempt, as soon as the prompt is completed."""
        stopped = threading.Event()  # set on Ctrl-C: outstanding replies are not awaited, and no more prompts are sent
        with ThreadPoolExecutor(self._concurrency) as pool:
            try:
                for future in as_completed([pool.submit(self._ask, prompt, stopped) for prompt in asked]):
                    yield future.result()
            finally:
                stopped.set()

    def _ask(self, asked: Asked, stopped: threading.Event) -> list[dict[str, Any]]:
        """Send a prompt until there is a verdict. Returns a line for each attempt."""
        lines: list[dict[str, Any]] = []
        while len(lines) < self._attempts and not stopped.is_set():
            replies: SimpleQueue[dict[str, Any]] = SimpleQueue()
            # a daemon thread does not block the exit if the judge hangs
            threading.Thread(target=lambda to: to.put(self._reply(asked)), args=(replies,), daemon=True).start()
            deadline, reply = time.monotonic() + self._timeout, None
            while reply is None and (remaining := deadline - time.monotonic()) > 0 and not stopped.is_set():
                with contextlib.suppress(Empty):
                    reply = replies.get(timeout=min(remaining, 0.5))
            late = {"verdict": None, "reply": None, "error": f"no reply within {self._timeout:g} s", "tokens": None}
            lines.append({"judge": self.name, "key": asked.key, **(reply or late)})
            if lines[-1]["verdict"] is not None:
                break
        return lines

    def _reply(self, asked: Asked) -> dict[str, Any]:
        """A reply with its verdict, or an error message, and the numbers of tokens if the provider reports them."""
        try:
            message = self._model.invoke(asked.prompt)
            text = str(message.text)
            text.encode()  # raises an error for a lone surrogate, which cannot be stored
            usage: Any = message.usage_metadata
            counts = usage if isinstance(usage, Mapping) else {}  # some providers' are wrong; the reply counts
            tokens = {name: counts[name] for name in TOKENS if type(counts.get(name)) is int}
        except Exception as error:  # the errors of providers have no common base
            described = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
            return {"verdict": None, "reply": None, "error": described, "tokens": None}
        verdict = asked.verdict(text)
        lacks = "no verdict in the reply" if verdict is None else None
        return {"verdict": verdict, "reply": text, "error": lacks, "tokens": tokens or None}


def judge_run(
    folder: str | Path,
    judge: BaseChatModel,
    *,
    paper_model: str | None = None,
    track: Track = lambda replies, total: replies,
    **options: Any,
) -> dict[str, Any]:
    """Judge every answer of a run. Stored verdicts are reused.

    Writes ``judged.json`` and ``judged.md`` to the folder, beside ``judgements.jsonl``.

    Args:
        folder: the folder of :func:`~cocoa_integrations.evaluation.harness.evaluate`.
        judge, **options: as for :class:`Judge`.
        paper_model: as in ``evaluate``.
        track: passes on the replies to each remaining prompt, whose number it is told; for a progress bar.

    Raises:
        ConfigError: the folder contains no run, the task needs no judge, or the judge has a temperature.
        DataError: a file is invalid.
    """
    asking, folder = Judge(judge, **options), Path(folder)
    file = folder / "judgements.jsonl"
    with finished_run(folder) as (settings, rows):
        task = str(settings["task"])
        if task not in QUESTIONS:
            raise ConfigError(f"{task} needs no judge; the tasks with a judge are {', '.join(QUESTIONS)}")
        if task in ("nq", "nq_swap") and not all(row["context"] for row in rows.values()):
            raise ConfigError(f"the judge's prompt for {task} needs the passages: use a data file that contains them")
        criteria = [question.criterion for question in QUESTIONS[task]]
        asked = {
            (*answer, question.criterion): asking.asked(question.prompt(row), question.verdict)
            for answer, row in rows.items()
            for question in QUESTIONS[task]
            if row["answer"]  # an empty answer is neither true nor informative, and needs no judge
        }
        verdicts = asking.verdicts(file, asked.values(), track)
        judged = {answer: verdicts.get(prompt.key) for answer, prompt in asked.items()}
        results = asking.results(file, settings, rows, lambda own: _judged(own, criteria, judged))
        results["verdicts"] = [
            {"arm": arm, "id": key, **{name: judged.get((arm, key, name)) for name in criteria}} for arm, key in rows
        ]
        write_results(folder, "judged", results, judged_report(results, paper_model))
    return results


def _judged(
    rows: Sequence[Row], criteria: Sequence[str], judged: Mapping[tuple[str, str, str], bool | None]
) -> Measured:
    """The number of answers of an arm without a verdict, the values of each sample, and further means."""
    verdicts = {name: {row["id"]: judged.get((row["arm"], row["id"], name)) for row in rows} for name in criteria}
    means: dict[str, float | None] = {"truth_and_info": None, "truth_and_info_kept": None}
    accepted = [row for row in rows if not row["metrics"].get("rejected")]
    for suffix, chosen in (("", rows), ("_kept", accepted)):
        for name in criteria:
            favourable = [verdicts[name][row["id"]] is True for row in chosen]
            means[name + suffix] = sum(favourable) / len(favourable) if favourable else None
        truth, info = means["truth" + suffix], means.get("info" + suffix)
        if truth is not None and info is not None:
            means["truth_and_info" + suffix] = truth * info  # as in the paper, the product of the two shares
    values = {name: {key: float(verdict is True) for key, verdict in own.items()} for name, own in verdicts.items()}
    values["rejected"] = {row["id"]: row["metrics"].get("rejected", 0.0) for row in rows}
    unjudged = sum(bool(row["answer"]) and any(verdicts[name][row["id"]] is None for name in criteria) for row in rows)
    return {"unjudged": unjudged}, values, means


def judged_report(results: Mapping[str, Any], paper_model: str | None = None) -> str:
    """The tables and notes of the result of :func:`judge_run`, as Markdown."""
    task = str(results["settings"]["task"])
    notes = [
        f"Judge: {results['judge']}. Answers without a verdict, which count as neither true nor informative: "
        f"{sum(arm['unjudged'] for arm in results['arms'])}.",
        _cost_in_words(results["cost"]),
    ]
    return report(replace(TASKS[task], columns=COLUMNS.get(task, (TRUTH,))), results, paper_model, notes)


def factscore_run(
    folder: str | Path,
    judge: BaseChatModel,
    *,
    gamma: float | None = None,
    track: Track = lambda replies, total: replies,
    **options: Any,
) -> dict[str, Any]:
    """The FActScore of every summary of a run. Stored replies are reused.

    Writes ``factscore.json`` and ``factscore.md`` to the folder, beside ``factscore.jsonl``.

    Args:
        folder: the folder of :func:`~cocoa_integrations.evaluation.harness.evaluate` for ``samsum`` or ``xsum``.
        judge, **options: as for :class:`Judge`.
        gamma: the length penalty of FActScore's code, which uses 10: a summary with F <= gamma facts is multiplied by
            exp(1 - gamma / F). `None` applies none.
        track: as for :func:`judge_run`, for the summaries that are split, and then for the facts that are checked.

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
    asking, folder = Judge(judge, **options), Path(folder)
    file = folder / "factscore.jsonl"
    with finished_run(folder) as (settings, rows):
        task = str(settings["task"])
        if task not in SUMMARY_TASKS:
            raise ConfigError(f"FActScore is measured for {' and '.join(SUMMARY_TASKS)}, not for {task}")
        splits = {
            answer: asking.asked(SPLIT.substitute(summary=row["answer"]), facts_of)
            for answer, row in rows.items()
            if row["answer"]
        }
        facts = asking.verdicts(file, splits.values(), track)
        checks = {
            answer: [
                asking.asked(CHECK.substitute(document=rows[answer]["context"], fact=fact), yes_or_no)
                for fact in facts[split.key]
            ]
            for answer, split in splits.items()
            if split.key in facts
        }
        prompts = [check for of_answer in checks.values() for check in of_answer]
        verdicts = asking.verdicts(file, prompts, track)
        supported = {answer: [verdicts.get(check.key) for check in claims] for answer, claims in checks.items()}
        results = asking.results(file, settings, rows, lambda own: _factscored(own, supported, gamma))
        results["gamma"] = gamma
        write_results(folder, "factscore", results, factscore_report(results))
    return results


def _factscored(
    rows: Sequence[Row], supported: Mapping[tuple[str, str], Sequence[bool | None]], gamma: float | None
) -> Measured:
    """The numbers of summaries of an arm without a score, and the score and the number of facts of the others."""
    verdicts = {row["id"]: supported.get((row["arm"], row["id"])) for row in rows}
    judged = {key: [fact is True for fact in facts] for key, facts in verdicts.items() if facts and None not in facts}
    without = sum(not row["answer"] or verdicts[row["id"]] == [] for row in rows)
    values = {
        "factscore": {key: factscore(facts, gamma) for key, facts in judged.items()},
        "facts": {key: float(len(facts)) for key, facts in judged.items()},
    }
    return {"without_facts": without, "unjudged": len(rows) - len(judged) - without}, values, {}


def factscore(supported: Sequence[bool], gamma: float | None = None) -> float:
    """The share of facts that are supported, times the length penalty ``gamma`` of :func:`factscore_run`."""
    share = sum(supported) / len(supported)
    return share if gamma is None or len(supported) > gamma else share * math.exp(1 - gamma / len(supported))


def factscore_report(results: Mapping[str, Any]) -> str:
    """The tables and notes of the result of :func:`factscore_run`, as Markdown."""
    gamma = results["gamma"]
    penalty = "without length penalty" if gamma is None else f"with the length penalty of gamma = {gamma:g}"
    notes = [f"Judge: {results['judge']}. FActScore {penalty}."]
    for kind, words in (("without_facts", "empty or without a fact"), ("unjudged", "without all verdicts")):
        if count := sum(arm[kind] for arm in results["arms"]):
            notes.append(f"Summaries {words}, which are left out of the means: {count} across all arms.")
    notes.append(_cost_in_words(results["cost"]))
    return report(replace(TASKS[str(results["settings"]["task"])], columns=FACT_COLUMNS), results, notes=notes)


def _cost_in_words(spent: Mapping[str, int]) -> str:
    words = f"Calls of the judge: {spent['calls']}, {spent['without_verdict']} of them without a verdict"
    if spent["input_tokens"] or spent["output_tokens"]:
        words += f"; {spent['input_tokens']} tokens read and {spent['output_tokens']} written"
    return f"{words}."
