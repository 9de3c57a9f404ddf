"""Items of a signal study, and the scores that may separate hallucinated from supported ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cocoa_engine.equations import SpanLogProb, cocoa, cocoa_sig, con_mlds_of, f_mlds_of, length_penalty, middle_layers
from cocoa_engine.lab.measured import Layers, Segment, TeacherForced, answer, spans, tokens
from cocoa_engine.model.language_model import FinalLayer
from cocoa_engine.risk.features import MARGIN_CAP
from cocoa_engine.scoring.text_profile import TokenProfile

Level = Literal["answer", "span", "character"]
"""What the signal study ranks."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Items:
    """Items of one level. An item of the level ``"character"`` is a token that stands for its characters.

    ``groups`` has the prompt of each item, ``hallucinated`` and ``supported`` its weight in either class. ``log_prob``
    is the sum over its tokens, ``position`` the number of the answer's tokens before it, and ``source_attention`` the
    mean of its tokens, NaN if it was not measured. Arrays are ``[n]``, and the three of ``LayerProfile`` ``[n, L]``.
    """

    level: Level
    groups: list[str]
    hallucinated: Floats
    supported: Floats
    log_prob: Floats
    tokens: Floats
    min_log_prob: Floats
    mean_entropy: Floats
    mean_margin: Floats
    first_entropy: Floats
    first_margin: Floats
    position: Floats
    relative_position: Floats
    source_attention: Floats
    consecutive: Floats
    to_pre_norm: Floats
    to_post_norm: Floats

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return int(self.consecutive.shape[1])

    @property
    def both_classes(self) -> bool:
        """Whether there are hallucinated and supported items."""
        return bool(self.hallucinated.any() and self.supported.any())

    def con_mlds(self, window: tuple[int, int]) -> Floats:
        """The ConMLDS of each item for layers m..n, ``[n]``."""
        return con_mlds_of(self.consecutive.T, window)

    def f_mlds(self, window: tuple[int, int], final: FinalLayer) -> Floats:
        """The fMLDS of each item for layers m..n with n < L, ``[n]``."""
        return f_mlds_of((self.to_pre_norm if final == "pre_norm" else self.to_post_norm).T, window)


def collect(answers: Iterable[TeacherForced]) -> dict[Level, Items]:
    """The items of every labelled level: answers labelled as a whole, spans, and characters."""
    rows: dict[Level, list[dict[str, Any]]] = {level: [] for level in get_args(Level)}
    for forced in answers:
        segments: dict[Level, Iterable[Segment]] = {}
        if forced.record.label is not None:
            segments["answer"] = [answer(forced)]
        if forced.record.spans is not None:
            segments |= {"span": spans(forced), "character": tokens(forced)}
        for level, segment in ((level, segment) for level, of_level in segments.items() for segment in of_level):
            rows[level].append(_row(level, segment, forced.profile))
    return {level: _items(level, rows[level]) for level in rows}


def _row(level: Level, segment: Segment, profile: TokenProfile) -> dict[str, Any]:
    """The values of an item. If any part of an answer or a span is hallucinated, it is."""
    start, end, weights = segment.start, segment.end, (segment.hallucinated, segment.supported)
    if level == "character":
        layers, column = profile.of_tokens, start
    else:
        layers, column = profile.span(start, end), 0
        weights = (int(segment.hallucinated > 0), int(not segment.hallucinated))
    margins = np.minimum(profile.margins[start:end], MARGIN_CAP)
    return {
        "groups": segment.forced.record.group,
        "hallucinated": weights[0],
        "supported": weights[1],
        "log_prob": sum(profile.log_probs[start:end]),
        "tokens": end - start,
        "min_log_prob": min(profile.log_probs[start:end]),
        "mean_entropy": np.mean(profile.entropies[start:end]),
        "mean_margin": np.mean(margins),
        "first_entropy": profile.entropies[start],
        "first_margin": margins[0],
        "position": start,
        "relative_position": start / len(profile.token_ids),
        "source_attention": np.mean((profile.source_attention or [np.nan] * end)[start:end]),
        "consecutive": layers.consecutive[:, column].numpy(),
        "to_pre_norm": layers.to_pre_norm[:, column].numpy(),
        "to_post_norm": layers.to_post_norm[:, column].numpy(),
    }


def _items(level: Level, rows: Sequence[dict[str, Any]]) -> Items:
    arrays = [field.name for field in fields(Items) if field.type == Floats]
    return Items(
        level=level,
        groups=[row["groups"] for row in rows],
        **{name: np.array([row[name] for row in rows], dtype=np.float64) for name in arrays},
    )


def indicators(items: Items, layers: Layers, alpha: float, length: SpanLogProb) -> dict[str, Floats]:
    """Every score of each item, higher is riskier: the method's scores first, then the baselines."""
    log_prob = items.log_prob / length_penalty(items.tokens, length)
    mlds = {"ConMLDS": items.con_mlds(layers.window), "fMLDS": items.f_mlds(layers.window, layers.final)}
    rules = {"CoCoA": cocoa, "CoCoA-SIG": cocoa_sig}
    scores = {f"{rule}, {name}": -rules[rule](log_prob, mlds[name], alpha) for rule in rules for name in mlds} | mlds
    scores["-log p"] = -items.log_prob
    scores["-mean log p"] = -items.log_prob / items.tokens
    scores["-min log p"] = -items.min_log_prob
    scores["mean entropy"] = items.mean_entropy
    scores["-mean margin"] = -items.mean_margin
    if not np.isnan(items.source_attention).any():
        scores["-source attention"] = -items.source_attention
    if items.level == "span":
        scores["first entropy"] = items.first_entropy
        scores["-first margin"] = -items.first_margin
    if items.level == "answer":
        scores["length in tokens"] = items.tokens
    else:
        scores["position in tokens"] = items.position
        scores["position as a share of the answer"] = items.relative_position
    if items.level == "character":  # for single tokens these equal -log p
        for name in ("-mean log p", "-min log p"):
            del scores[name]
    return scores


def layer_choices(num_layers: int, configured: Layers) -> dict[str, Layers]:
    """The choices of layers that are compared, by name: several windows, with the configured one, each before and after
    the final norm."""
    windows = {
        "first third": (0, num_layers // 3),
        "middle third (the paper)": middle_layers(num_layers),
        "upper half": (num_layers // 2, num_layers - 1),
        "last third": (2 * num_layers // 3, num_layers - 1),
        "all": (0, num_layers - 1),
    }
    if configured.window not in windows.values():
        windows["as set"] = configured.window
    finals: tuple[FinalLayer, ...] = ("post_norm", "pre_norm")
    return {f"{name}, {final}": Layers(window, final) for name, window in windows.items() for final in finals}
