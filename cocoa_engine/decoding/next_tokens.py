"""The most probable next tokens, statistics of their distribution, and sampling from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import NonFiniteLogitsError
from cocoa_engine.execution.native import operators
from cocoa_engine.methods import SamplingMethod

_NOTHING = -1e4
"""Replaces differences of -inf from the best logit: e^-10000 is 0 in float32, so products are 0; 0 * -inf is NaN."""


def row_statistics(logits: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum of e^logits, and entropy in nats, of each row: ``[W]``. A forbidden token (-inf) adds nothing.

    With x = logits - best and Z = sum(e^x), the entropy is log Z - sum(x e^x) / Z. This form stays accurate if one
    token has nearly all of the probability. (torch's softmax kernels sum less accurately than ``sum``.) It is
    :func:`.equations.entropy` for the decode loop: the log-probabilities of all tokens are not needed for it.

    Args:
        logits: ``[W, V]`` float32.
        best: ``[W]``, the highest logit of each row.
    """
    below = (logits - best[:, None]).contiguous()  # BLAS sums strided rows less exactly
    weights = below.exp()
    total = weights.sum(dim=1)
    products = _row_products(weights, below)
    # NaNs are looked for on the CPU only: on a GPU the test needs a synchronization, which costs more than the clamp
    if logits.device.type != "cpu" or products.isnan().any():
        products = _row_products(weights, below.clamp_(min=_NOTHING))
    log_total = total.log()
    return best + log_total, (log_total - products / total).clamp_(min=0)


def _row_products(left: Tensor, right: Tensor) -> Tensor:
    """Dot product of each pair of rows, ``[W]``: one BLAS call per row on a CPU, one kernel for all rows on a GPU."""
    if left.device.type == "cpu":
        return torch.stack([torch.dot(a, b) for a, b in zip(left, right, strict=True)])
    return torch.linalg.vecdot(left, right)


def token_statistics(logits: Tensor, token_ids: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Log-probability of each of t tokens, and entropy and margin of the distribution that predicts it, ``[t, V]``."""
    logits = logits.float()
    best = logits.topk(min(2, logits.shape[1]), dim=1).values  # [t, 2]
    log_sum, entropy = row_statistics(logits, best[:, 0])
    log_probs = (logits.gather(1, token_ids[:, None])[:, 0] - log_sum).clamp(max=0)
    of_tokens, entropies, margins = torch.stack([log_probs, entropy, best[:, 0] - best[:, -1]]).tolist()
    return of_tokens, entropies, margins


def most_probable(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The most probable tokens of each row, ``[t, V]``, as ids with log-probabilities, most probable first.

    Equally probable ones are by ascending id. A token has exactly the log-probability that :func:`token_statistics`
    gives it.
    """
    count = min(count, logits.shape[1])
    rows = _ranked(logits.float(), count)
    return [
        [(int(token_id), min(p, 0.0)) for p, token_id in zip(row[:count], row[count:-1], strict=True)] for row in rows
    ]


def ids_by_rank(logits: Tensor, values: list[float], token_ids: list[int], count: int) -> list[int]:
    """The ids of the ``count`` highest logits of a row, ``[V]``, highest first; equal logits by ascending id.

    ``topk``, which takes any of equal logits, gave one value more than ``count``, to show whether the last one is tied.
    """
    if len(values) > count and values[count - 1] == values[count] > -math.inf:
        tied = (logits == values[count]).nonzero()[:count, 0].tolist()
        token_ids = [*token_ids[: values.index(values[count])], *tied]
    return [token_ids[rank] for rank in sorted(range(count), key=lambda rank: (-values[rank], token_ids[rank]))]


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
        log_probs, entropy: natural log p(w | x, y) of each token, and entropy in nats, over the whole vocabulary.
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

    def competing(self, gamma: float, max_candidates: int) -> "NextTokens":
        """The candidate set C = {w : p(w) >= gamma * max p}, at most ``max_candidates`` tokens.

        gamma = 1 is plain greedy decoding and gives one token, even if several are exactly tied (common in bfloat16).
        """
        if gamma == 1:
            max_candidates = 1
        threshold = self.log_probs[0] + math.log(gamma)
        size = sum(log_prob >= threshold for log_prob in self.log_probs[:max_candidates])
        return NextTokens(self.token_ids[:size], self.log_probs[:size], self.entropy, self.margin, top=self.top)


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
    if native and operators.is_readable(logits):
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
    distributions: Sequence[NextTokens | None], logits: Tensor, contrasts: Tensor, ranked: Tensor
) -> list[NextTokens | None]:
    """Add to each distribution the token that a contrasting method chooses: the one with the highest ``ranked`` value.

    Args:
        logits, contrasts: ``[W, V]``, the model's logits, and the contrast of every token.
        ranked: ``[W, V]``, the contrasts of the allowed tokens after the processors; -inf for other tokens.

    Returns:
        One entry per row; `None` for a row in which no token can be chosen.
    """
    best, token_ids = ranked.max(dim=-1)
    columns = (best, token_ids, log_probs_of(logits, token_ids), contrasts.gather(1, token_ids[:, None])[:, 0])
    rows = torch.stack([column.double() for column in columns], dim=1).tolist()
    return [
        None
        if distribution is None or not all(map(math.isfinite, row))
        else replace(distribution, chosen=Chosen(int(row[1]), row[2], row[3]))
        for distribution, row in zip(distributions, rows, strict=True)
    ]


def log_probs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log p of one token in each row: ``[W, V]`` logits and ``[W]`` ids to ``[W]`` float32."""
    return logits.float().gather(1, token_ids[:, None])[:, 0] - logits.float().logsumexp(dim=-1)


def non_finite(position: int) -> NonFiniteLogitsError:
    """The error that no token can be chosen at a position of the sequence, prompt included."""
    return NonFiniteLogitsError(
        f"the logits for token {position} of the sequence (prompt included) are NaN or infinite, or a logits "
        "processor forbids every token there; check the weights, or load the model in float32 or bfloat16."
    )


class Sampler:
    """Draws the k-th token of an answer with the k-th random number, by inverting the cumulative distribution.

    A token therefore depends on the seed and its position only: not on the batch, on tokens that were fed ahead, or on
    how often a distribution is computed.

    The generator of the random numbers is used by this sampler alone.
    """

    def __init__(
        self, method: SamplingMethod, config: CocoaConfig, generator: torch.Generator, prompt_length: int
    ) -> None:
        self._method, self._config = method, config
        self._generator, self._prompt_length = generator, prompt_length
        self._numbers: list[float] = []  # uniform in [0, 1), by position in the answer

    def drawn(
        self, distributions: Sequence[NextTokens | None], logits: Tensor, positions: Sequence[int]
    ) -> list[NextTokens | None]:
        """Add to each distribution the token that is drawn from it.

        Args:
            logits: ``[W, V]``, after the logits processors.
            positions: for each row, the index of the next token in the whole sequence, prompt included.
        """
        totals = self._method.probabilities(logits.float(), self._config).cumsum(-1)
        indices = [position - self._prompt_length for position in positions]
        if (missing := max(indices) + 1 - len(self._numbers)) > 0:
            self._numbers += torch.rand(missing, generator=self._generator, dtype=torch.float64, device="cpu").tolist()
        numbers = totals.new_tensor([[self._numbers[index]] for index in indices], dtype=torch.float64)
        below = torch.nextafter(totals[:, -1:], torch.zeros_like(totals[:, -1:]))  # rounding must not reach the total
        targets = torch.minimum(numbers * totals[:, -1:], below)
        token_ids = torch.searchsorted(totals, targets, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
        rows = zip(distributions, token_ids.tolist(), log_probs_of(logits, token_ids).tolist(), strict=True)
        return [
            None if distribution is None else replace(distribution, chosen=Chosen(token_id, log_prob))
            for distribution, token_id, log_prob in rows
        ]
