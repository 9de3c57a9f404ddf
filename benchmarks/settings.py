"""The names of the measurements, and their sizes and model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "explanation"
"""The folder of the page that reports the results, and of its plots in ``performance/``."""

MEASUREMENTS = (
    "single_stream",
    "ratio",
    "context",
    "prompt_length",
    "batch",
    "candidates",
    "capture",
    "source_attention",
    "precision",
    "scoring",
    "startup",
    "contention",
)
"""The measurements. Each is a module whose ``measure`` returns the values that are written to NAME.json."""


@dataclass(frozen=True)
class Settings:
    """Sizes of all measurements.

    Attributes:
        model: Hub name or folder. ``None``: the embedded model.
        threads: number of torch threads, the same for every competitor.
        rounds: number of rounds of each comparison that has a target.
        tokens: maximum number of new tokens per answer.
        prompts: number of questions of the single-stream comparisons.
        untuned: number of questions on which nothing was tuned.
        passages: number of questions about a passage.
        lengths: prompt lengths in tokens. The targets refer to the last one.
        batches: batch sizes.
        candidates: values of ``max_candidates``.
        answers: number of scored answers.
        units: factor of the number of rounds of comparisons of single steps.
    """

    model: str | None = None
    threads: int = 2
    rounds: int = 3
    tokens: int = 64
    prompts: int = 8
    untuned: int = 40
    passages: int = 8
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    candidates: tuple[int, ...] = (1, 2, 3, 5, 8)
    answers: int = 100
    units: int = 10

    def quick(self) -> Settings:
        """Minimal sizes that still run all code. The timings are meaningless."""
        return replace(
            self,
            rounds=1,
            tokens=min(self.tokens, 16),
            prompts=1,
            untuned=1,
            passages=1,
            lengths=(192, 256),
            batches=(1, 2),
            candidates=(1, 3),
            answers=8,
            units=1,
        )
