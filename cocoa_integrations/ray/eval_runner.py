"""``cocoa eval --ray``: the samples of a task, shared among actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.model.load_options import LoadOptions
from cocoa_integrations.ray.pool import Pool

if TYPE_CHECKING:
    from cocoa_integrations.evaluation.harness_task import Kind


class Evaluation:
    """Answers requests with many engines; what :func:`~cocoa_integrations.evaluation.evaluate` needs.

    Args:
        pool: the engines.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def answer(
        self, kind: Kind, requests: Sequence[Any], config: CocoaConfig, advance: Callable[[int], object]
    ) -> list[Any]:
        """The answers to requests, in order."""
        size = 2 * (self._pool.load.runtime or Runtime()).max_batch_size
        chunks = [requests[start : start + size] for start in range(0, len(requests), size)]
        answers: dict[int, list[Any]] = {}
        with self._pool.open("cocoa eval --ray") as run:
            for number, some in run(chunks, partial(_answered, kind, config)):
                answers[number] = some
                advance(len(some))
        return [answer for number in range(len(chunks)) for answer in answers[number]]


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


def _answered(kind: Kind, config: CocoaConfig, engine: CocoaEngine, requests: Sequence[Any]) -> list[Any]:
    from cocoa_integrations.evaluation.harness_task import answer  # loads the harness

    return answer(kind, config, lambda count: None, engine, requests)
