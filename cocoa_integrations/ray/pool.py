"""Ray clusters: connecting to one, and work that its actors share by Ray Data."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine.errors import CocoaError, ConfigError
from cocoa_engine.model.load_options import LoadOptions, loading_arguments
from cocoa_engine.optional import need

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
"""For Ray Serve in a new cluster. It gives up if the process that listens does not start within 5 seconds, its default,
and a busy machine needs more."""


@contextmanager
def connected(what: str) -> Iterator[bool]:
    """Connect to a cluster: that of ``RAY_ADDRESS``, the one that runs on this machine, or else a new one.

    A new cluster has Ray's token authentication, and ends with the block. Yields whether it is new.

    Args:
        what: what needs the cluster, for the message if Ray is missing.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: there is no cluster at ``RAY_ADDRESS``.
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
        for name, value in PATIENT.items():  # its processes inherit them
            os.environ.setdefault(name, value)
        ray.init(address="local", include_dashboard=False, **options)
    try:
        yield own
    finally:
        ray.shutdown()


def require_cores(needed: float, what: str) -> None:
    """Check that a new cluster, which is this machine, has enough cores. Ray would wait indefinitely for more.

    Raises:
        ConfigError: it has not.
    """
    import ray

    there = ray.cluster_resources().get("CPU", 0)
    if needed > there:
        raise ConfigError(
            f"{what} need {needed:g} CPU cores, and this machine has {there:g}: ask for fewer, or for less of a core "
            "each with --num-cpus"
        )


def everywhere(options: LoadOptions) -> LoadOptions:
    """The options with absolute paths, since actors have other working folders."""

    def absolute(name: str | None) -> str | None:
        return str(Path(name).resolve()) if name is not None and Path(name).exists() else name

    return options.model_copy(
        update={
            "model_name": absolute(options.model_name),
            "tokenizer_name": absolute(options.tokenizer_name),
            "calibrator": absolute(options.calibrator),
        }
    )


Do = Callable[["CocoaEngine", Any], Any]
"""Does one piece of work with an engine. It is sent to the actors, and so is what it is bound to."""

LARGEST_BLOCK = 16
"""Pieces of work that an actor is given together. Their results come when all are done."""


@dataclass(frozen=True)
class Pool:
    """The actors.

    Attributes:
        load: how each loads its engine.
        actors: their largest number. One is enough to begin.
        num_cpus: CPU cores of each.
        num_gpus: GPUs of each.
        threads: threads of each; `None`: as many as cores.
    """

    load: LoadOptions
    actors: int = 2
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    threads: int | None = None

    @classmethod
    def of(
        cls,
        load: LoadOptions,
        actors: int | None,
        num_cpus: float | None,
        num_gpus: float | None,
        threads: int | None,
    ) -> Pool:
        """The actors that the options of a command ask for."""
        return cls(everywhere(load), actors or 2, num_cpus or 1.0, num_gpus or 0.0, threads)

    @contextmanager
    def open(self, what: str) -> Iterator[Callable[[Sequence[Any], Do], Iterator[tuple[int, Any]]]]:
        """Connect to a cluster. Yields a function that does pieces of work, and yields the results as they come.

        Each result has the number of its piece, from 0. An actor that ends is started anew, and its work is repeated.

        Args:
            what: what needs the cluster.

        Raises:
            ConfigError: this machine has too few cores.
            CocoaError: the actors cannot work.
        """
        with connected(what) as own:
            if own:
                require_cores(self.actors * self.num_cpus, f"{self.actors} actors")
            yield self._run

    def _run(self, work: Sequence[Any], do: Do) -> Iterator[tuple[int, Any]]:
        import ray.data

        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        items = [{"number": number, "work": ray.cloudpickle.dumps(one)} for number, one in enumerate(work)]
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
        import torch

        from cocoa_engine import CocoaEngine

        if pool.threads is not None or not pool.num_gpus:
            torch.set_num_threads(pool.threads or max(1, int(pool.num_cpus)))
        self._engine = CocoaEngine.from_pretrained(**loading_arguments(pool.load))
        self._do: Do = pickle.loads(do)

    def __call__(self, batch: Any) -> Any:
        """The results of some pieces of work."""
        import pyarrow

        results = [pickle.dumps(self._do(self._engine, pickle.loads(one))) for one in batch["work"].to_pylist()]
        return pyarrow.table({"number": batch["number"], "result": pyarrow.array(results, pyarrow.binary())})
