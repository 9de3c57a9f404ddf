"""Turn taking and ratios, with made-up times."""

from __future__ import annotations

from functools import partial

import pytest

from cocoa_engine.lab.timing import Spread, Turn, interleave, ratio, timed


def test_rivals_take_turns_and_another_begins_each_time() -> None:
    order: list[str] = []

    def rival(name: str, seconds: float, case: int) -> Turn:
        order.append(f"{name}{case}")
        return Turn(seconds * case, case)

    ticks: list[None] = []
    ways = {"a": partial(rival, "a", 2.0), "b": partial(rival, "b", 3.0)}
    assert interleave(ways, [[1, 2], [3]], lambda: ticks.append(None)) == {"a": [2.0, 2.0], "b": [3.0, 3.0]}
    assert order == ["a1", "b1", "b2", "a2", "a3", "b3"]
    assert len(ticks) == len(order)


def test_a_round_is_weighed_as_a_whole() -> None:
    """Seconds over units of all its work, not the mean of each piece's quotient."""
    turns = iter([Turn(1.0, 1), Turn(3.0, 9)])
    assert interleave({"a": lambda _: next(turns)}, [[None, None]]) == {"a": [0.4]}


def test_ratio_is_taken_within_a_round() -> None:
    assert ratio([1.0, 20.0, 3.0], [2.0, 10.0, 3.0]) == Spread(median=1.0, lowest=0.5, highest=2.0)
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


def test_timed_returns_what_the_work_counts() -> None:
    turn = timed(len)("four")
    assert turn.units == 4
    assert turn.seconds >= 0
