"""``cocoa signal``, ``calibrate`` and ``threshold``, on the real model and answers of known truth."""

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cocoa_engine import CalibrationWarning, CocoaConfig, CocoaEngine, FitSettings, RiskCalibrator, fit_calibrator
from cocoa_engine.cli.app import run
from cocoa_engine.cli.options import require_chat
from cocoa_engine.errors import CalibrationError, ConfigError, DataError
from cocoa_engine.lab import stopping
from cocoa_engine.lab.data import read_labelled, read_questions
from cocoa_engine.lab.stopping import SHARES, Answer, Count, by_default, measure, read_own_prompts, suggested
from cocoa_engine.risk.fitted import Rule
from tests.helpers.alike import near
from tests.helpers.cocoa import Cocoa, assert_refused, successful
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
    return write(tmp_path / "answers.jsonl", *rows)


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
    return write(tmp_path / "parts.jsonl", *rows)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


FIT = ("--folds", "3", "--draws", "20")


def calibrated(cocoa: Cocoa, path: Path, data: Path, *options: object) -> tuple[RiskCalibrator, str]:
    """The calibrator that is fitted on some data, and what is printed."""
    result = successful(cocoa("calibrate", "--data", data, "--out", path, "--overwrite", *options))
    return RiskCalibrator.load(path), result.stdout


def checked(cocoa: Cocoa, path: Path, data: Path, *options: object) -> dict[str, Any]:
    """What is found of a calibrator by each level, on some data."""
    result = successful(cocoa("calibrate", "--data", data, "--check", path, "--json", *options))
    levels: dict[str, Any] = json.loads(result.stdout)
    return levels


def test_signal_of_whole_answers(cocoa: Cocoa, answers: Path, tmp_path: Path, engine: CocoaEngine) -> None:
    out = tmp_path / "new" / "out"
    result = successful(cocoa("signal", "--data", answers, "--out", out, "--draws", "50"))
    record = json.loads((out / "signal.json").read_text())
    one = record["levels"]["answer"]
    assert (one["items"], one["prompts"], one["hallucinated"]) == (24, 12, 12)
    assert record["about"]["model"] == engine.model_name
    assert record["left_out"] == {"span": "they are not labelled", "character": "they are not labelled"}
    ranking = one["ranking"]
    # a model of 135M parameters does know capitals
    assert ranking["-log p"]["auroc"]["estimate"] > 0.8
    assert {"CoCoA, ConMLDS", "CoCoA, fMLDS", "CoCoA-SIG, ConMLDS", "CoCoA-SIG, fMLDS", "fMLDS"} < set(ranking)
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
    assert (out / "auroc-answer.svg").read_text().startswith("<?xml")


def test_one_prompt_alone_has_no_intervals_and_too_few_are_refused(
    cocoa: Cocoa, answers: Path, parts: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few\x1b[31m.jsonl"
    few.write_text(parts.read_text().splitlines()[0])
    settings = ("--span-log-prob", "mean", "--middle-layers", "3,9", "--final-layer", "pre_norm", "--chat")
    result = successful(cocoa("signal", "--data", str(few), "--out", str(tmp_path), "--draws", "20", *settings))
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
    lines = answers.read_text().splitlines()
    few.write_text("\n".join(lines[2 * number + number % 2] for number in range(8)))  # half of the answers are wrong
    refused = cocoa("calibrate", "--data", few, "--folds", "2", "--draws", "20", "--out", tmp_path / "r.json")
    assert_refused(refused, "No risk of answers: 4 prompts have hallucinated items; 2 folds")
    assert_refused(refused, "need at least 6")


@pytest.mark.usefixtures("undrawn")
def test_signal_of_few_prompts(cocoa: Cocoa, tmp_path: Path, parts: Path) -> None:
    rows = [*map(json.loads, parts.read_text().splitlines())]
    right = [{**row, "id": f"{row['id']} right", "text": row["text"].split(" is ")[0], "spans": []} for row in rows]
    data = write(tmp_path / "both.jsonl", *rows, *right)
    successful(cocoa("signal", "--data", data, "--out", tmp_path, "--draws", "20", "--prompts", "8"))
    levels = json.loads((tmp_path / "signal.json").read_text())["levels"]
    assert list(levels) == ["answer", "span", "character"]
    for level, one in levels.items():
        assert ("-mean log p" in one["ranking"]) == (level != "character")
    assert "Intervals over only 8 prompts" in (tmp_path / "signal.md").read_text()


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
    (tmp_path / "risk-answer.svg").unlink()
    levels = checked(cocoa, path, answers)
    assert set(levels) == {"answer"}
    assert levels["answer"]["folds"] == 0
    assert levels["answer"]["auroc"]["estimate"] >= calibrator.answer.validation.auroc.estimate
    assert not list(tmp_path.glob("*-answer.*"))  # nothing is drawn unless asked for
    plot = ("--plot", tmp_path / "new" / "elsewhere.png")
    assert "24 answers of 12 prompts" in cocoa("calibrate", "--data", answers, "--check", path, *plot).stdout
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
    found = checked(cocoa, path, parts)["span"]
    assert found["auroc"]["estimate"] >= calibrator.span.validation.auroc.estimate
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
    found = checked(cocoa, path, parts)["span"]
    assert found["auroc"]["estimate"] >= calibrator.span.validation.auroc.estimate - 0.05
    refused = cocoa("calibrate", "--data", parts, "--check", path, "--method", "cocoa")
    assert_refused(refused, "answers without candidates: it cannot be evaluated with --method cocoa")
    for method, words in (("greedy", []), ("dola", []), ("cocoa", ["method='cocoa' grows candidates to compare"])):
        config = engine.config.replace(method=method)
        assert calibrator.mismatches(engine.model_name, config, engine.num_layers) == words


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
    result = successful(cocoa(*check))
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
    questions = write(tmp_path / "questions.jsonl", *rows)
    options = ("--questions", questions, "--folds", "2", "--draws", "20", "--max-new-tokens", "16", "--probe")
    calibrator, printed = calibrated(cocoa, tmp_path / "risk.json", parts, *options)
    assert calibrator.span is not None
    assert calibrator.answer is not None
    assert "own answers to 12 questions" in calibrator.answer.data
    assert 6 <= calibrator.answer.validation.hallucinated < 12
    assert "12 answers of 12 prompts" in printed
    assert calibrator.probe is not None
    assert calibrator.answer_probe is not None
    assert calibrator.answer.features[-1] == "probe"


def test_a_missing_extra_is_said(
    cocoa: Cocoa, answers: Path, loads: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sklearn", "matplotlib", *sys.modules):
        if name.partition(".")[0] in ("sklearn", "matplotlib"):
            monkeypatch.setitem(sys.modules, name, None)
    for command, package in (("signal", "matplotlib"), ("calibrate", "scikit-learn")):
        refused = cocoa(command, "--data", answers, "--out", "never")
        assert_refused(refused, f"needs {package}: pip install 'cocoa-integrations[risk]'")
    assert loads == []


MEASURED = [
    {"text": "Paris.", "spans": [{"text": "Paris", "risk": 0.2}, {"text": ".", "risk": 0.1}], "answers": ["Paris"]},
    {"text": "Rome.", "spans": [{"text": "Rome.", "risk": 0.6}], "answers": ["Madrid"], "answer_risk": 0.9},
    {"text": "Oslo", "spans": [{"text": "Oslo", "risk": 0.7}, {"text": " ", "risk": 0.9}], "answers": ["Oslo"]},
    {"answer": "Bonn", "references": ["Berlin"], "spans": [{"text": "Bonn", "risk": 0.4}], "answer_risk": 0.4},
    {"text": "Lima", "spans": [{"text": "Lima", "risk": "NaN"}]},
]


def threshold(cocoa: Cocoa, prompts: Path, *options: object) -> tuple[dict[str, Any], str]:
    """What the command prints as JSON, and as a table."""
    shown, table = (cocoa("threshold", "--prompts", prompts, *options, *more) for more in (["--json"], []))
    assert (shown.exit_code, table.exit_code) == (0, 0), shown.output
    return json.loads(shown.stdout), " ".join(table.stdout.split())


def test_answers_that_were_measured_before(tiny_cocoa: Cocoa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CocoaEngine, "from_pretrained", Mock(side_effect=AssertionError("a model was loaded")))
    found, table = threshold(tiny_cocoa, write(tmp_path / "answers.jsonl", *MEASURED), "--at", "0.5")
    assert (found["answers"], found["default"]) == (5, {"span": None, "answer": None})
    (row,) = found["span"]
    assert row["answers"] == {"number": 3, "of": 5}  # one has a risk that is not a number
    assert row["spans"] == {"number": 3, "of": 6}  # without white space
    assert row["right_stopped"] == {"number": 1, "of": 2}
    assert row["wrong_passed"] == {"number": 1, "of": 2}
    (row,) = found["answer"]
    assert (row["answers"], row["wrong_passed"]) == ({"number": 1, "of": 2}, {"number": 1, "of": 2})
    assert "60% (3 of 5)" in table
    assert "2 of 4 answers that can be judged are wrong" in table


def test_prompts_are_answered(tiny_cocoa: Cocoa, tmp_path: Path) -> None:
    rows = [{"question": f"Who is {name}?", "answer": "nobody"} for name in "abc"]
    file = write(tmp_path / "prompts.jsonl", *rows, {"prompt": "Hello"})
    found, _ = threshold(tiny_cocoa, file, "--max-new-tokens", "4")
    assert found["answers"] == 4
    for row, share in [*zip(found["span"], SHARES, strict=False), *zip(found["answer"], SHARES, strict=False)]:
        assert row["answers"]["number"] <= share * 4
        assert row["wrong_passed"]["of"] == 3
    (tmp_path / "prompts.txt").write_text("Hello\n\nGood day\n")
    _, table = threshold(tiny_cocoa, tmp_path / "prompts.txt", "--max-new-tokens", "4")
    assert "2 answers" in table
    assert "right" not in table


def test_the_first_row_is_the_default(tiny_cocoa: Cocoa, tmp_path: Path) -> None:
    rows = [{**row, "threshold": 0.6, "answer_threshold": 0.5 + number / 10} for number, row in enumerate(MEASURED[:4])]
    for row in rows:
        row["spans"] = [{**span, "flagged": span["risk"] >= 0.6} for span in row["spans"]]
    record, table = threshold(tiny_cocoa, write(tmp_path / "answers.jsonl", *rows), "--at", "0.3")
    found = record["default"]
    assert found["span"]["threshold"] == 0.6
    assert found["span"]["answers"] == {"number": 2, "of": 4}
    assert found["span"]["spans"] == {"number": 2, "of": 5}
    assert found["span"]["right_stopped"] == {"number": 1, "of": 2}
    assert found["answer"]["threshold"] is None  # the answers have different ones
    assert found["answer"]["answers"] == {"number": 1, "of": 2}
    assert "default 0.6000" in table
    assert "compares the risk of whole answers with the default" in table


def test_a_file_of_questions_is_a_file_of_prompts(tmp_path: Path) -> None:
    """The passage in NQ's ``ctxs`` is the context. Without known answers, one is right that declines."""
    rows = [
        {"question": "Who?", "answers": [], "ctxs": [{"text": "It was built in 1874."}]},
        {"question": "When?", "answers": ["1874"], "context": "It was built in 1874."},
        {"question": "When?", "answers": ["1874"]},
    ]
    file = write(tmp_path / "questions.jsonl", *rows)
    prompts, questions = read_own_prompts(file), read_questions(file)
    assert [(one.request, one.context, one.answers) for one in prompts] == [
        (one.request, one.context, one.answers) for one in questions
    ]
    for row, prompt, question in zip(rows, prompts, questions, strict=True):
        for text in ("In 1874.", "The passage does not say."):
            assert prompt.answer(stopping._Line(), text).right is question.is_right(text)
            (line,) = read_own_prompts(write(tmp_path / "measured.jsonl", {**row, "text": text, "spans": []}))
            assert line.measured.right is question.is_right(text)
    (other,) = read_own_prompts(write(tmp_path / "prompts.jsonl", {"prompt": "Who?", "answers": [], "ctxs": ["a"]}))
    assert (other.request, other.answers) == ("Who?", None)


def test_an_unmeasured_risk_is_not_flagged_and_a_risk_that_is_no_number_is(tmp_path: Path) -> None:
    missing = {"text": "a", "risk": None, "flagged": False, "risk_source": "source_attention"}
    spans = [missing, {"text": "b", "risk": "NaN", "flagged": False}, {"text": "c", "risk": 0.1, "flagged": False}]
    row = {"text": "abc", "spans": spans, "threshold": 0.5}
    (line,) = read_own_prompts(write(tmp_path / "a.jsonl", row))
    assert line.measured is not None
    assert line.measured.flagged == (True, False)
    (first, _) = by_default([line.measured])
    assert first is not None
    assert (first.answers, first.spans) == (Count(1, 1), Count(1, 2))


def test_the_context_of_a_line_is_the_source_and_a_system_message_comes_first(
    engine: CocoaEngine, tmp_path: Path
) -> None:
    row = {"question": "When was it built?", "context": "The lighthouse was built in 1874."}
    prompts = read_own_prompts(write(tmp_path / "prompts.jsonl", row, {"prompt": "Hello"}))
    config = CocoaConfig(max_new_tokens=6)
    for system, before in ((None, []), ("Be brief.", [{"role": "system", "content": "Be brief."}])):
        found = list(measure(engine, prompts, config, system=system))
        for one, answer in zip(prompts, found, strict=True):
            chat = [*before, {"role": "user", "content": one.request}]
            source = None if one.context is None else [one.context]
            expected = engine.chat(chat, config=config, source=source)
            assert answer.whole == near(expected.answer_risk)
            assert answer.whole_threshold == expected.answer_threshold
            assert answer.spans == near([span.risk for span in expected.spans if span.text.strip()])
    with pytest.raises(ConfigError, match="--system"):
        require_chat("Be brief.", raw=True)
    # the risks of lines with and without a context are of one kind; the embedded calibrator does not apply
    config = CocoaConfig(max_new_tokens=4, method="greedy")
    for asked, kind in ((prompts, "token_probability"), (prompts[:1], "source_attention")):
        assert {answer.risk_source for answer in measure(engine, asked, config)} == {kind}


def test_a_context_that_the_model_reads_otherwise_is_no_source(
    engine: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"question": "When?", "context": "Cafe\u0301, built in 1874."}
    prompts = read_own_prompts(write(tmp_path / "prompts.jsonl", row))
    decode = engine.decode
    monkeypatch.setattr(engine, "decode", lambda ids: decode(ids).replace("e\u0301", "\u00e9"))  # as Qwen normalises
    (answer,) = measure(engine, prompts, CocoaConfig(max_new_tokens=4, method="greedy"))
    assert answer.risk_source == "token_probability"


def test_suggested_thresholds_stop_at_most_their_share() -> None:
    risks = [number / 100 + 0.000_01 for number in range(100)]
    for threshold, share in zip(suggested(risks), SHARES, strict=True):
        assert share - 0.011 <= sum(risk >= threshold for risk in risks) / 100 <= share
    assert suggested([math.inf] * 4) == []
    assert suggested([]) == []
    answer = Answer(())
    assert stopping.by_span([answer], [0.5])[0].answers == Count(0, 1)
    assert stopping.by_answer([answer], [0.5]) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "line 1: a line has a prompt"),
        ('{"prompt": " "}', "empty"),
        ('{"prompt": "a", "answer": 3}', "answer: "),
        ('{"text": "a", "spans": [{}]}', "spans.0.risk: Field required"),
        ('{"spans": [{"risk": 0.5}], "answers": ["a"]}', "line 1: the spans of an answer need its text"),
        ('{"text": "a", "spans": [{"risk": "high"}]}', "spans.0.risk.*high"),
        (f'{{"text": "a", "spans": [{{"risk": {10**400}}}]}}', "spans.0.risk"),
        ('{"text": "a", "spans": [], "threshold": "NaN"}', "threshold.*finite"),
        ("", "has no prompts"),
    ],
)
def test_bad_prompts(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(DataError, match=words):
        read_own_prompts(tmp_path / "bad.jsonl")


def test_the_source_of_the_risk_decides_what_thresholds_are_possible(tiny_cocoa: Cocoa, tmp_path: Path) -> None:
    own = [{**row, "risk_source": "token_probability"} for row in MEASURED]
    file = write(tmp_path / "own.jsonl", *own)
    found, table = threshold(tiny_cocoa, file)
    assert found["risk_source"] == "token_probability"
    assert all(0 <= row["threshold"] <= 1 for row in found["span"])
    assert "how unsure the model was" in table
    mixed = write(tmp_path / "mixed.jsonl", *own, {**MEASURED[0], "risk_source": "f_mlds"})
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    asked = ("--max-new-tokens", "4", "--at", "1.2")
    for refused, options, words in (
        (file, ("--at", "1.2"), "thresholds in [0, 1]"),
        (file, ("--at", "0.5,high"), "--at takes numbers"),
        (mixed, (), "different sources"),
        (prompts, asked, "thresholds in [0, 1]"),
    ):
        assert_refused(tiny_cocoa("threshold", "--prompts", refused, *options), words)
    found, _ = threshold(tiny_cocoa, prompts, *asked, "--risk", "f_mlds")
    assert found["risk_source"] == "f_mlds"
