"""A run: every sample of a task answered and measured under every arm, kept row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine import CocoaConfig, Span, __version__
from cocoa_engine.errors import ConfigError, DataError, PromptError
from cocoa_integrations.evaluation.arms import Arm
from cocoa_integrations.evaluation.files import fingerprint
from cocoa_integrations.evaluation.folder import RESULTS, SAMPLES, TABLE, RunFolder, open_folder
from cocoa_integrations.evaluation.table import markdown
from cocoa_integrations.evaluation.tasks import EvalTask, Sample

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

FORMAT = 1
_BATCHES = 2  # batches that are kept together: the more, the better they fill, and the more a kill costs


def evaluate(
    engine: CocoaEngine | Callable[[], CocoaEngine],
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
    run_code: bool = False,
    begin: Callable[[int, int], None] = lambda done, total: None,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Run, or go on with, an evaluation, and write its results.

    Args:
        engine: the engine, or what loads it; it is loaded only if something is left to do.
        task: one of :data:`~cocoa_integrations.evaluation.tasks.TASKS`.
        samples: from :func:`~cocoa_integrations.evaluation.data.load_samples`.
        arms: from :func:`~cocoa_integrations.evaluation.arms.make_arms`; the first is the baseline of the table.
        out: the folder: ``settings.json``, ``samples.jsonl``, ``results.json``, ``table.md``.
        config: the settings that all arms share. ``max_new_tokens`` is the task's unless it was set here, and the
            task's stop texts are added.
        model: what identifies the model; needed where ``engine`` is a loader.
        data: for the record: where ``samples`` are from, as
            :func:`~cocoa_integrations.evaluation.data.describe_data` says.
        limit: for the record: that ``samples`` are the first so many. A later run may raise it.
        paper_model: whose figures of the paper stand in the table; by default those of the most alike.
        run_code: allow tasks that run what the model wrote.
        begin: told how many rows there are already, and how many there will be.
        advance: told how many rows were added.

    Returns:
        What ``results.json`` holds.

    Raises:
        ConfigError: the folder holds a run with other settings or samples, the task runs code and may not, or the file
            of DeCoRe's heads cannot be read.
        DataError: the folder's files were changed by hand.
    """
    if task.runs_code and not run_code:
        raise ConfigError(
            f"{task.name} runs code that the model wrote, in a limited process: allow it with --run-code "
            "(run_code=True), best on a machine where nothing is to be lost"
        )
    if not samples or not arms:
        raise ConfigError("an evaluation needs at least one sample and one arm")
    shared = _shared(task, config or CocoaConfig())
    if model is None:
        if callable(engine):
            raise ConfigError("say by model=... which model the loader loads")
        model = {"name": engine.model_name, "dtype": str(engine.model.dtype)}
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
        _require_same_samples(folder, samples)
        _require_metrics(folder, task)
        begin(len(folder.rows), len(samples) * len(arms))
        if len(folder.rows) < len(samples) * len(arms):
            loaded = engine() if callable(engine) else engine
            for rows in _rows(loaded, task, samples, arms, shared, folder):
                folder.append(rows)
                advance(len(rows))
        results = {"settings": settings, "samples": len(samples), "arms": summarise(task, arms, folder.rows.values())}
        folder.write(RESULTS, dumps(results, indent=2, ensure_ascii=False) + "\n")
        folder.write(TABLE, markdown(task, results, paper_model))
    return results


def summarise(task: EvalTask, arms: Sequence[Arm], rows: Any) -> list[dict[str, Any]]:
    """The mean of every metric, with its standard error, for each arm."""
    rows = list(rows)
    summary = []
    for arm in arms:
        own = [row for row in rows if row["arm"] == str(arm)]
        figures = {}
        for column in task.columns:
            values = [row["metrics"][column.metric] for row in own]
            mean = math.fsum(values) / len(values)
            spread = math.fsum((value - mean) ** 2 for value in values)
            error = math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else None
            figures[column.metric] = {"mean": mean, "standard_error": error}
        summary.append(
            {
                **arm._asdict(),
                "samples": len(own),
                "errors": sum("error" in row for row in own),
                "empty": sum(not row["answer"] for row in own),
                "metrics": figures,
            }
        )
    return summary


def _shared(task: EvalTask, config: CocoaConfig) -> CocoaConfig:
    given = config.model_fields_set
    length = config.max_new_tokens if "max_new_tokens" in given else task.max_new_tokens
    return config.replace(max_new_tokens=length, stop=tuple(dict.fromkeys((*task.until, *config.stop))))


def _heads(arms: Sequence[Arm], config: CocoaConfig) -> str | None:
    """What tells DeCoRe's file of heads from another of that name."""
    if config.decore_heads is None or all(arm.method != "decore" for arm in arms):
        return None
    try:
        return fingerprint(Path(config.decore_heads))
    except OSError as error:
        raise ConfigError(f"decore_heads: {config.decore_heads} cannot be read ({error})") from None


def _require_same_samples(folder: RunFolder, samples: Sequence[Sample]) -> None:
    now = {sample.id: _identity(sample) for sample in samples}
    for (_, key), row in folder.rows.items():
        if now.get(key) != row["sample"]:
            raise ConfigError(
                f"{folder.path} holds a run on other samples ({key!r} is not what it was): the data, its order or the "
                "prompts have changed. Name another folder"
            )


def _require_metrics(folder: RunFolder, task: EvalTask) -> None:
    for (arm, key), row in folder.rows.items():
        for column in task.columns:
            if not isinstance(row["metrics"].get(column.metric), (int, float)):
                raise DataError(
                    f"{folder.path / SAMPLES}: {arm}, sample {key!r}, has no {column.metric!r} that is a number; the "
                    "file was changed"
                )


def _identity(sample: Sample) -> str:
    return sha256(sample.model_dump_json().encode()).hexdigest()[:16]


def _rows(
    engine: CocoaEngine,
    task: EvalTask,
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    shared: CocoaConfig,
    folder: RunFolder,
) -> Iterator[list[dict[str, Any]]]:
    """What is missing. The arms take turns, so that a killed run has the same samples of each, and a prompt is read
    once; of a multiple-choice question, the forward passes are run once for all arms that weigh the same figures."""
    size = 1 if task.multiple_choice else _BATCHES * engine.runtime.max_batch_size
    for start in range(0, len(samples), size):
        measure: Callable[..., Iterator[dict[str, Any]]] = partial(_score, {}) if task.multiple_choice else _generate
        for arm in arms:
            left = [one for one in samples[start : start + size] if (str(arm), one.id) not in folder.rows]
            if left:
                yield [
                    {
                        "arm": str(arm),
                        "id": sample.id,
                        **arm._asdict(),
                        "sample": _identity(sample),
                        **sample.model_dump(include={"question", "references", "incorrect", "context"}),
                        **measured,
                    }
                    for sample, measured in zip(left, measure(engine, task, left, arm.config(shared)), strict=True)
                ]


def _generate(
    engine: CocoaEngine, task: EvalTask, samples: Sequence[Sample], config: CocoaConfig
) -> Iterator[dict[str, Any]]:
    prompts = [sample.prompt for sample in samples]
    try:
        generations = engine.generate_batch(prompts, config=config)
    except PromptError as error:  # one of them does not fit: before any work was done
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
        known: by what takes passes of its own and the sample's id, the span of each choice; those found are added.
    """
    from cocoa_engine.decoding.result_builder import (
        scored_under,  # these load torch: a finished run is read without it
    )
    from cocoa_engine.scoring.rescoring import needs_more

    for sample in samples:
        choices = sample.choices
        family = config.method if needs_more(config) else ""  # the other methods weigh alike figures
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
            spans = [scored_under(span, config) for span in spans]
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
    """As plain JSON, in which what is infinite is a text."""
    return [loads(span.model_dump_json()) for span in spans]


def _failed(task: EvalTask, error: Exception) -> dict[str, Any]:
    """A sample that cannot be answered counts as answered wrongly, and is counted."""
    return {"answer": "", "error": str(error), "metrics": {column.metric: 0.0 for column in task.columns}}
