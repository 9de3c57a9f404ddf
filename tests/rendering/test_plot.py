"""Figures, and the curve of a span's layers: what the MLDS of a span are means of."""

import io
import sys
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, MissingExtraError, PromptError, Span
from cocoa_engine.rendering.plot import reliability_curve
from tests.helpers.made_up_answers import generation
from tests.helpers.made_up_risk import fitted
from tests.helpers.processes import python
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PROMPT = "The three primary colours are"


def colours(figure: Figure) -> int:
    """How many colours a figure has when it is drawn."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    pixels = (imread(file) * 255).astype(np.uint8)
    return len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0))


def assert_curve(curve: Any, span: Span) -> None:
    assert curve.con_mlds == pytest.approx(span.con_mlds, abs=1e-4)
    assert curve.f_mlds == pytest.approx(span.f_mlds, abs=1e-4)


@pytest.mark.parametrize(
    "settings", [{"final_layer": "pre_norm", "middle_layers": (3, 9), "metric": "con_mlds"}, {"method": "dola"}]
)
def test_the_curve_of_every_span_has_its_mlds(engine: CocoaEngine, settings: dict[str, Any]) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=8, **settings)
    for number, span in enumerate(answer.spans):
        curve = engine.layer_profile(PROMPT, answer, number)
        assert curve.text == span.text
        assert len(curve.consecutive) == len(curve.to_final) == engine.num_layers == curve.num_layers
        assert_curve(curve, span)
        assert curve.consecutive[-1] == curve.to_final[-1]
    assert engine.layer_profile(PROMPT, answer, answer.spans[-1]) == engine.layer_profile(PROMPT, answer, -1)


def test_the_curve_of_a_chat_and_of_a_scored_text(engine: CocoaEngine) -> None:
    messages = [{"role": "user", "content": "Who wrote Dune?"}]
    answer = engine.chat(messages, max_new_tokens=6)
    curve = engine.layer_profile(engine.encode_chat(messages), answer, 0)
    assert_curve(curve, answer.spans[0])
    assert engine.layer_profile(messages, answer, 0) == curve
    scored = engine.score(PROMPT, " red and blue")
    assert_curve(engine.layer_profile(PROMPT, scored, 0), scored.spans[0])


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt2", "mamba"])
def test_the_curve_on_other_architectures(architecture: str) -> None:
    engine = CocoaEngine(tiny_model(architecture), tiny_tokenizer())
    prompt = [5, 6, 7, 8]
    answer = engine.generate(prompt, max_new_tokens=8, config=CocoaConfig(middle_layers=(1, engine.num_layers)))
    for span in answer.spans:
        assert_curve(engine.layer_profile(prompt, answer, span), span)
    assert prompt == [5, 6, 7, 8]


def test_the_curve_of_what_is_not_there_is_refused(engine: CocoaEngine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=4)
    with pytest.raises(ConfigError, match="no such span"):
        engine.layer_profile(PROMPT, answer, len(answer.spans))
    with pytest.raises(ConfigError, match="no such span"):
        engine.layer_profile(PROMPT, answer, generation(("x", 0.8)).spans[0])
    messages = [{"role": "user", "content": "Who wrote Dune?"}]
    for prompt, tokens in ((PROMPT + " red and blue", 8), (messages, len(engine.encode_chat(messages)))):
        with pytest.raises(PromptError, match=f"the answer's prompt had 5 tokens, this one has {tokens}"):
            engine.layer_profile(prompt, answer, 0)


def test_figures_of_a_real_answer(engine: CocoaEngine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=12)
    figure = answer.plot()
    visible = [span for span in answer.spans if span.text.strip()]
    for axes, name in zip(figure.axes, ("f_mlds", "con_mlds"), strict=True):
        assert [bar.get_width() for bar in axes.patches] == [getattr(span, name) for span in visible]
    curve = engine.layer_profile(PROMPT, answer, 0)
    figure = curve.plot()
    drawn = [list(axes.lines[0].get_ydata()) for axes in figure.axes]
    assert drawn == [curve.to_final, curve.consecutive]
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
