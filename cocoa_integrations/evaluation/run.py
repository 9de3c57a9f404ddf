"""Evaluation runs: every sample of a task is answered and measured with every arm, and stored row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine import METHODS, CocoaConfig, Span, __version__
from cocoa_engine.errors import ConfigError, DataError, PromptError
from cocoa_integrations.evaluation.arms import Arm
from cocoa_integrations.evaluation.chunks import Chunk, Engines, Row, chunk_size, chunks_of, keys_in_order
from cocoa_integrations.evaluation.files import fingerprint
from cocoa_integrations.evaluation.folder import RESULTS, SAMPLES, TABLE, RunFolder, open_folder
from cocoa_integrations.evaluation.generated_code import require_confinement
from cocoa_integrations.evaluation.metrics import rejected
from cocoa_integrations.evaluation.statistics import statistics
from cocoa_integrations.evaluation.table import report
from cocoa_integrations.evaluation.table_text import markdown
from cocoa_integrations.evaluation.tasks import EvalTask, Sample

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

FORMAT = 1


def evaluate(
    engine: CocoaEngine | Engines | Callable[[], CocoaEngine | Engines],
    task: EvalTask,
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    out: str | Path,
    *,
    config: CocoaConfig | None = None,
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    limit: int | None = None,
    paper_model: str | None = None,
    confirm_run_unsafe_code: bool = False,
    begin: Callable[[int, int], None] = lambda done, total: None,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Run or resume an evaluation, and write its results.

    Args:
        engine: the engine, or a function that loads it. It is called only if there is work left. It can also be
            many engines in other processes; the rows are the same.
        task: one of :data:`~cocoa_integrations.evaluation.tasks.TASKS`.
        samples: from :func:`~cocoa_integrations.evaluation.data.load_samples`.
        arms: from :func:`~cocoa_integrations.evaluation.arms.make_arms`. The first is the baseline of the table.
        out: the folder for ``settings.json``, ``samples.jsonl``, ``results.json`` and ``table.md``.
        config: the settings that all arms share. ``max_new_tokens`` defaults to that of the task, and the stop texts of
            the task are added.
        model: the description of the model. Needed if ``engine`` is a function.
        data: the source of the samples, from :func:`~cocoa_integrations.evaluation.data.describe_data`. It is stored
            with the settings.
        limit: the limit with which the samples were loaded. It is stored with the settings; a later run may raise it.
        paper_model: the model of the paper in the table. Default: the most similar one.
        confirm_run_unsafe_code: run the code that the model writes, which ``mbpp`` needs, also where bubblewrap does
            not confine it.
        begin: called with the numbers of existing and of all rows.
        advance: called with the number of added rows.

    Returns:
        The content of ``results.json``.

    Raises:
        ConfigError: the folder contains a run with other settings or samples, the task runs code that nothing
            confines, or the file of DeCoRe's heads cannot be read.
        DataError: the files in the folder were changed after they were written.
    """
    if task.runs_code:
        require_confinement(confirm_run_unsafe_code)
        task = replace(task, measure=partial(task.measure, confirm_run_unsafe_code=confirm_run_unsafe_code))
    if not samples or not arms:
        raise ConfigError("an evaluation needs at least one sample and one arm")
    shared = shared_settings(task, config or CocoaConfig())
    if model is None:
        if callable(engine) or isinstance(engine, Engines):
            raise ConfigError("give model=... to describe the model that the function loads")
        model = {"name": engine.model_name, "dtype": str(engine.held_model.dtype)}
    settings = {
        "format": FORMAT,
        "version": __version__,
        "task": task.name,
        "model": dict(model),
        "arms": sorted(map(str, arms)),
        "decoding": shared.model_dump(mode="json", exclude={"method", "metric", "alpha"}),
        "decore_heads": _heads(arms, shared),
        "data": None if data is None else dict(data),
        "limit": limit,
    }
    with open_folder(Path(out), settings) as folder:
        require_same_samples(folder, samples)
        _require_metrics(folder, task)
        begin(len(folder.rows), len(samples) * len(arms))
        if len(folder.rows) < len(samples) * len(arms):
            loaded = engine() if callable(engine) else engine
            for rows in _rows(loaded, task, samples, arms, shared, folder):
                folder.append(rows)
                advance(len(rows))
            if isinstance(loaded, Engines):  # the rows came in any order
                size = chunk_size(task, loaded.batch_size)
                folder.sort(keys_in_order(samples, arms, size))
        results = {"settings": settings, "samples": len(samples), "arms": summarise(task, arms, folder.rows.values())}
        folder.write(RESULTS, dumps(results, indent=2, ensure_ascii=False) + "\n")
        folder.write(TABLE, markdown(report(task, results, paper_model)))
    return results


def summarise(task: EvalTask, arms: Sequence[Arm], rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each arm, the counts of failed, empty and rejected answers, and the statistics of every metric.

    See :func:`~cocoa_integrations.evaluation.statistics.statistics`.
    """
    rows = list(rows)
    summary: list[dict[str, Any]] = []
    first: dict[str, dict[str, float]] = {}
    for arm in arms:
        own = [row for row in rows if row["arm"] == str(arm)]
        values = {column.metric: {row["id"]: row["metrics"][column.metric] for row in own} for column in task.columns}
        summary.append(
            {
                **arm._asdict(),
                "samples": len(own),
                "errors": sum("error" in row for row in own),
                "empty": sum(not row["answer"] for row in own),
                "rejected": sum(rejected(row["answer"]) == 1 for row in own),
                "metrics": {name: statistics(each, first.get(name)) for name, each in values.items()},
            }
        )
        first = first or values
    return summary


def shared_settings(task: EvalTask, config: CocoaConfig) -> CocoaConfig:
    """The settings of a task: its length limit, unless ``config`` has one, and its stop texts."""
    given = config.model_fields_set
    length = config.max_new_tokens if "max_new_tokens" in given else task.max_new_tokens
    return config.replace(max_new_tokens=length, stop=tuple(dict.fromkeys((*task.until, *config.stop))))


def _heads(arms: Sequence[Arm], config: CocoaConfig) -> str | None:
    """The digest of DeCoRe's file of heads, if an arm uses it."""
    if config.decore_heads is None or all(arm.method != "decore" for arm in arms):
        return None
    try:
        return fingerprint(Path(config.decore_heads))
    except OSError as error:
        raise ConfigError(f"decore_heads: {config.decore_heads} cannot be read ({error})") from None


def require_same_samples(folder: RunFolder, samples: Sequence[Sample]) -> None:
    """Check that the rows of a folder are of these samples.

    Raises:
        ConfigError: they are not.
    """
    now = {sample.id: identity(sample) for sample in samples}
    for (_, key), row in folder.rows.items():
        if now.get(key) != row["sample"]:
            raise ConfigError(
                f"{folder.path} contains a run on other samples ({key!r} differs): the data, its order or the prompts "
                "have changed. Name another folder"
            )


def _require_metrics(folder: RunFolder, task: EvalTask) -> None:
    for (arm, key), row in folder.rows.items():
        for column in task.columns:
            if not isinstance(row["metrics"].get(column.metric), (int, float)):
                raise DataError(
                    f"{folder.path / SAMPLES}: {arm}, sample {key!r}: {column.metric!r} is not a number; the file was "
                    "changed"
                )


def identity(sample: Sample) -> str:
    """A digest of a sample."""
    return sha256(sample.model_dump_json().encode()).hexdigest()[:16]


def _rows(
    engine: CocoaEngine | Engines,
    task: EvalTask,
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    shared: CocoaConfig,
    folder: RunFolder,
) -> Iterator[list[Row]]:
    """The missing rows."""
    if isinstance(engine, Engines):
        size = chunk_size(task, engine.batch_size)
        yield from engine.measure(list(chunks_of(samples, arms, folder.rows, size)), task, shared)
        return
    for chunk in chunks_of(samples, arms, folder.rows, chunk_size(task, engine.runtime.max_batch_size)):
        yield from measured(engine, task, chunk, shared)


def measured(engine: CocoaEngine, task: EvalTask, chunk: Chunk, shared: CocoaConfig) -> Iterator[list[Row]]:
    """The rows of a chunk, those of one arm together.

    For a multiple-choice question, the forward passes are run once for all arms that need the same statistics.

    Args:
        engine: the engine.
        task: the task.
        chunk: the samples.
        shared: the settings that all arms share.
    """
    measure: Callable[..., Iterator[Row]] = partial(_score, {}) if task.multiple_choice else _generate
    for arm, missing in chunk:
        yield [
            {
                "arm": str(arm),
                "id": sample.id,
                **arm._asdict(),
                "sample": identity(sample),
                **sample.model_dump(include={"question", "references", "incorrect", "context"}),
                **values,
            }
            for sample, values in zip(missing, measure(engine, task, missing, arm.config(shared)), strict=True)
        ]


def _generate(
    engine: CocoaEngine, task: EvalTask, samples: Sequence[Sample], config: CocoaConfig
) -> Iterator[dict[str, Any]]:
    prompts = [sample.prompt for sample in samples]
    try:
        generations = engine.generate_batch(prompts, config=config)
    except PromptError as error:  # a prompt does not fit; raised before any work
        if len(samples) > 1:
            for sample in samples:
                yield from _generate(engine, task, [sample], config)
        else:
            yield _failed(task, error)
        return
    for sample, generation in zip(samples, generations, strict=True):
        answer = task.answer(generation.text)
        yield {
            "answer": answer,
            "metrics": task.measure(sample, answer),
            "finish_reason": generation.finish_reason,
            "usage": generation.usage.model_dump(mode="json"),
            "spans": _as_json(generation.spans),
        }


def _score(
    known: dict[tuple[str, str], list[Span]],
    engine: CocoaEngine,
    task: EvalTask,
    samples: Sequence[Sample],
    config: CocoaConfig,
) -> Iterator[dict[str, Any]]:
    """Score the choices of multiple-choice questions.

    Args:
        known: a cache of the span of each choice, by sample id and, for methods with their own forward passes, by
            method. New spans are added.
    """
    from cocoa_engine import rescore  # loads torch, which is not needed to read a finished run

    engine = engine.without_calibrator()  # it is for short spans, and a choice is one span
    for sample in samples:
        choices = sample.choices
        # the methods without forward passes of their own share one result
        family = config.method if METHODS[config.method].needs_own_passes else ""
        if (family, sample.id) not in known:
            try:
                known[family, sample.id] = [
                    generation.spans[0] for generation in engine.score(sample.prompt, choices, config=config)
                ]
            except PromptError as error:
                yield _failed(task, error)
                continue
        spans = known[family, sample.id]
        if not family:
            spans = [rescore(span, config) for span in spans]
        scores = [span.score for span in spans]
        yield {
            "answer": choices[scores.index(max(scores))].strip(),
            "metrics": task.measure(sample, scores),
            "choices": [
                {
                    "text": span.text,
                    "correct": number < len(sample.references),
                    "score": span.score,
                    "spans": _as_json([span]),
                }
                for number, span in enumerate(spans)
            ],
        }


def _as_json(spans: Sequence[Span]) -> list[Any]:
    """The spans as plain JSON, in which infinite numbers are strings."""
    return [loads(span.model_dump_json()) for span in spans]


def _failed(task: EvalTask, error: Exception) -> dict[str, Any]:
    """The row of a sample that cannot be answered. It counts as a wrong answer."""
    return {"answer": "", "error": str(error), "metrics": {column.metric: 0.0 for column in task.columns}}
