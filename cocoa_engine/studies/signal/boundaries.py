"""Answers cut into spans in every way that decoding knows, compared on the same items: their characters.

A span's figures are its tokens' pooled, so where it ends decides what each character is said to be worth. Spans of
different cuts cannot be compared one to one; their characters can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.scoring.candidates import Grower, grown_length
from cocoa_engine.spans import Candidate
from cocoa_engine.studies.signal.indicators import Layers
from cocoa_engine.studies.signal.items import Floats
from cocoa_engine.studies.signal.ranking import Bootstrap, Ranked
from cocoa_engine.studies.signal.segments import TeacherForced, begins_span, token_labels

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

Cut = Literal["token", "own", "left", "right", "fixed"]
CUTS: tuple[Cut, ...] = ("token", "own", "left", "right", "fixed")
FIGURES = ("fMLDS", "ConMLDS", "-log p", "-mean log p", "CoCoA-SIG, fMLDS")


@dataclass
class Cuts:
    """What the spans of each cut say of every token; n tokens in all.

    Attributes:
        groups: what prompt each token belongs to.
        hallucinated, supported: how many of its characters are, ``[n]``.
        values: by cut and figure, that of the token's span, higher is riskier, ``[n]``.
        spans: by cut, how many there are.
    """

    groups: list[str] = field(default_factory=list)
    hallucinated: list[int] = field(default_factory=list)
    supported: list[int] = field(default_factory=list)
    values: dict[Cut, dict[str, list[float]]] = field(
        default_factory=lambda: {cut: {figure: [] for figure in FIGURES} for cut in CUTS}
    )
    spans: dict[Cut, int] = field(default_factory=lambda: dict.fromkeys(CUTS, 0))

    def add(self, forced: TeacherForced, cutter: Cutter, layers: Layers, alpha: float) -> None:
        """The tokens of an answer whose parts are labelled."""
        for hallucinated, supported in token_labels(forced):
            self.groups.append(forced.record.group)
            self.hallucinated.append(hallucinated)
            self.supported.append(supported)
        for cut in CUTS:
            for start, end in cutter.spans(forced, cut):
                profile = forced.profile.span(start, end)
                con = float(profile.con_mlds(layers.window)[0])
                f = float(profile.f_mlds(layers.window, layers.final)[0])
                log_prob = sum(forced.profile.log_probs[start:end])
                figures = (f, con, -log_prob, -log_prob / (end - start), -log_prob * (1 + alpha * f))
                for figure, value in zip(FIGURES, figures, strict=True):
                    self.values[cut][figure] += [value] * (end - start)
                self.spans[cut] += 1

    def measure(self, *, draws: int, seed: int) -> dict[str, Any]:
        """AUROC of each figure by each cut, with bootstrap intervals; nothing where a class is missing."""
        if not (sum(self.hallucinated) and sum(self.supported)):
            return {}
        bootstrap = Bootstrap(self.groups, draws, seed)
        positive, negative = _floats(self.hallucinated), _floats(self.supported)
        return {
            cut: {
                "spans": self.spans[cut],
                "tokens_per_span": len(self.groups) / self.spans[cut],
                "auroc": {
                    figure: bootstrap.interval(Ranked(values, positive, negative), "auroc")._asdict()
                    for figure, values in self.values[cut].items()
                },
            }
            for cut in CUTS
        }


class Cutter:
    """Says where spans of a given text end.

    ``"token"``: after each token. Otherwise, where several tokens compete a span begins, and ends as decoding would end
    it: before the text's ``"own"`` next risk point, after ``max_span_tokens`` (``"fixed"``), or at the ``"left"`` or
    ``"right"`` boundary of the branches that decoding grows there. What lies between such spans is a span too, up to
    the next place where tokens compete or the text leaves what the model would have taken.

    Args:
        engine: grows the branches.
        config: its ``gamma``, ``max_candidates`` and ``max_span_tokens`` count.
    """

    def __init__(self, engine: CocoaEngine, config: CocoaConfig) -> None:
        self._most = config.max_span_tokens
        self._growers = {cut: Grower(engine.session, config.replace(span_boundary=cut)) for cut in ("left", "right")}

    def spans(self, forced: TeacherForced, cut: Cut) -> Iterator[tuple[int, int]]:
        """The tokens of each span of an answer, the end exclusive; together they are the answer."""
        profile = forced.profile
        count, start, most = len(profile.token_ids), 0, self._most
        grown: list[list[Candidate]] = []
        if cut in self._growers:
            (grown,) = self._growers[cut](profile.prompt, [profile.token_ids])
        while start < count:
            run = start + 1
            while run < count and not begins_span(profile, run):
                run += 1
            if cut == "token":
                end = start + 1
            elif profile.competing[start] == 1:
                end = run
            elif cut == "own":
                end = min(run, start + most)
            elif cut == "fixed":
                end = min(start + most, count)
            else:
                # at the very edge of gamma, the rounding of another pass may say that nothing competes after all
                end = min(start + grown_length(grown[start]), count)
            yield start, end
            start = end


def cut_every_way(
    answers: Iterable[TeacherForced], engine: CocoaEngine, config: CocoaConfig, cuts: Cuts
) -> Iterator[TeacherForced]:
    """Hand answers on, adding those whose parts are labelled to ``cuts``."""
    layers, cutter = Layers.of(config, engine.num_layers), Cutter(engine, config)
    for forced in answers:
        if forced.record.spans is not None:
            cuts.add(forced, cutter, layers, config.alpha)
        yield forced


def _floats(values: list[int]) -> Floats:
    return np.array(values, dtype=np.float64)
