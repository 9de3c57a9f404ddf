"""The pieces of an evaluation: batches of samples, which can be measured in other processes and in any order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from cocoa_engine import CocoaConfig
from cocoa_integrations.evaluation.arms import Arm
from cocoa_integrations.evaluation.tasks import EvalTask, Sample

_BATCHES = 2  # batches stored together: with more, batches are filled better, but an interruption loses more samples

Row = dict[str, Any]
"""One line of ``samples.jsonl``."""

Chunk = list[tuple[Arm, list[Sample]]]
"""For each arm, the samples of one batch that have no row yet. Rows do not depend on other chunks."""


@runtime_checkable
class Engines(Protocol):
    """Engines in other processes that measure chunks.

    Attributes:
        batch_size: the number of answers that each decodes together.
    """

    batch_size: int

    def measure(self, chunks: Sequence[Chunk], task: EvalTask, shared: CocoaConfig) -> Iterable[list[Row]]:
        """The rows of chunks, as they come."""


def chunk_size(task: EvalTask, batch_size: int) -> int:
    """The number of samples of a chunk."""
    return 1 if task.multiple_choice else _BATCHES * batch_size


def chunks_of(
    samples: Sequence[Sample], arms: Sequence[Arm], there: Container[tuple[str, str]], size: int
) -> Iterator[Chunk]:
    """What is left to measure.

    The arms take turns, so that an interrupted run has the same samples of each and the prompt cache is reused.
    """
    for start in range(0, len(samples), size):
        of_arms = (
            (arm, [one for one in samples[start : start + size] if (str(arm), one.id) not in there]) for arm in arms
        )
        if chunk := [(arm, missing) for arm, missing in of_arms if missing]:
            yield chunk


def keys_in_order(samples: Sequence[Sample], arms: Sequence[Arm], size: int) -> list[tuple[str, str]]:
    """The arms and ids of all rows, in the order in which one engine writes them."""
    return [
        (str(arm), sample.id)
        for start in range(0, len(samples), size)
        for arm in arms
        for sample in samples[start : start + size]
    ]
