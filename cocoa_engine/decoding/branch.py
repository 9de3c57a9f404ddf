"""Spans while they are decoded: a growing branch, and the span that was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cocoa_engine.decoding.next_tokens import NextTokens
from cocoa_engine.decoding.span_scoring import mlds
from cocoa_engine.execution.backends import Path
from cocoa_engine.model.detokenizer import TextTrack
from cocoa_engine.spans import Candidate, FinishReason, Preceding


@dataclass
class Branch:
    """A span that is being decoded: a candidate at a risk point, or a greedy run.

    Attributes:
        hidden: ``[N + 1, d]`` float32: sums over the fed tokens of the states of layers m..n and the final one.
        next: the distribution after the last fed token, if another token may follow.
        track: the text up to the last token.
        ended: why no token may follow.
        stands_at: r_b, the number of tokens after which the branch is at its own next risk point or cannot go on.
    """

    track: TextTrack
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    contrasts: list[float] = field(default_factory=list)
    hidden: Tensor | None = None
    next: NextTokens | None = None
    ended: FinishReason | None = None
    stands_at: int | None = None

    @property
    def path(self) -> Path:
        """Its tokens."""
        return tuple(self.token_ids)

    def add_token(self, following: NextTokens, rank: int | None = None) -> None:
        """Add a next token and the statistics of the distribution that it is chosen from.

        Args:
            rank: of the token among the most probable ones, from 0. `None` takes the best, by its contrast where a
                method has one.
        """
        if rank is None and following.contrasted is not None:
            token_id, log_prob, contrast = following.contrasted
            self.contrasts.append(contrast)
        else:
            token_id, log_prob = following.token_ids[rank or 0], following.log_probs[rank or 0]
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.entropies.append(following.entropy)
        self.margins.append(following.margin)

    def add_states(self, states: Tensor | None) -> None:
        """Add the states of a fed token, ``[N + 1, d]``."""
        assert states is not None
        self.hidden = states if self.hidden is None else self.hidden + states


def branch_mlds(branches: Sequence[Branch]) -> tuple[list[float], list[float]]:
    """ConMLDS and fMLDS of each branch, whose states were pooled over its tokens."""
    pooled = [branch.hidden / len(branch.token_ids) for branch in branches if branch.hidden is not None]
    return mlds(torch.stack(pooled, dim=1))


@dataclass(frozen=True)
class DecidedSpan:
    """A finished span.

    Attributes:
        text_end: where its complete characters end in the text, before any stop text is cut.
    """

    token_ids: list[int]
    token_log_probs: list[float]
    token_entropies: list[float]
    token_margins: list[float]
    log_prob: float
    con_mlds: float
    f_mlds: float
    score: float
    candidates: list[Candidate]
    chosen: int | None
    text_end: int
    token_copied: list[int] = field(default_factory=list)
    preceding: Preceding = field(default_factory=Preceding)
