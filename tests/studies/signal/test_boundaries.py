"""A text that the engine decoded is cut into the spans that the engine made; figures stand for every token."""

from __future__ import annotations

import pytest
from sklearn.metrics import roc_auc_score

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_engine.datasets import LabelledSpan, LabelledText
from cocoa_engine.scoring.text_profile import Profiler
from cocoa_engine.studies.signal.boundaries import CUTS, SCORES, BoundaryScores, Cut, Cutter, with_boundary_scores
from cocoa_engine.studies.signal.report import boundary_table
from cocoa_engine.studies.signal.segments import TeacherForced, force, spans, token_labels
from tests.helpers.alike import near
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PROMPT = "The three longest rivers in Europe are"


@pytest.mark.parametrize("cut", ["own", "left", "right", "fixed"])
@pytest.mark.parametrize("real", [True, False], ids=["real", "tiny"])
def test_an_own_answer_is_cut_as_it_was_decoded(engine: CocoaEngine, cut: Cut, real: bool) -> None:
    engine = engine if real else CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    prompt = engine.encode(PROMPT) if real else [5, 6, 7, 8]
    config = CocoaConfig(span_boundary=cut, max_new_tokens=24, max_span_tokens=5, max_candidates=3)
    generation = engine.generate(prompt, config=config)
    made = [len(span.token_ids) for span in generation.spans]
    assert len(made) > 3
    (profile,) = Profiler(engine.session, config)(prompt, [generation.token_ids])
    forced = TeacherForced(_labelled(generation.text), profile, profile.ends)
    assert [end - start for start, end in Cutter(engine, config).spans(forced, cut)] == made


def test_every_cut_speaks_of_the_same_characters(engine: CocoaEngine) -> None:
    config = CocoaConfig()
    text = "the Danube, the Rhine and the Amazon, which is in Europe."
    wrong = text.index("the Amazon")
    records = [
        _labelled(text, (wrong, len(text) - 1)),
        LabelledText("2", PROMPT, "The Loire.", "?", True, None, PROMPT),
    ]
    cuts = BoundaryScores()
    answers = list(with_boundary_scores(force(engine, records, config), engine, config, cuts))
    assert [forced.record.id for forced in answers] == ["1", "2"]  # handed on, the unlabelled one too
    forced = answers[0]
    count = len(forced.profile.token_ids)
    assert list(zip(cuts.hallucinated, cuts.supported, strict=True)) == list(token_labels(forced))
    assert all(len(values) == count for by_figure in cuts.values.values() for values in by_figure.values())
    assert cuts.spans["token"] == count > cuts.spans["own"] == len(list(spans(forced)))
    by_token = cuts.values["token"]
    assert by_token["-log p"] == [-value for value in forced.profile.log_probs]
    assert by_token["fMLDS"] == near(forced.profile.tokens.f_mlds((10, 20), "post_norm").tolist())
    found = cuts.measure(draws=20, seed=0)
    labels, weights = [1] * count + [0] * count, [*cuts.hallucinated, *cuts.supported]
    for cut in CUTS:
        for figure in SCORES:
            expected = roc_auc_score(labels, cuts.values[cut][figure] * 2, sample_weight=weights)
            assert found[cut]["auroc"][figure]["estimate"] == pytest.approx(expected)
    assert sum(line.startswith(tuple(f"| {cut} |" for cut in CUTS)) for line in boundary_table(found)) == len(CUTS)


def _labelled(text: str, *parts: tuple[int, int]) -> LabelledText:
    return LabelledText("1", PROMPT, text, "?", not parts, tuple(LabelledSpan(*part) for part in parts), PROMPT)
