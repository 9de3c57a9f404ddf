"""The paper's heuristic for alpha (its appendix on the penalty weight): the scale of |log p_S| against that of MLDS.

Prompts are decoded with alpha = 1, and (MLDS, |log p_S|) of every candidate span is collected. The paper takes alpha
near "the ratio of MLDS and |log p_S|", where the penalty neither overwhelms fluency nor is negligible beside it,
and reports 1.125 to 1.768 on its models. It states neither which of the two is divided by the other nor how spans are
aggregated. This reconstruction uses |log p_S| / MLDS, the alpha at which CoCoA's penalty is as large as log p_S.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import ranking_mlds
from cocoa_engine.errors import CalibrationError, need
from cocoa_engine.lab.cache import AnswerCache, answered
from cocoa_engine.output_files import draft_of
from cocoa_engine.results import Generation

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


Scale = tuple[float, float]
"""A candidate span: its MLDS by the configured metric, and |log p_S| in nats."""


class AlphaRange(NamedTuple):
    """The quartiles of |log p_S| / MLDS over all candidate spans, and the mean |log p_S| divided by the mean MLDS."""

    low: float
    median: float
    high: float
    of_means: float
    candidates: int


def collect(
    engine: "CocoaEngine",
    prompts: Sequence[str | Sequence[int]],
    config: CocoaConfig,
    *,
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Scale]:
    """Decode prompts with alpha = 1 and collect every candidate of every risk point; see :func:`.answered`."""
    settings = config.replace(alpha=1.0)

    def candidates_of(generation: Generation) -> dict[str, Any]:
        candidates = (candidate for span in generation.spans for candidate in span.candidates)
        measured = ((candidate.con_mlds, candidate.f_mlds, abs(candidate.log_prob)) for candidate in candidates)
        return {"candidates": [(ranking_mlds(settings, con, f), log_prob) for con, f, log_prob in measured]}

    asked = answered(engine, prompts, prompts, settings, candidates_of, cache=cache, advance=advance)
    return [(mlds, log_prob) for _, values in asked for mlds, log_prob in values["candidates"]]


def suggest(candidates: Sequence[Scale]) -> AlphaRange:
    """The range of alpha that the candidates suggest. Candidates with an MLDS of 0 are ignored."""
    values = np.array([candidate for candidate in candidates if candidate[0] > 0], dtype=np.float64)
    if not len(values):
        raise CalibrationError("no candidate spans: none of the prompts led to a risk point. Give more prompts.")
    low, median, high = np.quantile(values[:, 1] / values[:, 0], [0.25, 0.5, 0.75])
    of_means = float(values[:, 1].mean() / values[:, 0].mean())
    return AlphaRange(float(low), float(median), float(high), of_means, len(values))


def draw(candidates: Sequence[Scale], ratios: AlphaRange, metric: str, path: Path) -> None:
    """Draw the paper's scatter plot, with lines of equal ratio at the quartiles. Needs matplotlib."""
    need("matplotlib", extra="risk", what="the scatter plot")
    from matplotlib.figure import Figure

    values = np.array(candidates, dtype=np.float64)
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(values[:, 0], values[:, 1], s=8, alpha=0.4, rasterized=True)  # thousands of points
    ends = np.array([values[:, 0].min(), values[:, 0].max()])
    for name in ("low", "median", "high"):
        ratio = getattr(ratios, name)
        axes.plot(ends, ratio * ends, linestyle="-" if name == "median" else ":", label=f"{name}: {ratio:.2f}")
    axes.set_xlabel(metric)
    axes.set_ylabel("|log p_S| in nats")
    axes.legend(title="|log p_S| / MLDS")
    with draft_of(path) as draft:
        figure.savefig(draft, format=path.suffix[1:], dpi=120)
