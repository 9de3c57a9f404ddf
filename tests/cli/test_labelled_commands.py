"""``cocoa signal``, ``cocoa calibrate`` and ``cocoa alpha`` on the real model and a few answers of known truth."""

from __future__ import annotations

import builtins
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import CalibrationError, CalibrationWarning, CocoaEngine, FitSettings, RiskCalibrator, fit_calibrator
from cocoa_engine.cli.app import run
from cocoa_engine.lab.data import read_labelled
from cocoa_engine.risk.fitted import Rule
from tests.helpers.cocoa import Cocoa, assert_refused
from tests.helpers.made_up_risk import fitted

pytestmark = pytest.mark.usefixtures("divided_once")

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Greece": "Athens",
    "Austria": "Vienna", "Russia": "Moscow", "China": "Beijing", "Peru": "Lima", "Cuba": "Havana", "Iraq": "Baghdad",
}  # fmt: skip
CITIES = list(CAPITALS.values())


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """One true and one false answer to each question, labelled as a whole."""
    rows = []
    for number, (country, city) in enumerate(CAPITALS.items()):
        prompt = f"Question: What is the capital of {country}?\nAnswer:"
        for label, text in ((False, city), (True, CITIES[number - 5])):
            rows.append({"id": f"{country}{label}", "prompt": prompt, "text": f"{text}.", "label": label})
    return write(tmp_path / "answers.jsonl", rows)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Answers with a wrong city in the midst of a sentence, labelled by character."""
    rows = []
    for number, country in enumerate(CAPITALS):
        before, wrong = f"The capital of {country} is ", CITIES[number - 5]
        spans = [[len(before), len(before) + len(wrong)]]
        prompt = "Question: Tell me of a capital.\nAnswer:"
        text = f"{before}{wrong}, of course."
        rows.append({"id": country, "prompt": prompt, "text": text, "spans": spans, "group": country})
    return write(tmp_path / "parts.jsonl", rows)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


FIT = ("--folds", "3", "--draws", "20")


def calibrated(cocoa: Cocoa, path: Path, data: Path, *options: object) -> tuple[RiskCalibrator, str]:
    """The calibrator that is fitted on some data, and what is printed."""
    result = cocoa("calibrate", "--data", data, "--out", path, "--overwrite", *options)
    assert result.exit_code == 0, result.output
    return RiskCalibrator.load(path), result.stdout


def test_signal_of_whole_answers(cocoa: Cocoa, answers: Path, tmp_path: Path, engine: CocoaEngine) -> None:
    out = tmp_path / "new" / "out"
    result = cocoa("signal", "--data", answers, "--out", out, "--draws", "50")
    assert result.exit_code == 0, result.output
    record = json.loads((out / "signal.json").read_text())
    one = record["levels"]["answer"]
    assert (one["items"], one["prompts"], one["hallucinated"]) == (24, 12, 12)
    assert record["about"]["model"] == engine.model_name
    assert record["left_out"] == {"span": "they are not labelled", "character": "they are not labelled"}
    ranking, paired = one["ranking"], one["paired"]
    # a model of 135M parameters does know capitals
    assert ranking["-log p"]["auroc"]["estimate"] > 0.8
    assert paired["log p alone"]["right"] > 0.8
    assert paired["log p alone"]["z"] > 0 > paired["log p alone"]["p_right"] - 0.05
    assert set(paired) > {"CoCoA, ConMLDS", "CoCoA, fMLDS", "CoCoA-SIG, ConMLDS", "CoCoA-SIG, fMLDS", "-fMLDS alone"}
    assert {"-mean log p", "-min log p", "mean entropy", "-mean margin"} < set(ranking)
    for row in ranking.values():
        for interval in (row["auroc"], row["auprc"], *row["less"].values()):
            assert interval["low"] <= interval["estimate"] <= interval["high"]
        for rival in ("-log p", "-mean log p"):
            difference = row["auroc"]["estimate"] - ranking[rival]["auroc"]["estimate"]
            assert row["less"][rival]["estimate"] == pytest.approx(difference)
    text = (out / "signal.md").read_text()
    assert "## By answer" in text
    assert "By span" not in text
    assert text.splitlines()[0] in result.stdout
    for picture in ("auroc-answer.svg", "scores-answer.svg"):
        assert (out / picture).read_text().startswith("<?xml")


def test_one_prompt_alone_has_no_intervals(cocoa: Cocoa, parts: Path, tmp_path: Path) -> None:
    few = tmp_path / "few\x1b[31m.jsonl"
    few.write_text(parts.read_text().splitlines()[0])
    settings = ("--span-log-prob", "mean", "--middle-layers", "3,9", "--final-layer", "pre_norm", "--chat")
    result = cocoa("signal", "--data", str(few), "--out", str(tmp_path), "--draws", "20", *settings)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "signal.json").read_text())
    assert record["left_out"] == {"answer": "all are hallucinated"}
    assert record["span_log_prob"] == "mean"
    assert (record["levels"]["span"]["middle_layers"], record["levels"]["span"]["final_layer"]) == ([3, 9], "pre_norm")
    text = (tmp_path / "signal.md").read_text()
    for shown in (text, result.stdout):
        assert "(few␛[31m.jsonl)" in shown
        assert "\x1b" not in shown
    assert "**No intervals: they are drawn over prompts, and there is only one.**" in text
    assert "(" not in text.partition("| -log p |")[2].partition("|\n")[0]
    interval = json.loads((tmp_path / "signal.json").read_text())["levels"]["span"]["ranking"]["-log p"]["auroc"]
    assert interval["low"] is interval["high"] is None
    assert (tmp_path / "auroc-span.svg").exists()
    fitted().save(tmp_path / "risk.json")
    refused = cocoa("calibrate", "--data", str(few), "--check", str(tmp_path / "risk.json"))
    assert_refused(refused, "too few prompts for a bootstrap interval")


@pytest.mark.usefixtures("undrawn")
def test_signal_of_what_a_source_changes(cocoa: Cocoa, tmp_path: Path, parts: Path) -> None:
    """Sources that name another city than the answer: what the source says is lifted, the rest is not."""
    rows = []
    for number, country in enumerate(CAPITALS):
        source = f"The capital of {country} is {CITIES[number - 3]}."
        for place, city in enumerate((CITIES[number - 3], CITIES[number - 5])):
            text = f"The capital of {country} is {city}."
            start = text.index(city)
            row = {"id": f"{country}{place}", "prompt": f"Passage: {source}\n\nSummary:", "text": text}
            rows.append({**row, "spans": [[start, start + len(city)]] if place else [], "source": source})
    data = write(tmp_path / "sources.jsonl", rows)
    out = tmp_path / "out"
    options = ["--out", out, "--draws", "20", "--prompts", "8", "--overwrite"]
    result = cocoa("signal", "--data", data, "--context-lift", *options)
    assert result.exit_code == 0, result.output
    levels = json.loads((out / "signal.json").read_text())["levels"]
    assert list(levels) == ["answer", "span", "character"]
    for level, one in levels.items():
        names = {"-context lift", "lift of fMLDS", "lift of ConMLDS", "-log p without the source"}
        assert names < set(one["ranking"])
        assert ("-mean context lift" in one["ranking"]) == (level != "character")
    assert levels["answer"]["ranking"]["-context lift"]["auroc"]["estimate"] > 0.9
    assert "| -context lift |" in (out / "signal.md").read_text()
    assert cocoa("signal", "--data", data, *options).exit_code == 0
    assert "-context lift" not in json.loads((out / "signal.json").read_text())["levels"]["span"]["ranking"]
    assert "Intervals over only 8 prompts" in (out / "signal.md").read_text()
    assert_refused(cocoa("signal", "--data", parts, "--context-lift", *options), "'France' has no source")


def test_calibrate_fits_and_saves(
    cocoa: Cocoa, answers: Path, parts: Path, tmp_path: Path, engine: CocoaEngine
) -> None:
    path = tmp_path / "risk.json"
    calibrator, printed = calibrated(cocoa, path, parts, *FIT, "--recall", "0.8", "--isotonic")
    assert calibrator.model_name == engine.model_name
    assert calibrator.settings.middle_layers == (10, 20)
    assert calibrator.span is not None
    assert calibrator.answer is None  # every answer has a wrong part: as wholes they are alike
    assert calibrator.span.threshold is not None
    assert calibrator.span.threshold.recall >= 0.8
    assert calibrator.span.isotonic is not None
    for words in ("calibrated risk", "-min log p", "Brier", "threshold", "12 prompts", "No risk of answers: 0 prompts"):
        assert words in printed
    assert (tmp_path / "risk-span.svg").read_text().startswith("<?xml")
    assert "risk-span.svg" in printed.replace("\n", "")
    calibrator, printed = calibrated(cocoa, path, answers, *FIT, "--json")
    assert RiskCalibrator.model_validate_json(printed) == calibrator
    assert calibrator.answer is not None
    assert calibrator.span is None
    # evaluated on answers it was fitted on, it is at least as good as on those left out
    checked = json.loads(cocoa("calibrate", "--data", answers, "--check", path, "--json").stdout)
    assert set(checked) == {"answer"}
    assert checked["answer"]["folds"] == 0
    assert checked["answer"]["auroc"]["estimate"] >= calibrator.answer.validation.auroc.estimate
    (tmp_path / "risk-answer.svg").unlink()
    check = ["calibrate", "--data", answers, "--check", path]
    assert "24 answers of 12 prompts" in cocoa(*check).stdout
    assert not list(tmp_path.glob("*-answer.*"))  # nothing is drawn unless asked for
    assert cocoa(*check, "--plot", str(tmp_path / "new" / "elsewhere.png")).exit_code == 0
    assert (tmp_path / "new" / "elsewhere-answer.png").stat().st_size
    # what was fitted on known capitals tells others apart
    engine_with = CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, calibrator=path)
    right, wrong = engine_with.score("Question: What is the capital of Germany?\nAnswer:", [" Berlin.", " Lisbon."])
    assert right.answer_risk < wrong.answer_risk


@pytest.mark.usefixtures("undrawn")
def test_a_calibrator_is_fitted_in_python_as_on_the_command_line(
    cocoa: Cocoa, parts: Path, tmp_path: Path, engine: CocoaEngine
) -> None:
    options = (*FIT, "--precision", "0.3", "--span-boundary", "left")
    known, _ = calibrated(cocoa, tmp_path / "risk.json", parts, *options)
    assert known.settings.span_boundary == "left"
    config = engine.config.replace(span_boundary="left")
    threshold: tuple[Rule, float] = ("precision", 0.3)
    settings = FitSettings(threshold=threshold, folds=3, draws=20)
    found = fit_calibrator(engine, read_labelled(parts), config=config, settings=settings)
    assert found.span is not None
    assert known.span is not None
    assert found.span.data == "12 given answers"
    same_words = found.span.model_copy(update={"data": known.span.data})
    assert found.model_copy(update={"span": same_words}) == known
    assert found.mismatches(engine.model_name, engine.config, engine.num_layers) == ["span_boundary is right, not left"]
    with pytest.raises(CalibrationError, match="the data has no labels"):
        fit_calibrator(engine)
    with pytest.raises(CalibrationError, match=r"folds: .*2"):
        FitSettings(folds=1)
    with pytest.warns(CalibrationWarning, match="No risk of answers: 0 prompts have supported items"):
        fit_calibrator(engine, read_labelled(parts), settings=FitSettings(folds=3, draws=20))


@pytest.mark.usefixtures("undrawn")
def test_calibrate_with_a_probe(cocoa: Cocoa, parts: Path, tmp_path: Path, engine: CocoaEngine) -> None:
    path = tmp_path / "risk.json"
    calibrator, printed = calibrated(cocoa, path, parts, *FIT, "--probe")
    assert "-source attention" in printed
    assert calibrator.span is not None
    assert calibrator.probe is not None
    assert calibrator.heads is not None
    assert (calibrator.probe.layer, len(calibrator.probe.weights), calibrator.probe.dtype) == (20, 576, "float32")
    assert calibrator.span.features[-2:] == ["source_attention", "probe"]
    checked = json.loads(cocoa("calibrate", "--data", parts, "--check", path, "--json").stdout)
    assert checked["span"]["auroc"]["estimate"] >= calibrator.span.validation.auroc.estimate
    judged = CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, calibrator=path)
    assert all(span.probe is not None for span in judged.generate("The capital of Italy is", max_new_tokens=8).spans)


@pytest.mark.usefixtures("undrawn")
def test_a_calibrator_for_a_method_without_candidates(
    cocoa: Cocoa, parts: Path, tmp_path: Path, engine: CocoaEngine
) -> None:
    path = tmp_path / "risk.json"
    calibrator, _ = calibrated(cocoa, path, parts, *FIT, "--method", "greedy")
    assert not calibrator.settings.branches
    assert calibrator.span is not None
    weights = dict(zip(calibrator.span.features, calibrator.span.weights, strict=True))
    assert weights["candidates"] == weights["candidate_spread"] == 0  # always alike
    assert weights["entropy"] != 0
    checked = json.loads(cocoa("calibrate", "--data", parts, "--check", path, "--json").stdout)
    assert checked["span"]["auroc"]["estimate"] >= calibrator.span.validation.auroc.estimate - 0.05
    refused = cocoa("calibrate", "--data", parts, "--check", path, "--method", "cocoa")
    assert_refused(refused, "answers without candidates: it cannot be evaluated with --method cocoa")
    for method, words in (("greedy", []), ("dola", []), ("cocoa", ["method='cocoa' grows candidates to compare"])):
        config = engine.config.replace(method=method)
        assert calibrator.mismatches(engine.model_name, config, engine.num_layers) == words


def test_too_few_prompts_are_said(cocoa: Cocoa, answers: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    lines = answers.read_text().splitlines()
    few.write_text("\n".join(lines[2 * number + number % 2] for number in range(8)))  # one answer to each, half wrong
    refused = cocoa("calibrate", "--data", str(few), "--folds", "2", "--draws", "20", "--out", str(tmp_path / "r.json"))
    assert refused.exit_code == 2, refused.output
    message = " ".join(refused.stderr.split())
    assert "No risk of answers: 4 prompts have hallucinated items; 2 folds" in message
    assert "need at least 6" in message


@pytest.mark.usefixtures("undrawn")
def test_a_conformal_threshold_says_what_it_guarantees(cocoa: Cocoa, parts: Path, tmp_path: Path) -> None:
    for miss, words in (
        (
            "0.5",
            "Guarantee: for a new prompt exchangeable with these 4, the expected share of hallucinated spans below the "
            "threshold is at most 0.5. It holds on average over prompts, not for each prompt, and for texts measured",
        ),
        ("0.1", "4 prompts are too few for a threshold above 0, which flags everything."),
    ):
        _, printed = calibrated(cocoa, tmp_path / "risk.json", parts, "--folds", "2", "--draws", "20", "--miss", miss)
        assert words in " ".join(printed.split())


def test_check_says_what_the_calibrator_was_not_fitted_for(
    cocoa: Cocoa, answers: Path, loads: list[object], tmp_path: Path, engine: CocoaEngine
) -> None:
    fitted(model_name="another", levels=("answer",)).save(tmp_path / "risk.json")
    check = ["calibrate", "--data", answers, "--check", str(tmp_path / "risk.json"), "--draws", "20"]
    for option, value, words in (
        ("--gamma", "0.5", "fitted with --gamma 0.3"),
        ("--final-layer", "pre_norm", "--final-layer post_norm"),
        ("--middle-layers", "20,29", "--middle-layers 10,20"),
        ("--max-candidates", "4", "--max-candidates 8"),
        ("--max-span-tokens", "4", "--max-span-tokens 16"),
    ):
        assert_refused(cocoa(*check, option, value), words)
    assert loads == []
    with pytest.warns(CalibrationWarning, match=f"the model is {engine.model_name}, not another. Its risks"):
        assert cocoa(*check, "--gamma", "0.3", "--middle-layers", "10-20").exit_code == 0


def test_check_leaves_out_what_has_one_class(cocoa: Cocoa, parts: Path, tmp_path: Path, engine: CocoaEngine) -> None:
    """Every answer has a wrong part, so as wholes they cannot be ranked."""
    fitted(model_name=engine.model_name).save(tmp_path / "risk.json")
    check = ["calibrate", "--data", parts, "--check", str(tmp_path / "risk.json"), "--draws", "20", "--json"]
    result = cocoa(*check)
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)) == ["span"]
    assert "answers are left out: all are hallucinated" in " ".join(result.stderr.split())
    assert_refused(cocoa(*check, "--level", "answer"), "can be ranked here (answers: all are hallucinated)")


def test_a_warning_of_ours_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    monkeypatch.setattr(sys, "argv", ["cocoa", "--version"])
    with pytest.raises(SystemExit):
        run()
    one = CalibrationWarning.of(["gamma is 0.5, not 0.3"])
    assert warnings.formatwarning(one, CalibrationWarning, "engine.py", 1) == f"cocoa: warning: {one}\n"
    assert "engine.py:1" in warnings.formatwarning("other", UserWarning, "engine.py", 1)


@pytest.mark.usefixtures("undrawn")
def test_calibrate_on_the_models_own_answers(cocoa: Cocoa, parts: Path, tmp_path: Path) -> None:
    """Of half of the questions the known answer is another city: the model cannot be right."""
    rows = [
        {"question": f"What is the capital of {country}?", "answers": [city if number % 2 else CITIES[number - 5]]}
        for number, (country, city) in enumerate(CAPITALS.items())
    ]
    questions = write(tmp_path / "questions.jsonl", rows)
    options = ("--questions", questions, "--folds", "2", "--draws", "20", "--max-new-tokens", "16")
    calibrator, printed = calibrated(cocoa, tmp_path / "risk.json", parts, *options)
    assert calibrator.span is not None
    assert calibrator.answer is not None
    assert "own answers to 12 questions" in calibrator.answer.data
    assert 6 <= calibrator.answer.validation.hallucinated < 12
    assert "12 answers of 12 prompts" in printed


def test_alpha_suggests_a_range(cocoa: Cocoa, answers: Path, tmp_path: Path) -> None:
    supported = [row for row in map(json.loads, answers.read_text().splitlines()) if not row["label"]]
    write(answers, supported)  # labels do not count
    options = ["--prompts", "3", "--max-new-tokens", "16", "--plot", tmp_path / "a.svg", "--overwrite"]
    result = cocoa("alpha", "--data", answers, *options, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["prompts"] == 3
    assert record["candidates"] == len(record["spans"]) > 2
    ratios = sorted(log_prob / mlds for mlds, log_prob in record["spans"])
    assert ratios[0] <= record["low"] <= record["median"] <= record["high"] <= ratios[-1]
    assert record["median"] == pytest.approx((ratios[(len(ratios) - 1) // 2] + ratios[len(ratios) // 2]) / 2)
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert f"median {record['median']:.2f}" in " ".join(cocoa("alpha", "--data", answers, *options).stdout.split())


def test_a_missing_extra_is_said(
    cocoa: Cocoa, answers: Path, loads: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("sklearn", "scipy")]:
        monkeypatch.delitem(sys.modules, name)
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] in ("sklearn", "scipy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("importlib.import_module", lambda name: without(name))
    monkeypatch.setattr("cocoa_engine.optional.import_module", lambda name: without(name))
    for command, package in (("signal", "scipy"), ("calibrate", "scikit-learn")):
        refused = cocoa(command, "--data", answers, "--out", "never")
        assert_refused(refused, f"needs {package}: pip install 'cocoa-integrations[risk]'")
    assert loads == []
