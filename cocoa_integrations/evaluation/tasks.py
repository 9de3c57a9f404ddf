"""The tasks: how a record becomes a prompt, where its answer ends, and its metrics; and the arms of a comparison."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from cocoa_engine import METHODS, CocoaConfig
from cocoa_engine.errors import ConfigError, DataError
from cocoa_engine.messages import unknown
from cocoa_integrations.evaluation import metrics, prompts
from cocoa_integrations.evaluation.files import Record, find_file, fingerprint, read_records
from cocoa_integrations.evaluation.generated_code import code_of, passes


class Arm(NamedTuple):
    """A decoding method, with metric and alpha if the method depends on them."""

    method: str
    metric: str | None = None
    alpha: float | None = None

    def config(self, base: CocoaConfig) -> CocoaConfig:
        """The settings of this arm; the others are taken from ``base``."""
        own = {name: value for name, value in self._asdict().items() if value is not None}
        return base.replace(**own)

    @property
    def mode(self) -> str:
        """Metric and alpha as the paper's tables write them."""
        if self.metric is None:
            return "-"
        name = {"f_mlds": "fMLDS", "con_mlds": "ConMLDS"}.get(self.metric, self.metric)
        short = f"{self.alpha:g}"  # not used if rounding changes the value
        return f"{name} (α={short if float(short) == self.alpha else self.alpha})"

    def __str__(self) -> str:
        return self.method if self.metric is None else f"{self.method} {self.mode}"


def make_arms(methods: Sequence[str], metrics: Sequence[str], alphas: Sequence[float]) -> list[Arm]:
    """All combinations of methods, metrics and alphas. A method without a disagreement penalty occurs once.

    Raises:
        ConfigError: a method or a metric is unknown, an alpha is out of range, or a list is empty.
    """
    if not (methods and metrics and alphas):
        raise ConfigError("an evaluation needs at least one method, one metric and one alpha")
    arms: list[Arm] = []
    for method in methods:
        CocoaConfig(method=method)  # raises an error for an unknown method
        for metric in metrics if _penalises(method) else [None]:
            for alpha in alphas if metric is not None else [None]:
                arm = Arm(method, metric, alpha)
                arm.config(CocoaConfig())
                arms.append(arm)
    return list(dict.fromkeys(arms))


def _penalises(method: str) -> bool:
    """Whether the score of the method depends on the disagreement and its weight."""
    score = METHODS[method].score
    return score(-1.0, 0.5, 1.0) != score(-1.0, 0.5, 2.0)


class Sample(BaseModel):
    """One question of a task, as plain data."""

    model_config = ConfigDict(frozen=True)

    id: str
    question: str
    prompt: str = Field(description="The prompt of the model.")
    references: list[str] = Field(description="Correct answers, reference summaries or solutions; the best one first.")
    incorrect: list[str] = Field(default_factory=list, description="Incorrect answers, if the data has any.")
    context: str = Field("", description="The passage, document or dialogue on which the answer is based.")
    tests: list[str] = Field(default_factory=list, description="Python statements that test the generated code.")

    @property
    def digest(self) -> str:
        """A digest of all fields."""
        return sha256(self.model_dump_json().encode()).hexdigest()[:16]

    @property
    def choices(self) -> list[str]:
        """The answers of a multiple-choice question as they are scored, the correct ones first."""
        return [f" {answer}" for answer in (*self.references, *self.incorrect)]


@dataclass(frozen=True)
class Column:
    """A metric, and how a table shows its mean.

    Attributes:
        scale: the factor for the shown value; 100 for metrics that the paper gives in per cent.
        better: ``"more"`` or ``"less"``.
    """

    metric: str
    heading: str
    scale: float = 100.0
    decimals: int = 2
    better: str = "more"


@dataclass(frozen=True)
class EvalTask:
    """One task.

    Attributes:
        read: converts a record to a sample. The second argument is the id of a record that has none.
        columns: the metrics, in the order of the table.
        measure: returns the metrics of an answer, or for multiple choice, of the scores of the choices.
        multiple_choice: whether given answers are scored. Otherwise an answer is generated.
        until: texts that end an answer.
        max_new_tokens: the default maximum length of an answer.
        ends_at: the answer is the text before this text, after leading whitespace is removed. It is not a stop text,
            because answers that begin with a line break would then be empty.
        runs_code: whether ``measure`` runs the code that the model wrote. It then takes the option
            ``confirm_run_unsafe_code`` of :func:`~cocoa_integrations.evaluation.generated_code.passes`.
    """

    name: str
    read: Callable[[Record, str], Sample]
    columns: tuple[Column, ...]
    measure: Callable[..., dict[str, float]]
    multiple_choice: bool = False
    until: tuple[str, ...] = ()
    max_new_tokens: int = 128
    ends_at: str = ""
    runs_code: bool = False

    def requests(self, sample: Sample) -> int:
        """The number of requests to the model: one, or one for each choice."""
        return len(sample.choices) if self.multiple_choice else 1

    def answer(self, text: str) -> str:
        """The answer within a generated text."""
        text = text.strip()
        return text.partition(self.ends_at)[0].rstrip() if self.ends_at else text


def find_task(name: str) -> EvalTask:
    """The task with a name, in which ``-`` and ``_`` are equivalent.

    Raises:
        ConfigError: the task is unknown.
    """
    key = name.replace("-", "_").lower()
    if key not in TASKS:
        raise ConfigError(unknown([name], TASKS, what="task"))
    return TASKS[key]


# --- TruthfulQA


def _truthfulqa(record: Record, number: str) -> Sample:
    question = record.text("Question", "question")
    best = record.text("Best Answer", "best_answer")
    correct = record.texts("Correct Answers", "correct_answers", separator=";")
    incorrect = record.texts("Incorrect Answers", "incorrect_answers", separator=";")
    # as in TruthfulQA: every answer ends with a full stop, and the best one is one of the correct ones
    closed = dict.fromkeys(_closed(answer) for answer in (best, *correct))
    return Sample(
        id=number,
        question=question,
        prompt=prompts.truthfulqa(question),
        references=list(closed),
        incorrect=list(dict.fromkeys(map(_closed, incorrect))),
    )


def _closed(answer: str) -> str:
    return answer if answer.endswith(".") else f"{answer}."


def _measure_choices(sample: Sample, scores: Sequence[float]) -> dict[str, float]:
    correct, incorrect = scores[: len(sample.references)], scores[len(sample.references) :]
    return {
        "mc1": metrics.mc1(correct[0], incorrect),
        "mc2": metrics.mc2(correct, incorrect),
        "mc3": metrics.mc3(correct, incorrect),
    }


def _measure_truthfulqa(sample: Sample, answer: str) -> dict[str, float]:
    closest = [metrics.rouge_l(answer, answers) for answers in (sample.references, sample.incorrect)]
    return {"rejected": metrics.rejected(answer), "rouge_l_acc": float(closest[0] > closest[1])}


# --- Natural Questions


def _nq(record: Record, number: str) -> Sample:
    question = record.text("question")
    context = None
    if "ctxs" in record.values:
        passages = record.values["ctxs"]
        if not isinstance(passages, list) or not passages or not isinstance(passages[0], dict):
            raise DataError(f"{record.where}: 'ctxs' must be a list of passages, not an empty one")
        context = Record(f"{record.where}, 'ctxs'", passages[0]).text("text")
    elif "context" in record.values:
        context = record.text("context")
    references = _one_or_more(record, "answers", "answer")
    prompt = prompts.natural_questions(question, context)
    key = _own_id(record, number)
    return Sample(id=key, question=question, prompt=prompt, references=references, context=context or "")


def _nq_swap(record: Record, number: str) -> Sample:
    question = record.text("question")
    context = record.text("sub_context")
    prompt = prompts.natural_questions(question, context)
    references = _one_or_more(record, "sub_answer")
    key = _own_id(record, number)
    return Sample(id=key, question=question, prompt=prompt, references=references, context=context)


def _own_id(record: Record, number: str) -> str:
    """The id of a record, for data sets that are published both with and without ids."""
    return record.identity("id") if "id" in record.values else number


def _one_or_more(record: Record, *names: str) -> list[str]:
    """A list of texts. A column with a single text gives a list of one."""
    value = next((record.values[name] for name in names if name in record.values), None)
    return [record.text(*names)] if isinstance(value, str) else record.texts(*names)


def _measure_short_answer(sample: Sample, answer: str) -> dict[str, float]:
    return {
        "em": metrics.exact_match(answer, sample.references),
        "f1": metrics.f1(answer, sample.references),
    }


# --- summaries


def _summary(column: str, prompt: Callable[[str], str], record: Record, number: str) -> Sample:
    source = record.text(column)
    return Sample(
        id=record.identity("id"),
        question=source,
        prompt=prompt(source),
        references=[record.text("summary")],
        context=source,
    )


def _measure_summary(sample: Sample, answer: str) -> dict[str, float]:
    return {"rouge_l": metrics.rouge_l(answer, sample.references)}


# --- code


def _mbpp(record: Record, number: str) -> Sample:
    task, tests = record.text("prompt", "text"), record.texts("test_list")
    before = next((name for name in ("test_imports", "test_setup_code") if record.values.get(name)), None)
    setup = [] if before is None else _one_or_more(record, before)
    return Sample(
        id=record.identity("task_id"),
        question=task,
        prompt=prompts.mbpp(task, tests),
        references=[record.text("code")],
        tests=[*setup, *tests],
    )


def _measure_code(sample: Sample, answer: str, *, confirm_run_unsafe_code: bool = False) -> dict[str, float]:
    passed = passes(code_of(answer), sample.tests, confirm_run_unsafe_code=confirm_run_unsafe_code)
    return {"pass_at_1": float(passed)}


# --- arithmetic


def _gsm8k(record: Record, number: str) -> Sample:
    question, answer = record.text("question"), record.text("answer")
    if metrics.last_number(answer) is None:
        raise DataError(f"{record.where}: 'answer' contains no number")
    key = _own_id(record, number)
    return Sample(id=key, question=question, prompt=prompts.gsm8k(question), references=[answer])


def _measure_number(sample: Sample, answer: str) -> dict[str, float]:
    return {"accuracy": metrics.same_number(answer, sample.references[0])}


_NQ = (Column("em", "EM (%)"), Column("f1", "F1", scale=1, decimals=4))
_TRUTHFULQA = (
    Column("rejected", "Rej. rate (%)", better="less"),
    Column("rouge_l_acc", "ROUGE-L closer to true (%)"),
)
_ROUGE = (Column("rouge_l", "ROUGE-L", scale=1, decimals=4),)

_NEXT_QUESTION = ("\nQuestion:", "\nContext:")
_LINE, _PARAGRAPH = "\n", "\n\n"


def _summary_task(name: str, column: str, prompt: Callable[[str], str], *, until: str) -> EvalTask:
    return EvalTask(
        name,
        partial(_summary, column, prompt),
        _ROUGE,
        _measure_summary,
        until=(until,),
        max_new_tokens=64,
        ends_at=_PARAGRAPH,
    )


TASKS: Mapping[str, EvalTask] = {
    task.name: task
    for task in (
        EvalTask(
            "truthfulqa_gen",
            _truthfulqa,
            _TRUTHFULQA,
            _measure_truthfulqa,
            until=("\nQuestion:",),
            ends_at=_PARAGRAPH,
            max_new_tokens=64,
        ),
        EvalTask(
            "truthfulqa_mc",
            _truthfulqa,
            (Column("mc1", "MC1 (%)"), Column("mc2", "MC2 (%)"), Column("mc3", "MC3 (%)")),
            _measure_choices,
            multiple_choice=True,
        ),
        EvalTask("nq", _nq, _NQ, _measure_short_answer, until=_NEXT_QUESTION, ends_at=_LINE, max_new_tokens=32),
        EvalTask(
            "nq_swap", _nq_swap, _NQ, _measure_short_answer, until=_NEXT_QUESTION, ends_at=_LINE, max_new_tokens=32
        ),
        _summary_task("samsum", "dialogue", prompts.samsum, until="\nDialogue:"),
        _summary_task("xsum", "document", prompts.xsum, until="\nDocument:"),
        EvalTask(
            "mbpp",
            _mbpp,
            (Column("pass_at_1", "Pass@1", scale=1, decimals=4),),
            _measure_code,
            until=("[/PYTHON]",),
            max_new_tokens=256,
            runs_code=True,
        ),
        EvalTask(
            "gsm8k",
            _gsm8k,
            (Column("accuracy", "Accuracy (%)"),),
            _measure_number,
            until=("\nQuestion:",),
            max_new_tokens=256,
        ),
    )
}


def load_samples(task: str, path: str | Path, *, limit: int | None = None, shuffle: int | None = None) -> list[Sample]:
    """Read and validate a data file, and return its samples.

    Args:
        task: the name of the task.
        path: a CSV, JSON, JSON lines (both also gzipped) or parquet file, or a folder that contains one.
        limit: maximum number of samples.
        shuffle: seed for shuffling the samples before ``limit`` applies.

    Raises:
        DataError: the file cannot be read, a record is invalid, or two records have the same id.
        ConfigError: the task is unknown, or the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 (got {limit})")
    read = find_task(task).read
    samples: list[Sample] = []
    first: dict[str, str] = {}
    for number, record in enumerate(read_records(find_file(path))):
        sample = read(record, str(number))
        if sample.id in first:
            raise DataError(f"{record.where}: the id {sample.id!r} is already used by {first[sample.id]}")
        first[sample.id] = record.where
        samples.append(sample)
    if shuffle is not None:
        random.Random(shuffle).shuffle(samples)
    return samples[:limit]


def describe_data(path: str | Path, *, shuffle: int | None = None) -> dict[str, Any]:
    """The data entry of the settings of a run: the name of the file, the digest of its content, and the shuffle seed.

    Raises:
        DataError: the file does not exist.
    """
    file = find_file(path)
    return {"file": file.name, "sha256": fingerprint(file), "shuffle": shuffle}
