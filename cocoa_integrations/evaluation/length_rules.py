"""A study of the rules that compare candidates of unequal length (``CocoaConfig.span_log_prob``).

Every prompt is answered greedily and by each method with each rule. The answers of one prompt share their work: see
:mod:`cocoa_engine.studies.replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from cocoa_engine import CocoaConfig, __version__
from cocoa_engine.equations import SpanLogProb
from cocoa_engine.errors import ConfigError, DataError, PromptError
from cocoa_engine.messages import unknown
from cocoa_engine.output_files import write_file
from cocoa_engine.studies.machine import describe
from cocoa_engine.studies.replay import KnownStep, Replay
from cocoa_integrations.evaluation.arms import Arm, make_arms
from cocoa_integrations.evaluation.folder import RESULTS, TABLE, RunFolder, append_lines, open_folder, read_lines
from cocoa_integrations.evaluation.length_table import answers_csv, report, summarise
from cocoa_integrations.evaluation.run import identity, require_same_samples, shared_settings
from cocoa_integrations.evaluation.table_text import markdown
from cocoa_integrations.evaluation.tasks import EvalTask, Sample

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

FORMAT = 1
CANDIDATES = "candidates.jsonl"
"""What is known about the candidates of each sample, so that a later run can add rules at little cost."""

ANSWERS = "answers.csv"
"""The measures of every answer, without texts."""

MACHINE = "machine.json"

RULES: tuple[SpanLogProb, ...] = get_args(SpanLogProb)


class RuleArm(NamedTuple):
    """A method with a rule; greedy decoding has none."""

    arm: Arm
    rule: SpanLogProb | None

    def config(self, base: CocoaConfig) -> CocoaConfig:
        """The settings of this arm; the others are taken from ``base``."""
        config = self.arm.config(base)
        return config if self.rule is None else config.replace(span_log_prob=self.rule)

    def __str__(self) -> str:
        return str(self.arm) if self.rule is None else f"{self.arm}, {self.rule}"


def make_rule_arms(
    methods: Sequence[str], rules: Sequence[str], metrics: Sequence[str] = ("f_mlds",), alphas: Sequence[float] = (2.5,)
) -> list[RuleArm]:
    """Greedy decoding, then each method with each rule.

    Raises:
        ConfigError: a method, rule or metric is unknown, or a list is empty.
    """
    if not rules or (strangers := set(rules) - set(RULES)):
        raise ConfigError(unknown(sorted(strangers) if rules else [""], RULES, what="rule"))
    arms = [arm for arm in make_arms(methods, metrics, alphas) if arm.method != "greedy"]
    return [RuleArm(Arm("greedy"), None), *(RuleArm(arm, rule) for arm in arms for rule in RULES if rule in rules)]


def study(
    engine: CocoaEngine | Callable[[], CocoaEngine],
    tasks: Sequence[tuple[EvalTask, Sequence[Sample]]],
    arms: Sequence[RuleArm],
    out: str | Path,
    *,
    config: CocoaConfig | None = None,
    model: Mapping[str, Any],
    data: Mapping[str, Mapping[str, Any]],
    limit: int | None = None,
    begin: Callable[[int, int], None] = lambda done, total: None,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Run or resume the study. The tasks take turns, prompt by prompt.

    Args:
        engine: the engine, or a function that loads it. It is called only if there is work left.
        tasks: tasks that generate answers, each with its samples.
        arms: from :func:`make_rule_arms`.
        out: the folder for the results. Each task has a folder in it, with one line for each prompt and arm in
            ``samples.jsonl``. A later run may add arms, and reuses the candidates in ``candidates.jsonl``.
        config: the settings that all arms share.
        model: the description of the model.
        data: by task, the source of its samples.
        limit: the limit with which the samples were loaded. A later run may raise it.
        begin: called with the numbers of existing and of all rows.
        advance: called with the number of added rows.

    Returns:
        The content of ``results.json``.

    Raises:
        ConfigError: a task does not generate text or runs code, or a folder contains another run.
        DataError: the files in a folder were changed after they were written.
    """
    for task, _ in tasks:
        if task.multiple_choice or task.runs_code:
            raise ConfigError(f"{task.name}: the study needs a task whose generated text is measured")
    out = Path(out)
    shared = {task.name: shared_settings(task, config or CocoaConfig()) for task, _ in tasks}
    with ExitStack() as stack:
        folders: dict[str, RunFolder] = {}
        known: dict[str, dict[str, list[KnownStep]]] = {}
        for task, samples in tasks:
            settings = {
                "format": FORMAT,
                "study": "length rules",
                "version": __version__,
                "task": task.name,
                "model": dict(model),
                "decoding": shared[task.name].model_dump(
                    mode="json", exclude={"method", "metric", "alpha", "span_log_prob"}
                ),
                "data": dict(data[task.name]),
                "limit": limit,
            }
            folders[task.name] = stack.enter_context(open_folder(out / task.name, settings))
            require_same_samples(folders[task.name], samples)
            known[task.name] = known_steps(out / task.name / CANDIDATES)
        names = set(map(str, arms))
        done = sum(name in names for folder in folders.values() for name, _ in folder.rows)
        total = len(arms) * sum(len(samples) for _, samples in tasks)
        begin(done, total)
        try:
            if done < total:
                loaded = engine() if callable(engine) else engine
                write_file(out / MACHINE, dumps(describe(), indent=2) + "\n")
                for task, sample in _in_turn(tasks):
                    folder = folders[task.name]
                    missing = [arm for arm in arms if (str(arm), sample.id) not in folder.rows]
                    if missing:
                        steps = known[task.name].get(sample.id, [])
                        rows, found = _answered(loaded, task, sample, missing, shared[task.name], steps)
                        if len(found) > len(steps):
                            append_lines(folder.path / CANDIDATES, [{"id": sample.id, "steps": found}])
                        folder.append(rows)
                        advance(len(missing))
        finally:  # an interrupted run has results, too
            rows_of = {task.name: folders[task.name].rows for task, _ in tasks}
            results = {
                "model": dict(model),
                "tasks": {task.name: summarise(task, list(map(str, arms)), rows_of[task.name]) for task, _ in tasks},
            }
            for name, text in (
                (RESULTS, dumps(results, indent=2) + "\n"),
                (TABLE, markdown(report(results))),
                (ANSWERS, answers_csv(rows_of)),
            ):
                write_file(out / name, text)
    return results


def known_steps(file: Path) -> dict[str, list[KnownStep]]:
    """What a file of candidates knows of each sample; nothing if there is no file.

    Raises:
        DataError: the file was changed after it was written.
    """
    known: dict[str, list[KnownStep]] = {}
    for number, line in enumerate(read_lines(file), start=1):
        try:
            read = _CandidatesLine.model_validate(line)
        except ValidationError:
            raise DataError(f"{file}, line {number}: not the candidates of a sample; the file was changed") from None
        known[read.id] = [KnownStep(*step) for step in read.steps]  # the last line of a sample knows the most
    return known


class _CandidatesLine(BaseModel):
    id: str
    steps: list[tuple[list[int], list[int], list[tuple[list[int], list[float], float, float, bool]]]]


def _in_turn(tasks: Sequence[tuple[EvalTask, Sequence[Sample]]]) -> Iterator[tuple[EvalTask, Sample]]:
    """The first sample of each task, then the second of each, and so on."""
    for number in range(max(len(samples) for _, samples in tasks)):
        for task, samples in tasks:
            if number < len(samples):
                yield task, samples[number]


def _answered(
    engine: CocoaEngine,
    task: EvalTask,
    sample: Sample,
    arms: Sequence[RuleArm],
    shared: CocoaConfig,
    known: Sequence[KnownStep],
) -> tuple[list[dict[str, Any]], list[KnownStep]]:
    """The rows of some arms, and all that is known about the candidates of the sample then."""
    # the greedy answer last, when most of it is known as the first candidates of the others
    order = sorted(arms, key=lambda arm: arm.rule is None)
    try:
        replay = Replay(engine, sample.prompt, shared, task.is_complete, known)
    except PromptError as error:
        failed = {"answer": "", "error": str(error), "metrics": {column.metric: 0.0 for column in task.columns}}
        answers = {str(arm): failed | {"tokens": 0, "decoded_tokens": 0, "finish_reason": None} for arm in arms}
        steps = []
    else:
        answers = {}
        for arm in order:
            found = replay.answer(arm.config(shared))
            answer = task.answer(found.text)
            answers[str(arm)] = {
                "answer": answer,
                "metrics": task.measure(sample, answer),
                "tokens": len(found.token_ids),
                "decoded_tokens": found.decoded_tokens,
                "finish_reason": found.finish_reason,
            }
        steps = list(replay.steps.values())
    rows = [
        {
            "arm": str(arm),
            "id": sample.id,
            **arm.arm._asdict(),
            "span_log_prob": arm.rule,
            "sample": identity(sample),
            **sample.model_dump(include={"question", "references", "incorrect", "context"}),
            **answers[str(arm)],
        }
        for arm in arms
    ]
    return rows, steps
