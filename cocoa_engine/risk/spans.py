"""Labelled answers, fed to a model, as labelled spans to fit a calibrator on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.risk.features import features
from cocoa_engine.risk.fitting import LabelledFeatures
from cocoa_engine.signal.indicators import Layers
from cocoa_engine.signal.segments import Forced, Segment, answer, spans


def labelled_features(
    answers: Iterable[Forced], config: CocoaConfig, num_layers: int, unit: Literal["span", "answer"]
) -> LabelledFeatures:
    """The features and labels of every span: parts of answers between risk points, or whole answers.

    A part is hallucinated if a character of it is, white space aside.
    """
    layers = Layers.of(config, num_layers)
    rows, labels, groups = [], [], []
    for forced in answers:
        for segment in [answer(forced)] if unit == "answer" else spans(forced):
            rows.append(_features(segment, layers, whole=unit == "answer"))
            labels.append(segment.hallucinated > 0)
            groups.append(forced.record.group)
    return LabelledFeatures(np.array(rows, dtype=np.float64), np.array(labels, dtype=bool), groups)


def _features(segment: Segment, layers: Layers, *, whole: bool) -> list[float]:
    profile, start, end = segment.forced.profile, segment.start, segment.end
    return features(
        float(segment.layers.con_mlds(layers.window)),
        float(segment.layers.f_mlds(layers.window, layers.final)),
        profile.log_probs[start:end],
        profile.entropies[start:end],
        profile.margins[start:end],
        # a text that is scored as a whole has no candidates, as engine.score reports it
        candidates=1 if whole else profile.competing[start],
        spread=0.0 if whole else profile.spreads[start],
    )
