"""Branches of a risk point, and their scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cocoa_engine import equations
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.next_tokens import NextTokens
from cocoa_engine.decoding.token_feed import TokenOutput
from cocoa_engine.equations import mean_pooled_sum
from cocoa_engine.execution.backends import Path
from cocoa_engine.methods import METHODS
from cocoa_engine.model.tokenizer import Detokenizer
from cocoa_engine.risk import RiskCalibrator
from cocoa_engine.spans import FinishReason, Span


def mlds(pooled: Tensor) -> tuple[list[float], list[float]]:
    """ConMLDS and fMLDS of B spans, from the mean states of layers m..n, then of the final layer, ``[N + 1, B, d]``."""
    middle, final = pooled[:-1], pooled[-1]
    con, f = torch.stack([equations.con_mlds(middle), equations.f_mlds(middle, final)]).tolist()
    return con, f


def log_prob_and_score(
    config: CocoaConfig,
    token_log_probs: Sequence[float],
    con_mlds: float,
    f_mlds: float,
    *,
    contrasts: Sequence[float] = (),
    pmi: float = 0.0,
) -> tuple[float, float]:
    """log p_S of a span without rivals, and its score under the configured method and metric.

    The score of a contrasting method is log p_S computed from the contrasts of the tokens. ``pmi`` is PMI(S; x).
    """
    log_prob = equations.span_log_prob(token_log_probs, config.span_log_prob)
    if contrasts:
        return log_prob, equations.span_log_prob(contrasts, config.span_log_prob)
    return log_prob, span_score(config, log_prob, con_mlds, f_mlds, pmi)


def span_score(config: CocoaConfig, log_prob: float, con_mlds: float, f_mlds: float, pmi: float = 0.0) -> float:
    """The score of a span with log p_S; ``diver_weight`` times PMI(S; x) is added to it."""
    mlds = f_mlds if config.metric == "f_mlds" else con_mlds
    score = METHODS[config.method].score(log_prob, mlds, config.alpha)
    return equations.diver(score, pmi, config.diver_weight)


@dataclass
class Branch:
    """A span that is being decoded: a candidate at a risk point, or a greedy run.

    Attributes:
        track: decodes the tokens to text, up to the last token of the branch.
        token_ids, log_probs, entropies, margins: one entry for each token.
        contrasts: the contrast of each token, for a contrasting method.
        top: for each token, the most probable tokens at its position, if they are recorded.
        ends: for each token, the length of the text, in complete characters, after it.
        hidden: ``[captured layers + 1, d]`` float32, the captured states, summed over the fed tokens.
        source_attention: the source attention of each fed token; empty if the backend does not measure it.
        passage_attention: for each fed token, its attention on each passage; empty if there are none.
        next: the distribution after the last fed token; `None` if no token may follow.
        ended: why no further token may follow; `None` if one may.
        at_boundary: whether it has reached its own boundary: its next risk point, the length limit, or its end.
    """

    track: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    contrasts: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    hidden: Tensor | None = None
    source_attention: list[float] = field(default_factory=list)
    passage_attention: list[Sequence[float]] = field(default_factory=list)
    next: NextTokens | None = None
    ended: FinishReason | None = None
    at_boundary: bool = False

    @property
    def path(self) -> Path:
        """The branch's tokens as a path."""
        return tuple(self.token_ids)

    def measured(self) -> dict[str, Any]:
        """The statistics of its tokens, by the names of the fields of :class:`~cocoa_engine.spans.Measured`."""
        return {
            "token_ids": self.token_ids,
            "token_log_probs": self.log_probs,
            "token_entropies": self.entropies,
            "token_margins": self.margins,
            "token_source_attention": self.source_attention,
            "passage_attention": passage_means(self.passage_attention),
        }

    def add_token(self, following: NextTokens, rank: int | None = None) -> None:
        """Add a next token, by default the one that the method chooses, and the statistics of its distribution."""
        if rank is None and following.chosen is not None:
            token_id, log_prob, contrast = following.chosen
            if contrast is not None:
                self.contrasts.append(contrast)
        else:
            token_id, log_prob = following.token_ids[rank or 0], following.log_probs[rank or 0]
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.entropies.append(following.entropy)
        self.margins.append(following.margin)
        if following.top:
            self.top.append(list(following.top))

    def add_output(self, output: TokenOutput) -> None:
        """Add the states and the source attention of a fed token."""
        assert output.hidden is not None
        self.hidden = output.hidden if self.hidden is None else self.hidden + output.hidden
        if output.source is not None:
            self.source_attention.append(output.source)
        if output.passages:
            self.passage_attention.append(output.passages)

    def cut(self, track: Detokenizer, outputs: Sequence[TokenOutput]) -> "Branch":
        """The first tokens of the branch, those of some outputs, as a branch that no token may follow.

        None of them has been pushed to ``track`` yet.
        """
        names = ("token_ids", "log_probs", "entropies", "margins", "top", "ends")
        branch = Branch(track, **{name: getattr(self, name)[: len(outputs)] for name in names})
        for token_id, output in zip(branch.token_ids, outputs, strict=True):
            track.push(token_id)
            branch.add_output(output)
        return branch


def pooled_states(branches: Sequence[Branch]) -> Tensor:
    """The states of each branch averaged over its tokens, ``[captured layers + 1, B, d]``."""
    pooled = [mean_pooled_sum(branch.hidden, len(branch.token_ids)) for branch in branches if branch.hidden is not None]
    return torch.stack(pooled, dim=1)


def passage_means(tokens: Sequence[Sequence[float]]) -> list[float]:
    """The mean attention on each passage, over the tokens of a span; empty without passages."""
    return [sum(column) / len(column) for column in zip(*tokens, strict=True)]


NOT_PLACED: dict[str, Any] = {"text": "", "start": 0, "end": 0, "risk": None}
"""The fields of a span that :func:`~cocoa_engine.decoding.task.complete_span` sets."""


def with_source_attention(span: Span, calibrator: RiskCalibrator | None) -> Span:
    """The span with zeros as source attention if the calibrator needs it and the prompt has no source.

    The prompt's first token does not count as a source, so a prompt of one token has none.
    """
    if calibrator is None or calibrator.heads is None or span.token_source_attention:
        return span
    return span.model_copy(update={"token_source_attention": [0.0] * len(span.token_ids)})
