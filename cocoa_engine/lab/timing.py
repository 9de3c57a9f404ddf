"""Fair timing on a machine with other load: competitors take turns, and ratios are computed within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

Case = TypeVar("Case")


class Turn(NamedTuple):
    """The time that one competitor took for one case. Time is divided by ``units``, such as kept tokens."""

    seconds: float
    units: float


class Spread(NamedTuple):
    """The median, lowest and highest of one value per round."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def timed(work: Callable[[Case], float]) -> Callable[[Case], Turn]:
    """A competitor made from a function that processes a case and returns its units."""

    def competitor(case: Case) -> Turn:
        start = time.perf_counter()
        units = work(case)
        return Turn(time.perf_counter() - start, units)

    return competitor


def measured_rounds(
    competitors: Mapping[str, Callable[[Case], Turn]],
    rounds: Iterable[Sequence[Case]],
    after_turn: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, float]]:
    """Time every competitor on every case of every round. Yields the seconds per unit of each, round by round.

    Competitors take turns case by case, so that a busy machine slows all of them alike. The order rotates, so that no
    competitor always runs with the caches that the same other one left.

    Args:
        competitors: the competitors by name.
        rounds: the cases of each round.
        after_turn: called after every turn, to show progress.
    """
    names = list(competitors)
    turns = 0
    for cases in rounds:
        seconds, units = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for case in cases:
            first = turns % len(names)
            turns += 1
            for name in (*names[first:], *names[:first]):
                turn = competitors[name](case)
                seconds[name] += turn.seconds
                units[name] += turn.units
                after_turn()
        yield {name: seconds[name] / units[name] for name in names}


def interleave(
    competitors: Mapping[str, Callable[[Case], Turn]],
    rounds: Iterable[Sequence[Case]],
    after_turn: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """The seconds per unit of each competitor, one value per round. The arguments are those of
    :func:`measured_rounds`."""
    found = list(measured_rounds(competitors, rounds, after_turn))
    return {name: [one[name] for one in found] for name in competitors}


def ratio(values: Sequence[float], base: Sequence[float]) -> Spread:
    """The ratio of one competitor to another, round by round."""
    return Spread.of([value / other for value, other in zip(values, base, strict=True)])
