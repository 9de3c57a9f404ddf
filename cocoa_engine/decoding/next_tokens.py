"""The most probable next tokens after a path, and the candidate set among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cocoa_engine.decoding.token_statistics import ids_by_rank, row_statistics
from cocoa_engine.errors import NonFiniteLogitsError
from cocoa_engine.execution.native import operators


class Chosen(NamedTuple):
    """The token that a method chooses instead of the most probable one, and its log p under the model.

    A contrasting method also gives its contrast.
    """

    token_id: int
    log_prob: float
    contrast: float | None = None


@dataclass(frozen=True)
class NextTokens:
    """The most probable next tokens, most probable first; equally probable ones by ascending id.

    Attributes:
        token_ids: the token ids, at least one.
        log_probs: natural log p(w | x, y) of each token, normalized over the whole vocabulary.
        entropy: entropy in nats of the distribution over the whole vocabulary.
        margin: log p of the most probable token minus log p of the second; inf if only one token is allowed.
        chosen: the token that a contrasting or sampling method chooses instead of the most probable one.
        top: the most probable tokens to record, each with its log p; empty unless ``CocoaConfig.top_logprobs`` asks.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    entropy: float
    margin: float
    chosen: Chosen | None = None
    top: tuple[tuple[int, float], ...] = ()

    @property
    def best(self) -> int:
        """The token that is chosen if no branches are opened."""
        return self.token_ids[0] if self.chosen is None else self.chosen.token_id

    def competing(self, gamma: float, max_candidates: int) -> NextTokens:
        """The candidate set C = {w : p(w) >= gamma * max p}, at most ``max_candidates`` tokens.

        gamma = 1 is plain greedy decoding and gives one token, even if several are exactly tied (common in bfloat16).
        """
        if gamma == 1:
            max_candidates = 1
        threshold = self.log_probs[0] + math.log(gamma)
        size = sum(log_prob >= threshold for log_prob in self.log_probs[:max_candidates])
        return NextTokens(self.token_ids[:size], self.log_probs[:size], self.entropy, self.margin, top=self.top)

    def with_top(self, count: int) -> NextTokens:
        """The same with the ``count`` most probable tokens to record."""
        return replace(self, top=tuple(zip(self.token_ids[:count], self.log_probs[:count], strict=True)))


def next_tokens(logits: Tensor, count: int, *, native: bool = False) -> list[NextTokens | None]:
    """The ``count`` most probable next tokens of each row of ``logits``. All rows are copied to the host at once.

    Args:
        logits: ``[W, V]``.
        count: at least 2, because the margin needs two tokens.
        native: use the native kernel if it can read the logits. It must have been built, see ``execution.native``.

    Returns:
        One entry per row; `None` for a row whose logits are NaN or +inf, or allow no token.
    """
    logits = logits.float()
    count = min(count, logits.shape[-1])
    if native and operators.can_rank(logits):
        rows = operators.next_tokens(logits, count).tolist()
    else:
        rows = _ranked(logits, count)
    result: list[NextTokens | None] = []
    for *row, spread in rows:
        if not math.isfinite(row[0]):
            result.append(None)
            continue
        values = tuple(value for value in row[:count] if value > -math.inf)
        ids = tuple(int(token_id) for token_id in row[count : count + len(values)])
        result.append(NextTokens(ids, values, spread, values[0] - values[1] if len(values) > 1 else math.inf))
    return result


def _ranked(logits: Tensor, count: int) -> list[list[float]]:
    """For each row: log p of the most probable tokens, their ids, and the entropy, as from the native kernel."""
    top = logits.topk(min(count + 1, logits.shape[-1]), dim=-1)  # [W, K]; see ids_by_rank
    log_sum, entropy = row_statistics(logits, top.values[:, 0])
    # ids < 2**53 are exact
    columns = (top.values, top.indices, top.values - log_sum[:, None], entropy[:, None])
    rows = []
    for of_row, row in zip(logits, torch.cat([column.double() for column in columns], dim=-1).tolist(), strict=True):
        width = len(row) // 3
        values, ids, log_probs = (row[width * part : width * (part + 1)] for part in range(3))
        rows.append([*log_probs[:count], *ids_by_rank(of_row, values, ids, count), row[-1]])
    return rows


def contrasted(
    known: Sequence[NextTokens | None], logits: Tensor, contrasts: Tensor, ranked: Tensor
) -> list[NextTokens | None]:
    """Add to each distribution the token that a contrasting method chooses: the one with the highest ``ranked`` value.

    Args:
        known: the distribution of each row, from :func:`next_tokens`.
        logits: ``[W, V]``, the model's logits.
        contrasts: ``[W, V]``, the contrast of every token.
        ranked: ``[W, V]``, the contrasts of the allowed tokens after the processors; -inf for other tokens.

    Returns:
        One entry per row; `None` for a row in which no token can be chosen.
    """
    best, token_ids = ranked.max(dim=-1)
    columns = (best, token_ids, log_probs_of(logits, token_ids), contrasts.gather(1, token_ids[:, None])[:, 0])
    rows = torch.stack([column.double() for column in columns], dim=1).tolist()
    return [
        None
        if each is None or not all(map(math.isfinite, row))
        else replace(each, chosen=Chosen(int(row[1]), row[2], row[3]))
        for each, row in zip(known, rows, strict=True)
    ]


def log_probs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log p of one token in each row: ``[W, V]`` logits and ``[W]`` ids to ``[W]`` float32."""
    return logits.float().gather(1, token_ids[:, None])[:, 0] - logits.float().logsumexp(dim=-1)


def non_finite(position: int) -> NonFiniteLogitsError:
    """The error that no token can be chosen.

    Args:
        position: the index of the token in the whole sequence, prompt included.
    """
    return NonFiniteLogitsError(
        f"the logits for token {position} of the sequence (prompt included) are NaN or infinite, or a logits "
        "processor forbids every token there; check the weights, or load the model in float32 or bfloat16."
    )
