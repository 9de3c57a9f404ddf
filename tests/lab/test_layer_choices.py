"""Which layers are compared: the paper's windows, for models of any depth."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine.equations import middle_layers
from cocoa_engine.lab.indicators import Layers, layer_choices, shrinking_windows


def test_of_32_layers_they_are_the_papers() -> None:
    assert middle_layers(32) == (10, 21)
    assert shrinking_windows(32) == [(11, 19), (12, 18), (13, 17), (14, 16)]
    assert shrinking_windows(4) == []


@given(st.integers(3, 200))
def test_each_window_lies_within_the_one_before(num_layers: int) -> None:
    windows = [middle_layers(num_layers), *shrinking_windows(num_layers)]
    for (m, n), (inner_m, inner_n) in pairwise(windows):
        assert m < inner_m < inner_n < n
        assert inner_n - inner_m >= 2
    assert len({m + n for m, n in windows[1:]}) <= 1  # all in the same middle


@given(st.integers(3, 200))
def test_no_window_is_compared_twice(num_layers: int) -> None:
    own = Layers((1, 2), "post_norm")
    choices = list(layer_choices(num_layers, own).values())
    assert own in choices
    shrinking = [one for one in choices if one.window in shrinking_windows(num_layers)]
    assert len(shrinking) == 2 * len(shrinking_windows(num_layers))
