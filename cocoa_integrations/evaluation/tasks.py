"""The tasks: how a record becomes a prompt, where its answer ends, and its metrics; and the arms of a comparison."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from cocoa_engine import METHODS, CocoaConfig
from cocoa_engine.errors import ConfigError, DataError, unknown
from cocoa_engine.lab.files import RowModel, parsed
from cocoa_integrations.evaluation import metrics, prompts
from cocoa_integrations.evaluation.files import find_file, fingerprint, read_records
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
        score = METHODS[CocoaConfig(method=method).method].score  # raises an error for an unknown method
        if score(-1.0, 0.5, 1.0) != score(-1.0, 0.5, 2.0):  # it depends on the disagreement and its weight
            arms += [Arm(method, metric, alpha) for metric in metrics for alpha in alphas]
        else:
            arms.append(Arm(method))
    for arm in arms:
        arm.config(CocoaConfig())
    return list(dict.fromkeys(arms))


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
        return sha256(self.model_dump_json().encode()).hexdigest()[:16]

    @property
    def choices(self) -> list[str]:
        """The answers of a multiple-choice question as they are scored, the correct ones first."""
        return [f" {answer}" for answer in (*self.references, *self.incorrect)]


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Id = Annotated[Text, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def _texts(value: Any, separator: str | None = None) -> Any:
    """A list of texts from one text: itself, or the parts that are not empty."""
    if not isinstance(value, str):
        return value
    return [value] if separator is None else [part for part in value.split(separator) if part.strip()]


Texts = Annotated[list[Text], BeforeValidator(_texts), Field(min_length=1)]
_Setup = Annotated[list[Text], BeforeValidator(lambda value: _texts(value or []))]
_Parts = Annotated[list[Text], BeforeValidator(partial(_texts, separator=";")), Field(min_length=1)]
_Numbers = Annotated[list[Annotated[Text, Field(pattern=r"\d")]], BeforeValidator(_texts)]


class _Row(RowModel):
    """A record of a task's data. Text in its columns is stripped, and is not empty."""

    id: Id | None = None
    question: Text
    context: Text | None = None
    references: Texts

    def sample(self, number: str, prompt: str) -> Sample:
        """The sample; ``number`` is the id of a record that has none."""
        return Sample(**{"id": number, **self.model_dump(exclude_none=True), "prompt": prompt})


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
        row: a record of its data.
        prompt: the prompt for a record.
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
    row: type[_Row]
    prompt: Callable[[Any], str]
    columns: tuple[Column, ...]
    measure: Callable[..., dict[str, float]]
    multiple_choice: bool = False
    until: tuple[str, ...] = ()
    max_new_tokens: int = 128
    ends_at: str = ""
    runs_code: bool = False

    def requests(self, samples: Sequence[Sample]) -> int:
        """The number of requests to the model: one for each sample, or one for each choice."""
        return sum(len(sample.choices) for sample in samples) if self.multiple_choice else len(samples)

    def answer(self, text: str) -> str:
        """The answer within a generated text."""
        text = text.strip()
        return text.partition(self.ends_at)[0].rstrip() if self.ends_at else text


def find_task(name: str) -> EvalTask:
    """The task with a name, in which ``-`` and ``_`` are equivalent."""
    key = name.replace("-", "_").lower()
    if key not in TASKS:
        raise ConfigError(unknown([name], TASKS, what="task"))
    return TASKS[key]


class _TruthfulQA(_Row):
    question: Text = Field(validation_alias=AliasChoices("Question", "question"))
    best: Text = Field(validation_alias=AliasChoices("Best Answer", "best_answer"))
    references: _Parts = Field(validation_alias=AliasChoices("Correct Answers", "correct_answers"))
    incorrect: _Parts = Field(validation_alias=AliasChoices("Incorrect Answers", "incorrect_answers"))

    def sample(self, number: str, prompt: str) -> Sample:
        # as in TruthfulQA: every answer ends with a full stop, and the best one is one of the correct ones
        answers = {"references": [self.best, *self.references], "incorrect": self.incorrect}
        closed = {
            name: list(dict.fromkeys(f"{text.removesuffix('.')}." for text in texts)) for name, texts in answers.items()
        }
        return super().sample(number, prompt).model_copy(update=closed)


class _NQ(_Row):
    context: Text | None = Field(None, validation_alias=AliasChoices(AliasPath("ctxs", 0, "text"), "context"))
    references: Texts = Field(validation_alias=AliasChoices("answers", "answer"))


class _NQSwap(_NQ):
    context: Text = Field(validation_alias="sub_context")
    references: Texts = Field(validation_alias="sub_answer")


class _SAMSum(_Row):
    id: Id
    question: Text = Field(validation_alias="dialogue")
    context: Text = Field(validation_alias=AliasChoices("dialogue"))  # mypy refuses two fields with one alias
    references: Texts = Field(validation_alias="summary")


class _XSum(_SAMSum):
    question: Text = Field(validation_alias="document")
    context: Text = Field(validation_alias=AliasChoices("document"))


class _MBPP(_Row):
    id: Id = Field(validation_alias="task_id")
    question: Text = Field(validation_alias=AliasChoices("prompt", "text"))
    references: Texts = Field(validation_alias="code")
    test_list: Texts
    test_imports: _Setup = Field(default_factory=list)
    test_setup_code: _Setup = Field(default_factory=list)

    def sample(self, number: str, prompt: str) -> Sample:
        tests = [*(self.test_imports or self.test_setup_code), *self.test_list]
        return super().sample(number, prompt).model_copy(update={"tests": tests})


class _GSM8K(_Row):
    references: _Numbers = Field(validation_alias="answer", min_length=1)


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


def _measure_short_answer(sample: Sample, answer: str) -> dict[str, float]:
    return {"em": metrics.exact_match(answer, sample.references), "f1": metrics.f1(answer, sample.references)}


def _measure_code(sample: Sample, answer: str, *, confirm_run_unsafe_code: bool = False) -> dict[str, float]:
    passed = passes(code_of(answer), sample.tests, confirm_run_unsafe_code=confirm_run_unsafe_code)
    return {"pass_at_1": float(passed)}


_SHORT: Any = {
    "prompt": prompts.natural_questions,
    "columns": (Column("em", "EM (%)"), Column("f1", "F1", scale=1, decimals=4)),
    "measure": _measure_short_answer,
    "until": ("\nQuestion:", "\nContext:"),
    "max_new_tokens": 32,
    "ends_at": "\n",
}
_SUMMARY: Any = {
    "columns": (Column("rouge_l", "ROUGE-L", scale=1, decimals=4),),
    "measure": lambda sample, answer: {"rouge_l": metrics.rouge_l(answer, sample.references)},
    "ends_at": "\n\n",
    "max_new_tokens": 64,
}
_TASKS = (
    EvalTask(
        "truthfulqa_gen",
        _TruthfulQA,
        prompts.truthfulqa,
        (Column("rejected", "Rej. rate (%)", better="less"), Column("rouge_l_acc", "ROUGE-L closer to true (%)")),
        _measure_truthfulqa,
        until=("\nQuestion:",),
        ends_at="\n\n",
        max_new_tokens=64,
    ),
    EvalTask(
        "truthfulqa_mc",
        _TruthfulQA,
        prompts.truthfulqa,
        (Column("mc1", "MC1 (%)"), Column("mc2", "MC2 (%)"), Column("mc3", "MC3 (%)")),
        _measure_choices,
        multiple_choice=True,
    ),
    EvalTask("nq", _NQ, **_SHORT),
    EvalTask("nq_swap", _NQSwap, **_SHORT),
    EvalTask("samsum", _SAMSum, partial(prompts.summary, "Dialogue"), until=("\nDialogue:",), **_SUMMARY),
    EvalTask("xsum", _XSum, partial(prompts.summary, "Document"), until=("\nDocument:",), **_SUMMARY),
    EvalTask(
        "mbpp",
        _MBPP,
        prompts.mbpp,
        (Column("pass_at_1", "Pass@1", scale=1, decimals=4),),
        _measure_code,
        until=("[/PYTHON]",),
        max_new_tokens=256,
        runs_code=True,
    ),
    EvalTask(
        "gsm8k",
        _GSM8K,
        prompts.gsm8k,
        (Column("accuracy", "Accuracy (%)"),),
        lambda sample, answer: {"accuracy": metrics.same_number(answer, sample.references[0])},
        until=("\nQuestion:",),
        max_new_tokens=256,
    ),
)
TASKS: Mapping[str, EvalTask] = {task.name: task for task in _TASKS}


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
    kind = find_task(task)
    samples: list[Sample] = []
    first: dict[str, str] = {}
    for number, (where, value) in enumerate(read_records(find_file(path))):
        row = parsed(kind.row, value, where)
        sample = row.sample(str(number), kind.prompt(row))
        if sample.id in first:
            raise DataError(f"{where}: the id {sample.id!r} is already used by {first[sample.id]}")
        first[sample.id] = where
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
