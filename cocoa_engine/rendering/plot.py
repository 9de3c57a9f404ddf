"""Plots with matplotlib's object-oriented interface. They do not use pyplot's global state or select a backend."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from cocoa_engine.errors import need
from cocoa_engine.rendering.highlights import Answer, RiskScale, visible
from cocoa_engine.rendering.wording import METRIC_NAMES, REACHED
from cocoa_engine.risk.fitted import Validation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#c9ccd4", "#ffdf7e", "#f2a03d", "#c0392b")
LABEL_LENGTH = 36  # characters


def mlds_by_span(answer: Answer) -> Figure:
    """A bar for the fMLDS and the ConMLDS of every visible span, in the order of the text.

    Bars of the configured metric are coloured by the level of risk.
    """
    spans = [span for span in answer.spans if span.text.strip()]
    scale = RiskScale.of(spans)
    figure = _figure(9, 0.26 * max(len(spans), 1) + 1.3)
    axes = figure.subplots(1, 2, sharey=True)
    for panel, name in zip(axes, METRIC_NAMES, strict=True):
        is_risk = name == answer.config.metric
        levels = [scale.level(span.risk) if is_risk else 0 for span in spans]
        panel.barh(
            range(len(spans)),
            [getattr(span, name) for span in spans],
            color=[COLORS[level] for level in levels],
            edgecolor="#555555",
            linewidth=[1.5 if span.candidates else 0.3 for span in spans],
        )
        panel.set_xlabel(METRIC_NAMES[name] + (" (colour: level of risk)" if is_risk else ""))
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    labels = [_label(span.text) + (f" ({REACHED})" if span.reaches_max_risk else "") for span in spans]
    axes[0].set_yticks(range(len(spans)), labels, parse_math=False)
    axes[0].set_ylim(max(len(spans), 1) - 0.5, -0.5)
    figure.suptitle(f"{answer.config.method}: disagreement along the text (bold edge: a risk point)", fontsize=10)
    return figure


def reliability_curve(validation: Validation, unit: str) -> Figure:
    """The share of hallucinated items against their mean risk, for each bin. A calibrated risk is on the diagonal."""
    figure = _figure(4.6, 4.6)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], ":", color="#555555", label="perfectly calibrated")
    risks = [part.mean_risk for part in validation.reliability]
    shares = [part.share_hallucinated for part in validation.reliability]
    least, *_, most = sorted(2 * [part.items for part in validation.reliability])
    size = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    axes.plot(risks, shares, "o-", color="#2c5f9e", label=f"{size} {unit}s each")
    axes.axhline(
        validation.hallucinated / validation.items, color="#f2a03d", linestyle="--", linewidth=1, label="base rate"
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.grid(alpha=0.3)
    axes.set_xlabel(f"mean risk of the {unit}s")
    axes.set_ylabel("share that is hallucinated")
    axes.legend(fontsize=8)
    source = validation.division or "fitted on other prompts"
    axes.set_title(
        f"{validation.items:,} {unit}s of {validation.prompts:,} prompts, {source}\n"
        f"ECE {validation.ece:.3f}, Brier {validation.brier:.3f} (base rate {validation.brier_of_base_rate:.3f})",
        fontsize=9,
    )
    return figure


def _label(text: str) -> str:
    return textwrap.shorten(visible(text.strip()), LABEL_LENGTH, placeholder=" …") or visible(text)[:LABEL_LENGTH]


def _figure(width: float, height: float) -> Figure:
    """A figure that notebooks display even if pyplot was never imported."""
    need("matplotlib", extra="plot", what="drawing a figure")
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=120)
            return buffer.getvalue()

    return ShownFigure(figsize=(width, height), layout="constrained")
