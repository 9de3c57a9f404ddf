"""Evaluation runs: lm-evaluation-harness runs a task once for each arm, and the answers are stored row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine import CocoaConfig, __version__
from cocoa_engine.errors import ConfigError
from cocoa_engine.optional import need
from cocoa_engine.output_files import write_file
from cocoa_integrations.evaluation.arms import Arm
from cocoa_integrations.evaluation.files import fingerprint
from cocoa_integrations.evaluation.generated_code import require_confinement
from cocoa_integrations.evaluation.metrics import rejected
from cocoa_integrations.evaluation.samples import RESULTS, TABLE, Rows, new_run, write_rows
from cocoa_integrations.evaluation.statistics import statistics
from cocoa_integrations.evaluation.table import report
from cocoa_integrations.evaluation.table_text import markdown
from cocoa_integrations.evaluation.tasks import EvalTask, Sample

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_integrations.evaluation.harness_task import Engines

FORMAT = 2
PART = 50
"""Samples of one run of the harness. Their rows are written after it, and an interrupted evaluation continues there."""


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
        begin: called with the numbers of existing and of all answers or choices.
        advance: called with the number of added ones.

    Returns:
        The content of ``results.json``.

    Raises:
        ConfigError: the folder contains a run with other settings or samples, the task runs code that nothing
            confines, or the file of DeCoRe's heads cannot be read.
        DataError: the files in the folder were changed after they were written.
    """
    if task.runs_code:
        require_confinement(confirm_run_unsafe_code)
    if not samples or not arms:
        raise ConfigError("an evaluation needs at least one sample and one arm")
    need("lm_eval.api.task", extra="eval", what="an evaluation")
    shared = shared_settings(task, config or CocoaConfig())
    if model is None:
        from cocoa_engine import CocoaEngine  # which loads torch

        if not isinstance(engine, CocoaEngine):
            raise ConfigError("give model=... to describe the model that the function loads")
        model = {"name": engine.model_name, "dtype": str(engine.held_model.dtype)}
    settings = {
        "format": FORMAT,
        "version": __version__,
        "task": task.name,
        "model": dict(model),
        "decoding": shared.model_dump(mode="json", exclude={"method", "metric", "alpha"}),
        "decore_heads": _heads(arms, shared),
        "data": None if data is None else dict(data),
        "limit": limit,
    }
    out = Path(out)
    with new_run(out, settings) as rows:
        _require_same_samples(out, rows, samples)
        ordered = [(str(arm), sample.id) for arm in arms for sample in samples]
        missing = {arm: [sample for sample in samples if (str(arm), sample.id) not in rows] for arm in arms}
        requests = [sum(map(task.requests, some)) for some in (samples, *missing.values())]
        begin(requests[0] * len(arms) - sum(requests[1:]), requests[0] * len(arms))
        if any(missing.values()):
            from cocoa_integrations.evaluation.harness_task import ArmModel, Engines, run_arm  # loads the harness

            loaded = engine() if callable(engine) else engine
            lm = ArmModel(loaded, advance)
            size = len(samples) if isinstance(loaded, Engines) else PART  # many engines load the model for each run
            for arm, some in missing.items():
                for start in range(0, len(some), size):
                    part = some[start : start + size]
                    own = run_arm(lm, task, arm, part, arm.config(shared), confirm_run_unsafe_code)
                    rows |= {(row["arm"], row["id"]): row for row in own}
                    write_rows(out, [rows[key] for key in dict.fromkeys((*ordered, *rows)) if key in rows])
        summary = summarise(task, arms, [rows[key] for key in ordered])
        results = {"settings": settings, "samples": len(samples), "arms": summary}
        write_file(out / RESULTS, dumps(results, indent=2, ensure_ascii=False) + "\n")
        write_file(out / TABLE, markdown(report(task, results, paper_model)))
    return results


def summarise(task: EvalTask, arms: Sequence[Arm], rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each arm, the counts of empty and rejected answers, and the statistics of every metric.

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


def _require_same_samples(out: Path, rows: Rows, samples: Sequence[Sample]) -> None:
    """Check that the rows of a folder are of these samples.

    Raises:
        ConfigError: they are not.
    """
    now = {sample.id: sample.digest for sample in samples}
    for (_, key), row in rows.items():
        if now.get(key) != row["sample"]:
            raise ConfigError(
                f"{out} contains a run on other samples ({key!r} differs): the data, its order or the prompts "
                "have changed. Name another folder"
            )
