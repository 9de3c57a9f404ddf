"""The record of a signal study, as written to ``signal.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from cocoa_engine.equations import SpanLogProb

if TYPE_CHECKING:  # which imports torch
    from cocoa_engine.model.hidden_states import FinalLayer

Level = Literal["answer", "span", "character"]


def plot_names(level: Level) -> list[str]:
    """The files of a level's plots. The scores of characters are not drawn: there are too many."""
    return [f"auroc-{level}.svg", *([] if level == "character" else [f"scores-{level}.svg"])]


class IntervalRecord(TypedDict):
    """An estimate with its bootstrap interval, see :class:`~cocoa_engine.lab.ranking.Interval`."""

    estimate: float
    low: float | None
    high: float | None


class PairedRecord(TypedDict):
    """A paired test, see :class:`~cocoa_engine.lab.signal.paired.PairedTest`."""

    pairs: int
    z: float
    effect_size: float
    p_two_sided: float
    p_right: float
    right: float


class RankingRow(TypedDict):
    """How well a score ranks. ``less`` is its AUROC minus that of each baseline."""

    auroc: IntervalRecord
    auprc: IntervalRecord
    less: dict[str, IntervalRecord]


class LayerRow(TypedDict):
    """One choice of layers: the AUROC of several scores, and the paired test of -fMLDS."""

    middle_layers: list[int]
    final_layer: FinalLayer
    auroc: dict[str, IntervalRecord]
    paired_f_mlds: PairedRecord | None


class LevelRecord(TypedDict):
    """All values of one level. ``rivals`` are the baselines; ``ranking`` and ``paired`` are by score."""

    items: int
    prompts: int
    hallucinated: float
    supported: float
    share_hallucinated: float
    middle_layers: list[int]
    final_layer: FinalLayer
    rivals: list[str]
    ranking: dict[str, RankingRow]
    paired: dict[str, PairedRecord]
    layers: dict[str, LayerRow]


class About(TypedDict):
    """What was measured."""

    data: str
    format: str
    model: str
    answers: int
    prompts: int
    chat: bool
    command: str


class SignalRecord(TypedDict):
    """The whole record. ``left_out`` has the reason for each level that cannot be measured."""

    about: About
    alpha: float
    span_log_prob: SpanLogProb
    draws: int
    seed: int
    levels: dict[Level, LevelRecord]
    left_out: dict[Level, str]
