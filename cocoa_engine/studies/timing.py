"""Fair timing on a machine that is never quite idle: rivals take turns, and ratios are taken within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Case = TypeVar("Case")


class Turn(NamedTuple):
    """What one rival did with one piece of work; time is divided by ``units``, which mostly are kept tokens."""

    seconds: float
    units: float


class Spread(NamedTuple):
    """The median of one figure per round, with its lowest and highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one figure."""
        return cls(statistics.median(values), min(values), max(values))


def timed(work: Callable[[Case], float]) -> Callable[[Case], Turn]:
    """A rival made of a function that does a piece of work and returns its units."""

    def way(case: Case) -> Turn:
        start = time.perf_counter()
        units = work(case)
        return Turn(time.perf_counter() - start, units)

    return way


def interleave(
    ways: Mapping[str, Callable[[Case], Turn]],
    rounds: Iterable[Sequence[Case]],
    after_turn: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Let every way do every piece of work of every round.

    They take turns piece by piece, so that a busy machine slows all alike, and another one begins each time, so that
    none always finds the processor's caches as the same rival left them.

    Args:
        ways: the rivals by name.
        rounds: the work of each round.
        after_turn: called after every turn, to show progress.

    Returns:
        Seconds per unit of each way, one figure per round.
    """
    names = list(ways)
    per_unit: dict[str, list[float]] = {name: [] for name in names}
    turns = 0
    for cases in rounds:
        seconds, units = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for case in cases:
            first = turns % len(names)
            turns += 1
            for name in (*names[first:], *names[:first]):
                turn = ways[name](case)
                seconds[name] += turn.seconds
                units[name] += turn.units
                after_turn()
        for name in names:
            per_unit[name].append(seconds[name] / units[name])
    return per_unit


def ratio(values: Sequence[float], base: Sequence[float]) -> Spread:
    """How one way compares with another, round by round."""
    return Spread.of([value / other for value, other in zip(values, base, strict=True)])
