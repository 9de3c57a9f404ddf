"""The rules of a request for its next tokens: end tokens, stop texts, logits processors and stopping criteria."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.sampler import Sampler
from cocoa_engine.errors import ConfigError
from cocoa_engine.execution.backends import Path
from cocoa_engine.model.callables import Criterion, Processor


@dataclass
class Rules:
    """The rules of one request.

    Attributes:
        config: the settings, with ``max_new_tokens`` limited to the context window.
        eos: token ids that end the text.
        stop_texts: texts that end the answer and are cut off.
        stop_ids: ids of special tokens that were given as stop texts.
        processors: transformers logits processors, called as ``(ids [1, t], logits [1, V])`` before the softmax.
        criteria: transformers stopping criteria, called as ``(ids [1, t], None)`` after each token. True ends the text.
        window_left: the number of tokens left in the context window after the prompt; `None`: no limit.
            Branches may grow beyond ``max_new_tokens``, but not beyond this.
        generator: the random generator that samples a branch if ``temperature`` is above 0, otherwise `None`.
        sampler: draws the tokens of the answer, for a sampling method with ``temperature`` above 0.
    """

    config: CocoaConfig
    eos: frozenset[int]
    stop_texts: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    processors: Sequence[Processor] = ()
    criteria: Sequence[Criterion] = ()
    window_left: int | None = None
    generator: torch.Generator | None = None
    sampler: Sampler | None = None

    def processed(self, prefix: Sequence[int], paths: Sequence[Path], scores: Tensor) -> Tensor:
        """Apply the logits processors, in order, to each row of scores.

        Args:
            prefix: the token ids before all paths, prompt included.
            paths: for each row, the token ids between the prefix and the next token.
            scores: ``[W, V]``.

        Returns:
            The processed scores, ``[W, V]``.

        Raises:
            ConfigError: a processor does not return a tensor of the same shape as its scores.
        """
        rows = []
        for path, row in zip(paths, scores, strict=True):
            ids, processed = torch.tensor([[*prefix, *path]], device=row.device), row[None]
            for processor in self.processors:
                processed = processor(ids, processed)
                if not isinstance(processed, Tensor) or processed.shape != row[None].shape:
                    raise ConfigError(
                        f"the logits processor {type(processor).__name__} must return a tensor of the same shape as "
                        f"its scores, {list(row[None].shape)}."
                    )
            rows.append(processed)
        return torch.cat(rows)

    def criteria_met(self, prefix: Sequence[int], path: Path) -> bool:
        """Whether a stopping criterion ends the text after ``path``, which follows ``prefix``.

        Raises:
            ConfigError: a criterion returns neither a bool nor a tensor.
        """
        if not self.criteria:
            return False
        ids = torch.tensor([[*prefix, *path]])
        return any(_all_true(criterion, criterion(ids, None)) for criterion in self.criteria)


def _all_true(criterion: Criterion, met: object) -> bool:
    if not isinstance(met, (bool, Tensor)):
        raise ConfigError(f"the stopping criterion {type(criterion).__name__} must return a bool or a bool tensor.")
    return bool(torch.as_tensor(met).all())
