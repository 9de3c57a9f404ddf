"""Calibrators fitted on tiny models: source attention, probes, and the domain that they know."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cocoa_engine import CalibrationWarning, CocoaConfig, CocoaEngine, FitSettings, RiskCalibrator, fit_calibrator
from cocoa_engine.errors import CalibrationError
from cocoa_engine.lab.data import LabelledSpan, LabelledText, Question
from cocoa_engine.lab.fit import risks_of
from cocoa_engine.lab.measured import force, labelled_features, own_answers, question_config, question_prompt
from cocoa_engine.results import Generation
from cocoa_engine.risk.features import SOURCE_FEATURES, SPAN_FEATURES, answer_features, span_features
from tests.helpers.alike import near
from tests.helpers.backends import PROMPTS, made
from tests.helpers.inside import use_backend
from tests.helpers.rivals import heads_file, heads_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::cocoa_engine.risk.CalibrationWarning")]

PROMPT = PROMPTS[2]
FEW = FitSettings(folds=2, draws=20)
WITH_PROBE = FitSettings(probe=True, folds=2, draws=20)


def labelled(count: int = 14) -> list[LabelledText]:
    """Answers of small letters; in every other one, the second word is hallucinated."""
    letters = random.Random(0)
    records = []
    for number in range(count):
        words = ["".join(letters.choices("abcdefgh", k=4)) for _ in range(4)]
        spans = (LabelledSpan(5, 9),) if number % 2 else ()
        prompt = f"{' '.join(letters.choices('abcdefgh', k=12))}:"
        text = " ".join(words)
        records.append(LabelledText(str(number), prompt, text, prompt, bool(spans), spans, str(number)))
    return records


def engine_of(folder: Path, model: Any = None, **settings: Any) -> CocoaEngine:
    """An engine whose retrieval heads are known."""
    model = tiny_model("llama") if model is None else model
    config = CocoaConfig(decore_heads=heads_file(folder, model), max_new_tokens=12, gamma=0.2)
    return CocoaEngine(model, tiny_tokenizer(), model_name="tiny", config=config.replace(**settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def plain(folder: Path) -> RiskCalibrator:
    return fit_calibrator(engine_of(folder), labelled(), settings=FEW)


@pytest.fixture(scope="module")
def probed(folder: Path) -> RiskCalibrator:
    return fit_calibrator(engine_of(folder), labelled(), settings=WITH_PROBE)


def calibrated(engine: CocoaEngine, calibrator: RiskCalibrator | Path) -> CocoaEngine:
    """The engine with a calibrator, without the retrieval heads of its settings."""
    other = engine.with_calibrator(calibrator)
    other.config = engine.config.replace(decore_heads=None)
    return other


def test_source_attention_is_a_feature(folder: Path, plain: RiskCalibrator, tmp_path: Path) -> None:
    engine = engine_of(folder)
    assert plain.heads == tuple(heads_of(engine.model))
    assert plain.span.features[-1] == "source_attention"
    assert plain.answer.features[-2:] == ["source_attention", "lowest_source_attention"]
    assert "-source attention" in plain.span.validation.rivals
    plain.save(tmp_path / "risk.json")
    assert RiskCalibrator.load(tmp_path / "risk.json") == plain
    known, alone = calibrated(engine, tmp_path / "risk.json").generate(PROMPT), engine.generate(PROMPT)
    assert not alone.calibrated
    for span, same in zip(known.spans, alone.spans, strict=True):
        assert span.token_source_attention == near(same.token_source_attention)
        assert span.risk == plain.risk(span)
        more = span.model_copy(update={"token_source_attention": [0.9] * len(span.token_ids)})
        weight = plain.span.weights[-1]
        assert (plain.risk(more) - span.risk) * weight >= 0
    assert known.answer_risk == plain.answer_risk(known)
    with pytest.raises(CalibrationError, match="the source attention was not measured"):
        plain.risk(alone.spans[0].model_copy(update={"token_source_attention": []}))


def test_heads_of_the_settings_come_first(folder: Path, plain: RiskCalibrator, tmp_path: Path) -> None:
    model = tiny_model("llama")
    others = heads_file(tmp_path, model, [(1, 0)])
    engine = engine_of(folder, model).with_calibrator(plain)
    with pytest.warns(CalibrationWarning, match="the source attention is that of the heads in"):
        found = engine.generate(PROMPT, decore_heads=others)
    same = engine.without_calibrator().generate(PROMPT, decore_heads=others)
    assert found.spans[0].token_source_attention == near(same.spans[0].token_source_attention)


@pytest.mark.parametrize("kind", ["masked_modules", "copied_cache", "recompute"])
def test_a_calibrator_applies_in_every_way_to_run_a_model(kind: str, folder: Path, plain: RiskCalibrator) -> None:
    engine = calibrated(engine_of(folder), plain)
    expected, scored = engine.generate(PROMPT), engine.score(PROMPT, "ab")
    use_backend(engine, made(engine.model, kind, "stock"))
    for found, other in ((engine.generate(PROMPT), expected), (engine.score(PROMPT, "ab"), scored)):
        assert found.calibrated
        assert [span.risk for span in found.spans] == pytest.approx([span.risk for span in other.spans], abs=1e-3)
        assert found.answer_risk == pytest.approx(other.answer_risk, abs=1e-3)


def test_models_whose_attention_cannot_be_seen(folder: Path, plain: RiskCalibrator) -> None:
    engine = engine_of(folder, tiny_model("falcon", num_attention_heads=4))
    with pytest.raises(CalibrationError, match="needs the attention of the model on the prompt, which cannot be seen"):
        calibrated(engine, plain).generate(PROMPT)
    for text in ("ab", ["ab", "cd"]):
        with pytest.raises(CalibrationError, match="masked_modules"):
            calibrated(engine, plain).score(PROMPT, text)
    with pytest.warns(CalibrationWarning, match="The source attention is not a feature"):
        without = fit_calibrator(engine, labelled(), settings=FEW)
    assert without.heads is None
    assert not {"source_attention", "lowest_source_attention"} & {*without.span.features, *without.answer.features}
    assert json.loads(without.model_dump_json())["heads"] is None
    found = calibrated(engine, without).generate(PROMPT)
    assert found.calibrated
    assert 0 <= found.answer_risk <= 1


def test_heads_that_the_model_does_not_have_and_a_prompt_of_one_token(folder: Path, plain: RiskCalibrator) -> None:
    """This has no source."""
    engine = engine_of(folder)
    with pytest.raises(CalibrationError, match="heads that tiny does not have: the model has"):
        engine.with_calibrator(plain.model_copy(update={"heads": ((99, 0),)}))
    with pytest.raises(CalibrationError, match="cannot be used with this model"):
        CocoaEngine(engine.model, engine.tokenizer, calibrator=plain.model_copy(update={"heads": ((0, 99),)}))
    engine = calibrated(engine, plain)
    for answer in (engine.generate([5]), engine.generate([5], max_risk=0.999)):
        assert {value for span in answer.spans for value in span.token_source_attention} == {0.0}
        assert all(0 <= span.risk <= 1 for span in answer.spans)
    assert 0 <= engine.score([5], [6, 7]).answer_risk <= 1


PROBE = {"layer": 1, "model_name": "m", "dtype": "float32", "weights": [1.0], "intercept": 0.0}
SPAN_THRESHOLD = {"rule": "recall", "target": 0.8, "precision": 0.5, "recall": 0.8, "prompts": 9}


def test_a_risk_is_finite_or_refused(plain: RiskCalibrator, tmp_path: Path) -> None:
    good = json.loads(plain.model_dump_json())
    span, answer, count = good["span"], good["answer"], len(good["span"]["features"])
    for change, message in (
        ({"span": answer}, "max_rank"),
        ({"answer": span}, "this version measures con_mlds, f_mlds, mean_log_prob"),
        ({"span": None, "answer": None}, "neither of spans nor of answers"),
        ({"answer": {**answer, "weights": [1.0]}}, "the same length"),
        ({"answer": {**answer, "scales": [0.0] * len(answer["features"])}}, "above 0"),
        ({"span": {**span, "isotonic": {"x": [0.1, 0.2], "y": [0.5, 0.4]}}}, "not decrease"),
        ({"span": {**span, "isotonic": {"x": [0.1], "y": [1.5]}}}, "in .0, 1."),
        ({"schema_version": 2}, "schema_version"),
        ({"heads": None}, "this version measures"),
        ({"heads": []}, "one or more pairs"),
        ({"span": {**span, "weights": [1e308, *span["weights"][1:]]}}, "too large"),
        ({"span": {**span, "means": [-1e308] * count}}, "too large"),
        ({"span": {**span, "scales": [1e-320] * count}}, "too large"),
        ({"span": {**span, "intercept": 1.7e308, "weights": [1e303] * count}}, "too large"),
        ({"span": {**span, "intercept": -1e308}}, "would be constant"),
        ({"span": {**span, "scales": [1e-300] * count, "domain": None}}, "would be constant"),
        ({"span": {**span, "weights": [1e30, *span["weights"][1:]]}}, "would be constant"),
        ({"span": {**span, "threshold": {**SPAN_THRESHOLD, "value": 1.5}}}, "threshold"),
        ({"span": {**span, "domain": {**span["domain"], "centre": [0.0]}}}, "one row and one column"),
        ({"span": {**span, "domain": {**span["domain"], "precision": "AAAA"}}}, "float32"),
        ({"span": {**span, "domain": {**span["domain"], "centre": "AADAfw=="}}}, "finite number"),
        ({"probe": PROBE}, "this version measures .*, probe"),
        ({"answer_probe": PROBE}, "this version measures .*, probe"),
        ({"answer_probe": PROBE, "answer": None}, "a risk that it does not have"),
    ):
        (tmp_path / "risk.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(CalibrationError, match=message) as raised:
            RiskCalibrator.load(tmp_path / "risk.json")
        assert len(str(raised.value)) < 1000  # not the whole file
    large = plain.span.model_copy(update={"weights": [1e290] * count, "domain": None})
    for value in (0.0, -math.inf, math.inf, 1e300, -5e-324):
        for risk in (plain.span, large):
            assert 0 <= risk([value] * count) <= 1
    with pytest.raises(CalibrationError, match=r"con_mlds is not a number \(NaN\)"):
        plain.span([math.nan] * count)


def state_of(model: Any, token_ids: list[int], layer: int, count: int) -> torch.Tensor:
    """The mean state of the last ``count`` tokens, from a plain forward pass."""
    with torch.no_grad():
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return states[layer][0, -count:].mean(dim=0)


@pytest.mark.parametrize("kind", ["lean", "modules", "recompute"])
@pytest.mark.parametrize("middle_layers", [None, (0, 1)])
def test_a_probe_reads_its_layer(kind: str, middle_layers: Any, folder: Path, probed: RiskCalibrator) -> None:
    model = tiny_model("llama")
    assert probed.probe.layer == 2 * model.config.num_hidden_layers // 3
    assert probed.span.features[-1] == "probe"
    seen = {level: without(getattr(probed, level), *SOURCE_FEATURES) for level in ("span", "answer")}
    lower = probed.answer_probe.model_copy(update={"layer": probed.probe.layer - 1})
    blind = probed.model_copy(update={"heads": None, "answer_probe": lower, **seen})
    assert blind.spans_only() == blind.model_copy(update={"answer": None, "answer_probe": None})
    engine = engine_of(folder, model)
    use_backend(engine, made(model, kind, "stock"))
    found = calibrated(engine, blind).generate(PROMPT, middle_layers=middle_layers)
    plain = engine.generate(PROMPT, middle_layers=middle_layers)
    assert found.token_ids == plain.token_ids
    before, weights = list(PROMPT), torch.tensor(probed.probe.weights)
    for span, other in zip(found.spans, plain.spans, strict=True):
        before += span.token_ids
        state = state_of(model, before, probed.probe.layer, len(span.token_ids))
        assert span.probe == pytest.approx(float(state @ weights) + probed.probe.intercept, abs=2e-4)
        assert (span.con_mlds, span.f_mlds) == near((other.con_mlds, other.f_mlds))
        assert span.risk == blind.risk(span)
        assert other.probe is None
        assert other.answer_probe is None
    state = state_of(model, before, lower.layer, len(found.token_ids))
    score = float(state @ torch.tensor(lower.weights)) + lower.intercept
    assert answer_features(found)[-1] == pytest.approx(score, abs=2e-4)
    assert found.answer_risk == blind.answer_risk(found)
    text = found.token_ids[:5]
    expected = float(state_of(model, [*PROMPT, *text], probed.probe.layer, 5) @ weights) + probed.probe.intercept
    one = calibrated(engine, blind).score(PROMPT, text, middle_layers=middle_layers)
    (same, _) = calibrated(engine, blind).score(PROMPT, [text, text[:2]], middle_layers=middle_layers)
    assert [one.spans[0].probe, same.spans[0].probe] == pytest.approx([expected] * 2, abs=2e-4)
    bare = engine.score(PROMPT, text, middle_layers=middle_layers).spans[0]
    assert one.spans[0].f_mlds == near(bare.f_mlds)


def without(risk: Any, *names: str) -> Any:
    kept = [place for place, one in enumerate(risk.features) if one not in names]
    columns = {key: [getattr(risk, key)[place] for place in kept] for key in ("features", "means", "scales", "weights")}
    return risk.model_copy(update={**columns, "domain": None})


def test_the_caller_s_autocast_changes_no_probe(folder: Path, probed: RiskCalibrator) -> None:
    engine = calibrated(engine_of(folder), probed)

    def results() -> list[Any]:
        return [engine.generate(PROMPT), *engine.score(PROMPT, ["ab", "cd"]), engine.score(PROMPT, "abcd", divide=True)]

    expected = results()
    assert all(span.probe != span.answer_probe is not None for answer in expected for span in answer.spans)
    with torch.autocast("cpu", torch.bfloat16):
        assert results() == expected


def test_a_probe_is_of_one_model_and_dtype(folder: Path, probed: RiskCalibrator, tmp_path: Path) -> None:
    probed.save(tmp_path / "risk.json")
    assert RiskCalibrator.load(tmp_path / "risk.json") == probed
    assert len(json.loads(probed.model_dump_json())["probe"]["weights"]) < 6 * len(probed.probe.weights)
    engine = engine_of(folder)
    assert calibrated(engine, probed).generate(PROMPT).spans[0].probe is not None
    with pytest.raises(CalibrationError, match="of tiny in float32, not of another in float32"):
        CocoaEngine(engine.model, engine.tokenizer, model_name="another", calibrator=tmp_path / "risk.json")
    half = tiny_model("llama").to(torch.bfloat16)
    with pytest.raises(CalibrationError, match="not of tiny in bfloat16"):
        CocoaEngine(half, engine.tokenizer, model_name="tiny", calibrator=probed)
    span = engine.generate(PROMPT).spans[0]
    with pytest.raises(CalibrationError, match="the probe was not measured"):
        probed.risk(span)
    assert math.isnan(span_features(span)[SPAN_FEATURES.index("probe")])


def test_answers_labelled_as_wholes_have_a_probe_of_their_own(folder: Path, probed: RiskCalibrator) -> None:
    whole = [replace(record, spans=None) for record in labelled()]
    fitted = fit_calibrator(engine_of(folder), whole, settings=WITH_PROBE)
    assert (fitted.probe, fitted.span) == (None, None)
    assert (fitted.answer_probe, fitted.answer) == (probed.answer_probe, probed.answer)


def test_risks_to_check_are_those_of_answers(folder: Path, probed: RiskCalibrator) -> None:
    """Also where the two probes read different layers."""
    lower = probed.answer_probe.model_copy(update={"layer": probed.probe.layer - 2})
    engine = calibrated(engine_of(folder), probed.model_copy(update={"answer_probe": lower}))
    layers = [probe.layer for probe in engine.calibrator.probes.values()]
    config = engine.config

    def features(layers: Any) -> Any:
        return labelled_features(force(engine, labelled(), config, layers=layers), config, engine.num_layers)

    items = features(layers)
    assert items["span"].states.tolist() == features([probed.probe.layer])["span"].states.tolist()
    risks = risks_of(probed.answer, items["answer"], lower)
    assert risks == near([engine.score(record.prompt, f" {record.text}").answer_risk for record in labelled()])


def test_own_answers_are_measured_with_the_known_heads(folder: Path) -> None:
    engine = engine_of(folder, max_new_tokens=4)
    config = question_config(engine, engine.config)
    asked = [question_prompt(engine, f"{text}\nAnswer in a few words.") for text in "abcdefghijkl"]
    texts = [engine.generate(prompt, config=config).text for prompt in asked]
    known = [text.split() or ["x"] for text in texts]
    questions = [
        Question(text, None, (" ".join(words) if number % 2 else "never",), text)
        for number, (text, words) in enumerate(zip("abcdefghijkl", known, strict=True))
    ]
    fitted = fit_calibrator(engine, questions=questions, settings=WITH_PROBE)
    assert fitted.heads == tuple(heads_of(engine.model))
    assert fitted.span is None
    assert fitted.answer.features[-3:] == ["source_attention", "lowest_source_attention", "probe"]
    answer = engine.generate(asked[0], config=config)
    layer = fitted.answer_probe.layer
    measured = own_answers(engine, questions, config, layers=[0, layer]).states[0, 1]
    expected = state_of(engine.model, [*engine.encode(asked[0]), *answer.token_ids], layer, len(answer.token_ids))
    assert torch.from_numpy(measured).allclose(expected, atol=1e-4)


def test_it_knows_what_is_unlike_its_own_data(folder: Path, plain: RiskCalibrator) -> None:
    engine = calibrated(engine_of(folder), plain)
    alike = [engine.score(record.prompt, record.text) for record in labelled()]
    other = engine.score("!", "\u2603" * 40)
    assert sum(answer.out_of_domain for answer in alike) <= 2
    assert sum(answer.answer_out_of_domain for answer in alike) <= 2
    assert (other.out_of_domain, other.answer_out_of_domain) == (True, True)


@pytest.mark.filterwarnings("error::cocoa_engine.CalibrationWarning")
def test_what_is_out_of_domain_is_said_once(folder: Path, plain: RiskCalibrator) -> None:
    first = calibrated(engine_of(folder), plain)
    strange = ("!", "\u2603" * 40)
    with pytest.warns(CalibrationWarning, match="unlike those that the calibrator was fitted on"):
        answer = first.score(*strange)
    assert answer.out_of_domain
    assert Generation.model_validate_json(answer.model_dump_json()).out_of_domain
    assert first.score(*strange).out_of_domain
    domain = plain.span.domain.model_copy(update={"cutoff": 1e-9})
    narrow = plain.model_copy(update={"span": plain.span.model_copy(update={"domain": domain})})
    for ask in (
        lambda engine: engine.generate(PROMPT).spans,
        lambda engine: [*engine.stream(PROMPT)],
        lambda engine: engine.generate_batch(PROMPTS),
    ):
        with pytest.warns(CalibrationWarning, match="out_of_domain"):
            assert all(item.out_of_domain for item in ask(calibrated(engine_of(folder), narrow)))
    assert not first.without_calibrator().generate(PROMPT).out_of_domain
