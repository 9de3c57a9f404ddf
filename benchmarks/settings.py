"""What is measured, how much of it, and with which model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "explanation"
"""The folder of the page that reports the results, and of its plots in ``performance/``."""

MEASUREMENTS = (
    "single_stream",
    "context",
    "prompt_length",
    "tips",
    "batch",
    "candidates",
    "capture",
    "precision",
    "scoring",
    "startup",
)
"""One module each, whose ``measure`` returns the figures that are written to NAME.json."""


@dataclass(frozen=True)
class Settings:
    """Sizes of all measurements.

    Attributes:
        model: hub name or folder; none is the embedded model.
        threads: of torch, the same for every rival.
        rounds: of each comparison that a bar is set for.
        tokens: at most this many new tokens for each answer.
        prompts: questions of the single-stream comparisons.
        passages: questions about a passage.
        lengths: prompt lengths in tokens; the bars are for the last.
        batches: batch sizes.
        candidates: values of ``max_candidates``.
        answers: scored answers.
    """

    model: str | None = None
    threads: int = 2
    rounds: int = 3
    tokens: int = 64
    prompts: int = 8
    passages: int = 8
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    candidates: tuple[int, ...] = (1, 2, 3, 5, 8)
    answers: int = 100

    def quick(self) -> Settings:
        """The least that still runs every line: for trying the suite out, not for figures."""
        return replace(
            self,
            rounds=1,
            tokens=min(self.tokens, 16),
            prompts=2,
            passages=2,
            lengths=(192, 256),
            batches=(1, 2),
            candidates=(1, 3),
            answers=8,
        )
