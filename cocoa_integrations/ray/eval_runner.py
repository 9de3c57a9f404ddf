"""``cocoa eval --ray``: the samples of a task, shared among actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.model.load_options import LoadOptions
from cocoa_integrations.evaluation.chunks import Chunk, Row
from cocoa_integrations.evaluation.run import measured
from cocoa_integrations.evaluation.tasks import EvalTask
from cocoa_integrations.ray.pool import Pool


class Evaluation:
    """Measures chunks of samples with many engines; what :func:`~cocoa_integrations.evaluation.evaluate` needs.

    Attributes:
        batch_size: the number of answers that an engine decodes together.

    Args:
        pool: the engines.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.batch_size = (pool.load.runtime or Runtime()).max_batch_size

    def measure(self, chunks: Sequence[Chunk], task: EvalTask, shared: CocoaConfig) -> Iterator[list[Row]]:
        """The rows of chunks, as they come."""
        do: Callable[..., Any] = partial(_measured, task, shared)
        with self._pool.open("cocoa eval --ray") as run:
            for _, rows in run(chunks, do):
                yield rows


def evaluate(
    load: LoadOptions,
    *,
    actors: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    threads: int | None = None,
) -> Evaluation:
    """The engines of a Ray cluster, for ``cocoa eval``.

    Args:
        load: how the model is loaded.
        actors: the largest number of engines.
        num_cpus: CPU cores of each.
        num_gpus: GPUs of each.
        threads: threads of each.
    """
    return Evaluation(Pool.of(load, actors, num_cpus, num_gpus, threads))


def _measured(task: EvalTask, shared: CocoaConfig, engine: CocoaEngine, chunk: Chunk) -> list[Row]:
    return [row for rows in measured(engine, task, chunk, shared) for row in rows]
