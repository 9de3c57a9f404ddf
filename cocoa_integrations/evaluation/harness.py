"""Evaluation runs: lm-evaluation-harness runs a task once for each arm, and the answers are stored row by row.

The folder of a run has ``settings.json``, and ``samples.jsonl`` with a line for each sample of each arm.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cocoa_engine import CocoaConfig, __version__
from cocoa_engine.errors import ConfigError, DataError
from cocoa_engine.files import LOCK, locked, write_file
from cocoa_engine.integration import need
from cocoa_engine.lab.files import parsed, read_json
from cocoa_integrations.evaluation.files import fingerprint, json_lines, read_lines
from cocoa_integrations.evaluation.generated_code import require_confinement
from cocoa_integrations.evaluation.metrics import rejected, statistics
from cocoa_integrations.evaluation.table import report
from cocoa_integrations.evaluation.tasks import Arm, EvalTask, Sample

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_integrations.evaluation.harness_task import Engines

SETTINGS, SAMPLES = "settings.json", "samples.jsonl"
Row = dict[str, Any]
"""A line of ``samples.jsonl``."""

Rows = dict[tuple[str, str], Row]
"""Rows by arm and sample id."""

_Finite = Annotated[float, Field(ge=-1e100, le=1e100)]  # sums of larger numbers might not be finite


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)  # the values are used as they are in the file


class _Row(_Strict):
    arm: str
    id: str
    sample: str
    method: str
    metric: str | None
    alpha: float | None
    question: str
    context: str
    references: list[str]
    incorrect: list[str]
    answer: str
    metrics: Annotated[dict[str, _Finite], Field(min_length=1)]

    @model_validator(mode="after")
    def _has_both_or_none(self) -> "_Row":
        if (self.metric is None) != (self.alpha is None):
            raise ValueError("metric and alpha belong together")
        return self


class _Model(_Strict):
    name: str


class _Decoding(_Strict):
    middle_layers: Annotated[list[int], Field(min_length=2, max_length=2)] | None


class _Run(_Strict):
    task: str
    model: _Model
    decoding: _Decoding


@contextmanager
def new_run(path: Path, settings: Mapping[str, Any]) -> Iterator[Rows]:
    """Open the folder of a run, new or existing, exclusively for this process, and yield the rows that it has.

    A folder without rows, for example because the model could not be loaded, can be used with other settings.

    Raises:
        ConfigError: the folder contains a run with other settings or other files, another process is using it, or it
            cannot be written.
        DataError: its files were changed after they were written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
        raise ConfigError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    with locked(path):
        rows, now, file = _read_rows(path / SAMPLES), loads(dumps(settings)), path / SETTINGS
        there = _read_settings(file) if file.exists() else None
        if there is None:
            if other_files := sorted(entry.name for entry in path.iterdir() if entry.name != LOCK):
                raise ConfigError(f"{path} is not empty and contains no run ({other_files[0]}); name a new folder")
        elif rows and (differences := "; ".join(_differences(there, now))):
            raise ConfigError(
                f"{path} contains a run with other settings: {differences}. Name another folder, or give the same "
                "settings to resume the run"
            )
        if there != now:
            write_file(file, dumps(now, indent=2, ensure_ascii=False) + "\n")
        yield rows


@contextmanager
def finished_run(path: Path) -> Iterator[tuple[dict[str, Any], Rows]]:
    """Open the folder of an existing run, and yield its settings and its rows.

    Raises:
        ConfigError: the folder contains no run, or another process is using it.
        DataError: it has no answers, or its files were changed after they were written.
    """
    if not (path / SETTINGS).is_file():
        raise ConfigError(f"{path} contains no run: it has no {SETTINGS}; name the --out folder of a `cocoa eval`")
    with locked(path):
        settings = _read_settings(path / SETTINGS)
        parsed(_Run, settings, f"{path / SETTINGS} does not contain the settings of a run")
        rows = _read_rows(path / SAMPLES)
        if not rows:
            raise DataError(f"{path} has no answers yet: its {SAMPLES} is empty; run `cocoa eval` first")
        yield settings, rows


def _differences(there: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in dict.fromkeys((*there, *now)):
        old, new = there.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{name}.")
        # a larger limit resumes the run: its samples are then the first ones
        elif old != new and not (name == "limit" and old is not None and (new is None or new > old)):
            yield f"{prefix}{name} is {dumps(old)} there, {dumps(new)} now"


def _read_settings(file: Path) -> dict[str, Any]:
    there = read_json(file)
    try:
        dumps(there, allow_nan=False)  # results repeat them, and are JSON
    except ValueError:
        there = None
    if not isinstance(there, dict):
        raise DataError(f"{file} does not contain the settings of a run; name another folder")
    return there


def _read_rows(file: Path) -> Rows:
    rows: Rows = {}
    for number, row in enumerate(read_lines(file, _Row), start=1):
        if (key := (row["arm"], row["id"])) in rows:
            raise DataError(f"{file}, line {number}: {key[0]}, sample {key[1]!r}, occurs twice; it was changed")
        rows[key] = row
    return rows


PART = 50
"""Samples of one run of the harness. Their rows are written after it, and an interrupted evaluation continues there."""


def evaluate(
    engine: "CocoaEngine | Engines | Callable[[], CocoaEngine | Engines]",
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
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Run or resume an evaluation, and write its results.

    Args:
        engine: the engine, or a function that loads it. It is called only if there is work left. It can also be
            many engines in other processes; the rows are the same.
        task: one of :data:`~cocoa_integrations.evaluation.tasks.TASKS`.
        samples: from :func:`~cocoa_integrations.evaluation.tasks.load_samples`.
        arms: from :func:`~cocoa_integrations.evaluation.tasks.make_arms`. The first is the baseline of the table.
        out: the folder for ``settings.json``, ``samples.jsonl``, ``results.json`` and ``table.md``.
        config: the settings that all arms share. ``max_new_tokens`` defaults to that of the task, and the stop texts of
            the task are added.
        model: the description of the model. Needed if ``engine`` is a function.
        data: the source of the samples, from :func:`~cocoa_integrations.evaluation.tasks.describe_data`. It is stored
            with the settings.
        limit: the limit with which the samples were loaded. It is stored with the settings; a later run may raise it.
        paper_model: the model of the paper in the table. Default: the most similar one.
        confirm_run_unsafe_code: run the code that the model writes, which ``mbpp`` needs, also where bubblewrap does
            not confine it.
        advance: called with the number of answers or choices that exist, and then with that of added ones.

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
    config = config or CocoaConfig()
    length = config.max_new_tokens if "max_new_tokens" in config.model_fields_set else task.max_new_tokens
    shared = config.replace(max_new_tokens=length, stop=tuple(dict.fromkeys((*task.until, *config.stop))))
    decore_heads = shared.decore_heads if any(arm.method == "decore" for arm in arms) else None
    try:
        heads = None if decore_heads is None else fingerprint(Path(decore_heads))
    except OSError as error:
        raise ConfigError(f"decore_heads: {decore_heads} cannot be read ({error})") from None
    if model is None:
        from cocoa_engine import CocoaEngine  # which loads torch

        if not isinstance(engine, CocoaEngine):
            raise ConfigError("give model=... to describe the model that the function loads")
        model = {"name": engine.model_name, "dtype": str(engine.held_model.dtype)}
    settings = {
        "format": 2,
        "version": __version__,
        "task": task.name,
        "model": dict(model),
        "decoding": shared.model_dump(mode="json", exclude={"method", "metric", "alpha"}),
        "decore_heads": heads,
        "data": None if data is None else dict(data),
        "limit": limit,
    }
    out = Path(out)
    with new_run(out, settings) as rows:
        digests = {sample.id: sample.digest for sample in samples}
        for (_, key), row in rows.items():
            if digests.get(key) != row["sample"]:
                raise ConfigError(
                    f"{out} contains a run on other samples ({key!r} differs): the data, its order or the prompts "
                    "have changed. Name another folder"
                )
        ordered = [(str(arm), sample.id) for arm in arms for sample in samples]
        missing = {arm: [sample for sample in samples if (str(arm), sample.id) not in rows] for arm in arms}
        for some in missing.values():
            advance(task.requests(samples) - task.requests(some))
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
                    in_order = (rows[key] for key in dict.fromkeys((*ordered, *rows)) if key in rows)
                    write_file(out / SAMPLES, json_lines(in_order))

        def measured(own: Sequence[Row]) -> Measured:
            names = [column.metric for column in task.columns]
            values = {name: {row["id"]: row["metrics"][name] for row in own} for name in names}
            return {"rejected": sum(rejected(row["answer"]) == 1 for row in own)}, values, {}

        summary = summarise([rows[key] for key in ordered], measured)
        results = {"settings": settings, "samples": len(samples), "arms": summary}
        write_results(out, "results", results, report(task, results, paper_model), table="table")
    return results


Measured = tuple[dict[str, int], dict[str, dict[str, float]], dict[str, float | None]]
"""Of the rows of an arm: further counts, the values of each metric by sample, and further means."""

Measure = Callable[[list[Row]], Measured]


def summarise(rows: Iterable[Row], measure: Measure) -> list[dict[str, Any]]:
    """For each arm its settings, counts of its answers, and the statistics of every metric."""
    rows = list(rows)
    summary: list[dict[str, Any]] = []
    first: dict[str, dict[str, float]] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        counts, values, means = measure(own)
        metrics = {name: {"mean": mean} for name, mean in means.items()}
        metrics |= {
            name: statistics(column, first.get(name)) if column else {"mean": None} for name, column in values.items()
        }
        settings = {name: own[0][name] for name in ("method", "metric", "alpha")}
        empty = sum(not row["answer"] for row in own)
        summary.append({**settings, "samples": len(own), "empty": empty, **counts, "metrics": metrics})
        first = first or values
    return summary


def write_results(folder: Path, name: str, results: Mapping[str, Any], shown: str, *, table: str | None = None) -> None:
    """Write results to ``NAME.json`` in the folder of a run, and their tables to ``NAME.md`` or ``TABLE.md``."""
    write_file(folder / f"{name}.json", dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_file(folder / f"{table or name}.md", shown)
