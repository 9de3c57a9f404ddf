"""Figures, by matplotlib's objects alone: no global state of it is touched, and no back end chosen."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

from cocoa_engine.extras import need
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.rendering.words import METRIC_NAMES, REACHED, visible
from cocoa_engine.results import Generation, LayerCurve, Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cocoa_engine.risk.calibrator import Validation

COLORS = ("#c9ccd4", "#ffdf7e", "#f2a03d", "#c0392b")
LABEL = 36  # characters


def mlds_along(generation: Generation) -> Figure:
    """fMLDS and ConMLDS of every span that can be seen, in the order of the text; the metric at risk is coloured."""
    spans = [span for span in generation.spans if span.text.strip()]
    scale = RiskScale.of(spans)
    figure = _figure(9, 0.26 * max(len(spans), 1) + 1.3)
    axes = figure.subplots(1, 2, sharey=True)
    for panel, name in zip(axes, METRIC_NAMES, strict=True):
        at_risk = name == generation.config.metric
        levels = [scale.level(span.risk) if at_risk else 0 for span in spans]
        panel.barh(
            range(len(spans)),
            [getattr(span, name) for span in spans],
            color=[COLORS[level] for level in levels],
            edgecolor="#555555",
            linewidth=[1.5 if span.candidates else 0.3 for span in spans],
        )
        panel.set_xlabel(METRIC_NAMES[name] + (" (colour: level of risk)" if at_risk else ""))
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    axes[0].set_yticks(range(len(spans)), [_span_label(span) for span in spans], parse_math=False)
    axes[0].set_ylim(max(len(spans), 1) - 0.5, -0.5)
    figure.suptitle(f"{generation.config.method}: disagreement along the text (bold edge: a risk point)", fontsize=10)
    return figure


def layer_curve(curve: LayerCurve) -> Figure:
    """dis(j, j + 1) and dis(j, L) over the layers j, with the middle window shaded and both MLDS in figures."""
    m, n = curve.middle_layers
    figure = _figure(7, 4.2)
    axes = figure.subplots(2, 1, sharex=True)
    panels = (
        (curve.to_final, f"dis(j, {curve.num_layers})", f"fMLDS {curve.f_mlds:.3f}"),
        (curve.consecutive, "dis(j, j + 1)", f"ConMLDS {curve.con_mlds:.3f}"),
    )
    for panel, (values, name, mlds) in zip(axes, panels, strict=True):
        panel.axvspan(m - 0.5, n + 0.5, color="#f2a03d", alpha=0.2, label=f"middle layers {m} to {n}: {mlds}")
        panel.plot(range(len(values)), values, "o-", color="#2c5f9e", markersize=3)
        panel.set_ylabel(name)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    axes[1].set_xlabel(f"layer j (0: embedding), L = {curve.num_layers}, {curve.final_layer}")
    figure.suptitle(f"Disagreement of the layers about “{_label(curve.text)}”", fontsize=10, parse_math=False)
    return figure


def reliability_curve(found: Validation, unit: str) -> Figure:
    """The share of hallucinated items against their mean risk, bin by bin; on the diagonal a risk is a probability."""
    figure = _figure(4.6, 4.6)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], ":", color="#555555", label="a probability")
    risks = [one.mean_risk for one in found.reliability]
    shares = [one.share_hallucinated for one in found.reliability]
    sizes = [one.items for one in found.reliability]
    least, most = min(sizes), max(sizes)
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    axes.plot(risks, shares, "o-", color="#2c5f9e", label=f"{each} {unit}s each")
    axes.axhline(found.hallucinated / found.items, color="#f2a03d", linestyle="--", linewidth=1, label="base rate")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.grid(alpha=0.3)
    axes.set_xlabel(f"mean risk of the {unit}s")
    axes.set_ylabel("share that is hallucinated")
    axes.legend(fontsize=8)
    source = found.division or "fitted on other prompts"
    axes.set_title(
        f"{found.items:,} {unit}s of {found.prompts:,} prompts, {source}\n"
        f"ECE {found.ece:.3f}, Brier {found.brier:.3f} (base rate {found.brier_of_base_rate:.3f})",
        fontsize=9,
    )
    return figure


def _span_label(span: Span) -> str:
    return f"{_label(span.text)} ({REACHED})" if span.reaches_max_risk else _label(span.text)


def _label(text: str) -> str:
    return textwrap.shorten(visible(text.strip()), LABEL, placeholder=" …") or visible(text)[:LABEL]


def _figure(width: float, height: float) -> Figure:
    """A figure that notebooks show by themselves, whether or not pyplot was ever imported."""
    need("matplotlib", extra="plot", what="drawing a figure")
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=120)
            return buffer.getvalue()

    options: dict[str, Any] = {"figsize": (width, height), "layout": "constrained"}
    return ShownFigure(**options)
