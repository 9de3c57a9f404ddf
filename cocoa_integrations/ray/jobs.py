"""Ray clusters, and the work that their actors share by Ray Data: ``cocoa score --ray`` and ``cocoa eval --ray``."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine import CocoaConfig, Runtime, __version__
from cocoa_engine.cli.output import Progress
from cocoa_engine.cli.score import read_rows, scored_row, writing
from cocoa_engine.errors import CocoaError, ConfigError, DataError
from cocoa_engine.integration import LoadOptions, need
from cocoa_engine.output_files import locked
from cocoa_integrations.evaluation.files import append_lines, read_lines
from cocoa_integrations.ray.settings import engine_of

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_integrations.evaluation.harness_task import Kind

PATIENT = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"
"""Ray Serve gives up if the process that listens does not start within 5 seconds, its default. A busy machine needs
more, so that a new cluster has 60."""


@contextmanager
def connected(what: str, cores: float = 0.0, workers: str = "") -> Iterator[bool]:
    """Connect to a cluster: that of ``RAY_ADDRESS``, the one that runs on this machine, or else a new one.

    A new cluster has Ray's token authentication, and ends with the block. It must have the ``cores`` that the
    ``workers`` need: Ray would wait indefinitely for more. Yields whether it is new.
    """
    ray = need("ray", extra="ray", what=what)
    if ray.is_initialized():
        yield False
        return
    options = {"log_to_driver": False, "logging_level": logging.WARNING}
    own = False
    try:
        ray.init(address="auto", **options)
    except (ConnectionError, RuntimeError) as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise ConfigError(f"there is no Ray cluster at RAY_ADDRESS={address}: {error}") from None
        own = True
        with suppress(Exception):
            ray.shutdown()
        os.environ.setdefault(PATIENT, "60")  # its processes inherit it
        ray.init(address="local", include_dashboard=False, **options)
    try:
        if own and cores > (there := ray.cluster_resources().get("CPU", 0)):
            raise ConfigError(
                f"{workers} need {cores:g} CPU cores, and this machine has {there:g}: ask for fewer, or for less of a "
                "core each with --num-cpus"
            )
        yield own
    finally:
        ray.shutdown()


def everywhere(options: LoadOptions) -> LoadOptions:
    """The options with absolute paths, since actors have other working folders."""
    names = {name: getattr(options, name) for name in ("model_name", "tokenizer_name", "calibrator")}
    paths = {name: str(Path(value).resolve()) for name, value in names.items() if value and Path(value).exists()}
    return options.model_copy(update=paths)


Do = Callable[["CocoaEngine", Any], Any]
"""Does one piece of work with an engine. It is sent to the actors, and so is what it is bound to."""

LARGEST_BLOCK = 16
"""Pieces of work that an actor is given together. Their results come when all are done."""


@dataclass(frozen=True)
class Pool:
    """The actors: their largest number (one is enough to begin), and what each loads and has.

    Without ``threads``, each has as many as cores.
    """

    load: LoadOptions
    actors: int = 2
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    threads: int | None = None

    @classmethod
    def of(cls, load: LoadOptions, **options: float | None) -> Pool:
        """The actors that the options of a command ask for: the other attributes; `None` is the default."""
        return cls(everywhere(load), **{name: value for name, value in options.items() if value})  # type: ignore[arg-type]

    def answer(
        self, kind: Kind, requests: Sequence[Any], config: CocoaConfig, advance: Callable[[int], object]
    ) -> list[Any]:
        """The answers to requests of lm-evaluation-harness, in order; what ``cocoa eval`` needs."""
        size = 2 * (self.load.runtime or Runtime()).max_batch_size
        chunks = [requests[start : start + size] for start in range(0, len(requests), size)]
        answers: dict[int, list[Any]] = {}
        with closing(self.run("cocoa eval --ray", chunks, partial(_answered, kind, config))) as results:
            for number, part in results:
                answers[number] = part
                advance(len(part))
        return [answer for number in range(len(chunks)) for answer in answers[number]]

    def run(self, what: str, work: Sequence[Any], do: Do) -> Generator[tuple[int, Any], None, None]:
        """Do pieces of work on a cluster. Yields the number of each piece, from 0, with its result, as they come.

        An actor that ends is started anew, and its work is repeated.
        """
        with connected(what, self.actors * self.num_cpus, f"{self.actors} actors"):
            import ray.data

            ray.data.DataContext.get_current().enable_progress_bars = False
            items = [{"number": number, "work": ray.cloudpickle.dumps(piece)} for number, piece in enumerate(work)]
            size = max(1, min(LARGEST_BLOCK, len(items) // (4 * self.actors)))
            results = ray.data.from_items(items, override_num_blocks=-(-len(items) // size)).map_batches(
                _Actor,
                fn_constructor_args=(self, ray.cloudpickle.dumps(do)),
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=self.num_cpus,
                num_gpus=self.num_gpus or None,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=self.actors),
            )
            try:
                for batch in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                    for number, result in zip(batch["number"].to_pylist(), batch["result"].to_pylist(), strict=True):
                        yield number, pickle.loads(result)
            except ray.exceptions.RayError as error:
                raise CocoaError(f"the actors could not do their work: {last_line(error)}") from None


def last_line(error: object) -> str:
    """The last line of an error of Ray, whose message holds tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class _Actor:
    """One actor of a pool, with an engine of its own."""

    def __init__(self, pool: Pool, do: bytes) -> None:
        self._engine = engine_of(pool.load, threads=pool.threads, num_cpus=pool.num_cpus, num_gpus=pool.num_gpus)
        self._do: Do = pickle.loads(do)

    def __call__(self, batch: Any) -> Any:
        """The results of some pieces of work."""
        import pyarrow

        results = [pickle.dumps(self._do(self._engine, pickle.loads(piece))) for piece in batch["work"].to_pylist()]
        return pyarrow.table({"number": batch["number"], "result": pyarrow.array(results, pyarrow.binary())})


def _answered(kind: Kind, config: CocoaConfig, engine: CocoaEngine, requests: Sequence[Any]) -> list[Any]:
    from cocoa_integrations.evaluation.harness_task import answer  # loads the harness

    return answer(kind, config, lambda count: None, engine, requests)


def score(
    load: LoadOptions,
    rows: Path,
    out: Path,
    config: CocoaConfig,
    *,
    progress: Progress | None = None,
    **options: float | None,
) -> tuple[int, int]:
    """Score the rows of a file with many engines. The result is that of one engine, row by row.

    Finished rows are kept beside ``out``, in a file that ends in ``.partial``, until all are done. Repeating an
    interrupted call scores only the others.

    Args:
        load: how the model is loaded.
        rows: the file to read: Parquet, or one JSON object a line.
        out: the file to write.
        config: the settings.
        progress: that of the command.
        **options: the number of actors and what each has; see :class:`Pool`.

    Returns:
        The number of rows with an error, and of all rows.
    """
    lines = read_rows(rows)
    pool = Pool.of(load, **options)
    partial_file = out.with_name(f"{out.name}.partial")
    run = {
        "version": __version__,
        "model": pool.load.model_name,
        "dtype": str(load.dtype),
        "calibrator": pool.load.calibrator,
        "rows": sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest(),
        "settings": config.model_dump(mode="json"),
    }
    with locked(out):
        done = _finished(partial_file, run)
        if missing := [number for number in range(1, len(lines) + 1) if number not in done]:
            shown = (progress or Progress("score")).stage("scoring", "rows", len(lines))
            work = [(number, lines[number - 1]) for number in missing]
            with shown as stage, closing(pool.run("cocoa score --ray", work, partial(_score, config))) as results:
                stage.at(len(done), len(lines))
                for index, (line, failed) in results:
                    done[missing[index]] = (line, failed)
                    append_lines(partial_file, [{"number": missing[index], "line": line, "failed": failed}])
                    stage.advance()
        with writing(out) as write:
            for number in range(1, len(lines) + 1):
                write(done[number][0])
        partial_file.unlink()
    return sum(failed for _, failed in done.values()), len(lines)


def _score(config: CocoaConfig, engine: CocoaEngine, work: tuple[int, str]) -> tuple[str, bool]:
    return scored_row(engine, *work, config)


def _finished(file: Path, run: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """The finished rows by number, from a file that begins with what the rows of a run share. It is created."""
    if not (there := read_lines(file)):
        append_lines(file, [run])
        return {}
    first, *rows = there
    if first != run:
        names = ", ".join(name for name in run if first.get(name) != run[name])
        raise ConfigError(
            f"{file} has rows of an interrupted run with other settings ({names}): delete it, name another --out, or "
            "repeat that run"
        )
    try:
        return {int(row["number"]): (str(row["line"]), bool(row["failed"])) for row in rows}
    except (KeyError, TypeError, ValueError, OverflowError):  # OverflowError: the number is Infinity
        raise DataError(f"{file} is not a file of finished rows; it was changed") from None
