"""Scoring ends before its next forward pass, or the next layer of a long one, when it is cancelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import Cancellation, CocoaEngine
from cocoa_engine.errors import RequestCancelledError
from tests.helpers.inside import assert_idle
from tests.helpers.made_up_risk import fitted
from tests.helpers.rivals import RIVALS, config_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

TEXTS = [[number, *range(20, 40)] for number in range(10, 19)]


class After(Cancellation):
    """Is cancelled when it is asked for the last time of some."""

    def __init__(self, asked: int) -> None:
        super().__init__()
        self.asked, self.left = 0, asked

    def check(self) -> None:
        self.asked += 1
        self.left -= 1
        if self.left == 0:
            self.cancel()
        super().check()


def cancelled_at_each_pass(engine: CocoaEngine, *args: Any, **options: Any) -> int:
    """Score until the end, and cancelled at each of its checks. Returns their number."""
    with pytest.raises(RequestCancelledError):  # before anything is measured
        engine.score(*args, cancellation=After(1), **options)
    expected = engine.score(*args, **options)  # the next calls find its prompt in the cache
    whole = After(10**6)
    engine.score(*args, cancellation=whole, **options)
    for asked in range(1, whole.asked + 1):
        with pytest.raises(RequestCancelledError):
            engine.score(*args, cancellation=After(asked), **options)
        assert_idle(engine)
    assert engine.score(*args, cancellation=After(10**6), **options) == expected
    return whole.asked


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cocoa-sig", *RIVALS])
def test_scores_of_several_texts_end_between_passes(method: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer())
    config = config_of(method, model, tmp_path) if method in RIVALS else None
    assert cancelled_at_each_pass(engine, [5, 6, 7], TEXTS, config=config) > 2


@pytest.mark.filterwarnings("ignore::cocoa_engine.CalibrationWarning")
def test_a_divided_text_ends_while_its_candidates_grow() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), calibrator=fitted(levels=("span",)))
    assert cancelled_at_each_pass(engine, [5, 6, 7], TEXTS[0], divide=True) > 3
