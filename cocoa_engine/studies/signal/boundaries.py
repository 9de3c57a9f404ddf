"""Span boundaries compared: answers divided into spans by every rule of decoding, evaluated on the same characters.

The statistics of a span are pooled over its tokens, so the boundaries decide the value of each character. Spans of
different rules cannot be compared one to one, but their characters can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import cocoa_sig
from cocoa_engine.scoring.candidates import CandidateGrower, grown_length
from cocoa_engine.spans import Candidate
from cocoa_engine.studies.answer_cache import AnswerCache, CacheFolder
from cocoa_engine.studies.signal.indicators import Layers
from cocoa_engine.studies.signal.items import Floats
from cocoa_engine.studies.signal.kept_profile import identity
from cocoa_engine.studies.signal.ranking import Bootstrap, Ranked
from cocoa_engine.studies.signal.record import BoundaryRow
from cocoa_engine.studies.signal.segments import TeacherForced, begins_span, token_labels

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

Cut = Literal["token", "own", "left", "right", "fixed"]
CUTS: tuple[Cut, ...] = ("token", "own", "left", "right", "fixed")
SCORES = ("fMLDS", "ConMLDS", "-log p", "-mean log p", "CoCoA-SIG, fMLDS")


@dataclass
class BoundaryScores:
    """The scores of each token under each rule of boundaries, for n tokens.

    Attributes:
        groups: the prompt of each token.
        hallucinated, supported: the number of such characters in each token, ``[n]``.
        values: by rule and score, the score of the token's span, higher is riskier, ``[n]``.
        spans: by rule, the number of spans.
    """

    groups: list[str] = field(default_factory=list)
    hallucinated: list[int] = field(default_factory=list)
    supported: list[int] = field(default_factory=list)
    values: dict[Cut, dict[str, list[float]]] = field(
        default_factory=lambda: {cut: {score: [] for score in SCORES} for cut in CUTS}
    )
    spans: dict[Cut, int] = field(default_factory=lambda: dict.fromkeys(CUTS, 0))

    def add(self, forced: TeacherForced, by_cut: dict[str, Any]) -> None:
        """Add the tokens of an answer whose parts are labelled, with what :func:`scored` returns."""
        for hallucinated, supported in token_labels(forced):
            self.groups.append(forced.record.group)
            self.hallucinated.append(hallucinated)
            self.supported.append(supported)
        for cut in CUTS:
            self.spans[cut] += by_cut[cut]["spans"]
            for score in SCORES:
                self.values[cut][score] += by_cut[cut]["values"][score]

    def measure(self, *, draws: int, seed: int) -> dict[str, BoundaryRow]:
        """The AUROC of each score under each rule, with bootstrap intervals. Empty if a class is missing."""
        if not (sum(self.hallucinated) and sum(self.supported)):
            return {}
        bootstrap = Bootstrap(self.groups, draws, seed)
        positive, negative = _floats(self.hallucinated), _floats(self.supported)
        return {
            cut: {
                "spans": self.spans[cut],
                "tokens_per_span": len(self.groups) / self.spans[cut],
                "auroc": {
                    score: bootstrap.interval(Ranked(values, positive, negative), "auroc").record()
                    for score, values in self.values[cut].items()
                },
            }
            for cut in CUTS
        }


def scored(forced: TeacherForced, cutter: Cutter, layers: Layers, alpha: float) -> dict[str, Any]:
    """By rule, the number of an answer's spans and the scores of its tokens, as plain values."""
    found: dict[str, Any] = {}
    for cut in CUTS:
        spans, values = 0, {score: list[float]() for score in SCORES}
        for start, end in cutter.spans(forced, cut):
            profile = forced.profile.span(start, end)
            con = float(profile.con_mlds(layers.window)[0])
            f = float(profile.f_mlds(layers.window, layers.final)[0])
            log_prob = sum(forced.profile.log_probs[start:end])
            scores = (f, con, -log_prob, -log_prob / (end - start), -cocoa_sig(log_prob, f, alpha))
            for score, value in zip(SCORES, scores, strict=True):
                values[score] += [value] * (end - start)
            spans += 1
        found[cut] = {"spans": spans, "values": values}
    return found


class Cutter:
    """Divides a given text into spans by one of the rules of :data:`CUTS`.

    ``"token"`` ends a span after each token. The other rules begin a span where several tokens compete and end it as
    decoding would: before the text's next risk point (``"own"``), after ``max_span_tokens`` (``"fixed"``), or at the
    ``"left"`` or ``"right"`` boundary of the branches that decoding grows there. The tokens between such spans form
    spans too, up to the next position where tokens compete or where the text is not the model's most probable one.

    Args:
        engine: the engine that grows the branches.
        config: the settings; ``gamma``, ``max_candidates`` and ``max_span_tokens`` are used.
    """

    def __init__(self, engine: CocoaEngine, config: CocoaConfig) -> None:
        self._max_tokens = config.max_span_tokens
        self._growers = {
            cut: CandidateGrower(engine.session, config.replace(span_boundary=cut)) for cut in ("left", "right")
        }

    def spans(self, forced: TeacherForced, cut: Cut) -> Iterator[tuple[int, int]]:
        """The token range of each span, the end exclusive. Together the spans cover the answer."""
        profile = forced.profile
        count, start = len(profile.token_ids), 0
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
                end = min(run, start + self._max_tokens)
            elif cut == "fixed":
                end = min(start + self._max_tokens, count)
            else:
                # exactly at gamma, the rounding of another forward pass may leave no competing tokens
                end = min(start + grown_length(grown[start]), count)
            yield start, end
            start = end


def with_boundary_scores(
    answers: Iterable[TeacherForced],
    engine: CocoaEngine,
    config: CocoaConfig,
    cuts: BoundaryScores,
    cache: AnswerCache | None = None,
) -> Iterator[TeacherForced]:
    """Pass answers through, and add those whose parts are labelled to ``cuts``.

    Args:
        answers: the answers. Those that are in the cache may be without their hidden states.
        engine: the engine that grows branches.
        config: the settings.
        cuts: receives the scores.
        cache: a :func:`boundaries_cache`. Scores that are in it are not measured again.
    """
    layers, cutter = Layers.of(config, engine.num_layers), Cutter(engine, config)
    for forced in answers:
        values = None if cache is None else cache.get(identity(forced.record))
        if values is None:
            values = {} if forced.record.spans is None else scored(forced, cutter, layers, config.alpha)
            if cache is not None:
                cache.add(identity(forced.record), values)
        if forced.record.spans is not None:
            cuts.add(forced, values)
        yield forced


def boundaries_cache(folder: CacheFolder, engine: CocoaEngine, config: CocoaConfig, *, chat: bool) -> AnswerCache:
    """A cache of the scores of answers.

    Raises:
        ConfigError: as for :class:`.AnswerCache`.
    """
    return AnswerCache(folder, "boundaries", engine, config, {"config": config.model_dump(mode="json"), "chat": chat})


def _floats(values: list[int]) -> Floats:
    return np.array(values, dtype=np.float64)
