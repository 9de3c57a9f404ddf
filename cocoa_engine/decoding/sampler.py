"""Draws the tokens of one answer, for methods that sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.next_tokens import Chosen, NextTokens, log_probs_of
from cocoa_engine.methods import SamplingMethod


class Sampler:
    """Draws the k-th token of an answer with the k-th random number, by inverting the cumulative distribution.

    A token therefore depends on the seed and its position only: not on the batch, on tokens that were fed ahead, or on
    how often a distribution is computed.

    Args:
        method: gives the distributions.
        config: the settings.
        generator: the source of the random numbers, used by this sampler alone.
        prompt_length: the number of tokens before the answer.
    """

    def __init__(
        self, method: SamplingMethod, config: CocoaConfig, generator: torch.Generator, prompt_length: int
    ) -> None:
        self._method, self._config, self._generator = method, config, generator
        self._prompt_length = prompt_length
        self._numbers: list[float] = []  # uniform in [0, 1), by position in the answer

    def drawn(
        self, known: Sequence[NextTokens | None], logits: Tensor, positions: Sequence[int]
    ) -> list[NextTokens | None]:
        """Add to each distribution the token that is drawn from it.

        Args:
            known: the distributions; `None` for rows in which no token can be chosen.
            logits: ``[W, V]``, after the logits processors.
            positions: for each row, the index of the next token in the whole sequence, prompt included.
        """
        totals = self._method.probabilities(logits.float(), self._config).cumsum(-1)
        numbers = torch.tensor([[self._number(position)] for position in positions], dtype=torch.float64)
        below = torch.nextafter(totals[:, -1:], torch.zeros_like(totals[:, -1:]))  # rounding must not reach the total
        targets = torch.minimum(numbers.to(totals.device) * totals[:, -1:], below)
        token_ids = torch.searchsorted(totals, targets, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
        rows = zip(known, token_ids.tolist(), log_probs_of(logits, token_ids).tolist(), strict=True)
        return [
            None if each is None else replace(each, chosen=Chosen(token_id, log_prob))
            for each, token_id, log_prob in rows
        ]

    def _number(self, position: int) -> float:
        """The random number of a position."""
        index = position - self._prompt_length
        if missing := max(0, index + 1 - len(self._numbers)):
            self._numbers += torch.rand(missing, generator=self._generator, dtype=torch.float64).tolist()
        return self._numbers[index]
