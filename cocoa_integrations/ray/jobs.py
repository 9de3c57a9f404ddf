"""Ray clusters, and what commands do there: ``cocoa serve --ray``, ``cocoa score --ray`` and ``cocoa eval --ray``."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine import CocoaConfig, Runtime, __version__
from cocoa_engine.cli.output import Progress, print_note
from cocoa_engine.cli.score import read_rows, scored_row, writing
from cocoa_engine.errors import CocoaError, ConfigError, DataError
from cocoa_engine.files import locked
from cocoa_engine.integration import LoadOptions, need, safe_logger
from cocoa_integrations.evaluation.files import append_lines, read_lines
from cocoa_integrations.ray.settings import RaySettings, engine_of
from cocoa_integrations.server.settings import ServerSettings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

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
                stage.advance(len(done))
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


logger = safe_logger("cocoa_integrations.ray")

NAME = "cocoa"
"""Of the application in Ray Serve."""

PATIENCE = 5.0
"""Seconds in which gateways must answer."""

POLL = 0.2
"""Seconds between questions whether a signal has come, and whether requests still run."""


def serve(load: LoadOptions, config: CocoaConfig, server: ServerSettings, **of_ray: Any) -> None:
    """Serve replicas of an engine until SIGTERM or Ctrl-C. Running answers then have ``shutdown_timeout`` to end.

    ``of_ray`` has fields of :class:`~cocoa_integrations.ray.RaySettings`; `None` is the default.
    """
    from cocoa_integrations.server.process import listening  # loads torch

    load = everywhere(load)
    counts = {name: value for name, value in of_ray.items() if value is not None}
    with listening(server) as opened:
        port = opened.getsockname()[1]  # a free one for 0
    # the address is known here, and so are the names by which clients may call
    named = server.model_copy(update={"allowed_hosts": server.known_hosts, "port": port})
    model = load.model_copy(update={"model_name": None})
    settings = RaySettings(model=load.model_name, loading=model, decoding=config, server=named, **counts)
    replicas = (settings.min_replicas or 1) if settings.scales else settings.replicas
    progress = Progress("serve")
    with ExitStack() as running:
        # in this order, since Ray takes signals too
        with progress.stage("starting Ray"):
            cluster = connected("cocoa serve --ray", replicas * settings.num_cpus, f"{replicas} replicas")
            own = running.enter_context(cluster)
        signals = running.enter_context(_signals())
        _serve(settings, signals, own, progress)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt


def _serve(settings: RaySettings, signals: list[int], own: bool, progress: Progress) -> None:
    from ray import serve

    from cocoa_integrations.ray.application import ENGINE, GATEWAY, app

    address = {"host": settings.server.host, "port": settings.server.port}
    with progress.stage("starting Ray Serve"):
        serve.start(http_options=address)
    try:
        try:
            with progress.stage("starting the replicas"):
                serve.run(app(settings), name=NAME, route_prefix="/")
        except RuntimeError as error:
            state = serve.status().applications.get(NAME)
            has_status = state is not None and ENGINE in state.deployments
            told = state.deployments[ENGINE].message if has_status else str(error)
            raise CocoaError(f"the replicas could not start: {last_line(told)}") from None
        print_note(f"serving on http://{address['host']}:{address['port']} (Ctrl-C stops)")
        while not signals:
            time.sleep(POLL)
        drain(serve.get_deployment_handle(GATEWAY, NAME), settings.server.shutdown_timeout)
    finally:
        serve.delete(NAME)  # waits for running answers
        if own:
            serve.shutdown()


def drain(gateways: DeploymentHandle, timeout: float) -> None:
    """Let gateways refuse new requests, and end those that run after ``timeout`` seconds.

    Without this, Ray Serve would answer new requests with a plain 404 as soon as the application is deleted.
    """

    def told(method: str) -> list[Any]:
        """What a method of every gateway returns; an exception if one does not answer."""
        try:
            return list(gateways.broadcast(method).results(timeout_s=PATIENCE, return_exceptions=True))
        except Exception as error:  # of Ray, whose cluster may be busy or about to end
            logger.warning("gateways do not answer: %s", error)
            return [error]

    deadline = time.monotonic() + timeout
    try:
        while any(told("drain")) and time.monotonic() < deadline:
            time.sleep(POLL)
    finally:  # also if a second signal does not wait
        told("end")
        time.sleep(POLL)  # the errors are sent


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Take SIGTERM and SIGINT within the block. Yields those that have come; a second one does not wait."""
    came: list[int] = []

    def take(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
