"""Figures."""

import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cocoa_engine import CocoaEngine, MissingExtraError
from cocoa_engine.rendering.plot import reliability_curve
from tests.helpers.made_up_answers import generation
from tests.helpers.made_up_risk import fitted
from tests.helpers.processes import python

PROMPT = "The three primary colours are"


def colours(figure: Figure) -> int:
    """How many colours a figure has when it is drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return len(np.unique(np.asarray(canvas.buffer_rgba()).reshape(-1, 4), axis=0))


def test_figures_of_a_real_answer(engine: CocoaEngine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=12)
    figure = answer.plot()
    visible = [span for span in answer.spans if span.text.strip()]
    for axes, name in zip(figure.axes, ("f_mlds", "con_mlds"), strict=True):
        assert [bar.get_width() for bar in axes.patches] == [getattr(span, name) for span in visible]
    assert colours(figure) > 20


@pytest.mark.slow
def test_a_models_text_is_a_label_as_it_is() -> None:
    texts = ["$x$ costs \\frac{1}{2} _a^b", "a" * 200, "line\n<&> %s {}"]
    figure = generation(*((text, 0.8) for text in texts)).plot()
    assert colours(figure) > 20
    for label, text in zip(figure.axes[0].get_yticklabels(), texts, strict=True):
        assert label.get_text().removesuffix("…").strip()[:30] in text.replace("\n", "\\n")


@pytest.mark.slow
def test_notebooks_show_a_figure_and_pyplot_stays_untouched() -> None:
    program = """import sys, cocoa_engine
from tests.helpers.made_up_answers import generation
one = generation(('a', 0.8), (' b', 0.9))
assert not {'matplotlib', 'rich', 'torch'} & set(sys.modules)
assert one.plot()._repr_png_().startswith(b'\\x89PNG')
one.to_html(), one.to_markdown()
assert not {'matplotlib.pyplot', 'rich'} & set(sys.modules)
"""
    assert python(program) == ""


def test_an_empty_answer_has_a_figure_and_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert colours(generation().plot()) > 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib: pip install 'cocoa-integrations\[plot\]'"):
        generation(("a", 0.8)).plot()


@pytest.mark.slow
def test_a_reliability_curve_has_a_point_for_each_bin() -> None:
    risk = fitted().span
    assert risk is not None
    found = risk.validation
    figure = reliability_curve(found, "span")
    (axes,) = figure.axes
    points = [tuple(point) for line in axes.lines if line.get_marker() == "o" for point in line.get_xydata()]
    assert points == [(one.mean_risk, one.share_hallucinated) for one in found.reliability]
    assert axes.get_xlim() == axes.get_ylim() == (0, 1)
    assert f"ECE {found.ece:.3f}" in axes.get_title()
    assert "2 folds" in axes.get_title()
    assert colours(figure) > 5
    (axes,) = reliability_curve(found.model_copy(update={"folds": 0}), "span").axes
    assert "folds" not in axes.get_title()
