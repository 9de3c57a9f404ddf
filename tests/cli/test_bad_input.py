"""Bad input to any command is one line on stderr, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaEngine
from cocoa_engine.cli.app import app
from tests.helpers.cocoa import Cocoa

ASK, SCORE, ROWS = ["ask", "Who?"], ["score", "--prompt", "a"], ["score", "--rows", "{answers}"]
COMPARE, BENCH, DATA = ["compare", "Who?"], ["bench"], ["--data", "{answers}"]
SIGNAL, CALIBRATE, ALPHA = (["signal", *DATA], ["calibrate", *DATA], ["alpha", *DATA])
UNWRITABLE = "/no/such/folder/x cannot be written"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*ASK, "--alpha", "-1"], "alpha"),
        ([*ASK, "--alpha", "much"], "alpha"),
        ([*ASK, "--alpha", "nan"], "alpha"),
        ([*ASK, "--gamma", "0"], "gamma"),
        ([*ASK, "--method", "cocoasig"], "did you mean 'cocoa-sig'"),
        ([*ASK, "--metric", "g_mlds"], "metric"),
        ([*ASK, "--middle-layers", "9,3"], "m < n"),
        ([*ASK, "--middle-layers", "9"], "middle_layers"),
        ([*ASK, "--raw", "--system", "Be brief."], "--system"),
        ([*ASK, "--svg", "/no/such/folder/x"], UNWRITABLE),
        ([*ASK, "--html", "/no/such/folder/x"], f"--html {UNWRITABLE}"),
        ([*ASK, "--threads", "0"], "--threads"),
        ([*ASK, "--colour"], "--colour"),
        ([*ASK, "too", "many"], "unexpected extra argument"),
        ([*ASK, "--source", "{empty}"], "is empty"),
        ([*ASK, "--source", "missing.txt"], "cannot be read"),
        ([*ASK, "--fail-on-risk", "1.5"], "a number in [0, 1], or auto"),
        ([*ASK, "--fail-on-risk", "-1"], "a number in [0, 1], or auto"),
        ([*ASK, "--fail-on-risk", "nan"], "a number in [0, 1], or auto"),
        ([*ASK, "--fail-on-risk", "high"], "a number in [0, 1], or auto"),
        ([*ASK, "--fail-on-risk", "0.5", "--risk", "f_mlds"], "raw MLDS"),
        ([*COMPARE, "--methods", "greedy"], "two or more different methods"),
        ([*COMPARE, "--methods", "greedy,greedy"], "two or more different methods"),
        ([*COMPARE, "--methods", "greedy,cocoasig"], "did you mean 'cocoa-sig'"),
        ([*COMPARE, "--methods", "greedy,"], "method"),
        ([*COMPARE, "--html", "/no/such/folder/x"], f"--html {UNWRITABLE}"),
        ([*COMPARE, "--raw", "--system", "Be brief."], "--system"),
        ([*BENCH, "--methods", "nope"], "method"),
        ([*BENCH, "--methods", ","], "--methods"),
        ([*BENCH, "--tokens", "1"], "--tokens"),
        ([*BENCH, "--rounds", "0"], "--rounds"),
        ([*BENCH, "--prompt", " "], "--prompt"),
        ([*BENCH, "--threads", "0"], "--threads"),
        ([*BENCH, "--no-such"], "--no-such"),
        ([*BENCH, "one", "two"], "two"),
        (SCORE, "--text"),
        ([*SCORE, "--text", "b", "--source", "{empty}"], "is empty"),
        ([*SCORE, "--text", "b", "--source", "missing.txt"], "cannot be read"),
        (["score", "--text", "a"], "--rows"),
        (ROWS, "--rows"),
        (["score", "--out", "{answers}"], "--rows"),
        ([*ROWS, "--out", "{answers}x", "--json"], "--rows"),
        (["heads", "--lengths", "1000000000"], "whole numbers from 1 to 10000000"),
        (["heads", "--lengths", "256,0"], "whole numbers from 1 to 10000000"),
        (["heads", "--lengths", "x"], "whole numbers from 1 to 10000000"),
        (["heads", "--lengths", ""], "whole numbers from 1 to 10000000"),
        (["heads", "--lengths", ",".join(["1"] * 101)], "whole numbers from 1 to 10000000"),
        (["signal", "--data", "none.csv", "--out", "o"], "no file or folder none.csv"),
        ([*SIGNAL, "--out", "{answers}/x"], "cannot be written to"),
        ([*SIGNAL, "--format", "xls", "--out", "o"], "unknown format 'xls'"),
        (SIGNAL, "--out"),
        ([*CALIBRATE, "--out", "r", "--recall", "0.5", "--miss", "0.1"], "give one of them"),
        (CALIBRATE, "give either --out FILE to fit a calibrator, or"),
        ([*CALIBRATE, "--check", "embedded", "--miss", "0.1"], "a threshold cannot be chosen"),
        ([*CALIBRATE, "--out", "r", "--miss", "0"], "must be above 0 and below 1"),
        ([*CALIBRATE, "--check", "{answers}"], "not a calibrator"),
        (["calibrate", "--out", "r"], "give --data PATH"),
        (["calibrate", "--questions", "{answers}", "--out", "r", "--probe"], "--probe needs --data PATH"),
        ([*CALIBRATE, "--check", "embedded", "--probe"], "nor a probe fitted"),
        ([*CALIBRATE, "--out", "r", "--plot", "a.foo"], "must end in one of .eps"),
        (["calibrate", "--questions", "{answers}", "--out", "r"], "question"),
        ([*ALPHA, "--alpha", "2"], "--alpha"),
        ([*ALPHA, "--plot", "x.foo"], "--plot x.foo: the name must end in one of .eps"),
        ([*ALPHA, "--plot", "x"], "must end in one of"),
        ([*ALPHA, "--plot", "/no/such/folder/x.png"], "--plot /no/such/folder/x.png cannot be"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    cocoa: Cocoa,
    loads: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("answers", "empty")}
    rows = [{"id": text, "prompt": "Is it?", "text": text, "label": text == "No."} for text in ("Yes.", "No.")]
    files["answers"].write_text("\n".join(map(json.dumps, rows)))
    files["empty"].write_text(" \n")
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    assert_refused(cocoa(*(argument.format(**files) for argument in arguments)), words)
    assert loads == []


def test_bad_stdin(cocoa: Cocoa, loads: list[object]) -> None:
    for stdin in ("", "  \n", b"\xff\xfe\x00"):
        assert_refused(cocoa("ask", stdin=stdin), "the question is")
    assert loads == []


def test_an_empty_name_of_a_model() -> None:
    assert_refused(CliRunner().invoke(app, ["ask", "Hi", "--model", ""]), "name of the model")


def test_bad_input_that_the_engine_finds(cocoa: Cocoa, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt, text in (("The capital of France is", ""), ("", " Paris.")):
        assert_refused(cocoa("score", "--prompt", prompt, "--text", text), "")
    assert_refused(cocoa(*ASK, "--middle-layers", "10,99"), "99")
    assert_refused(cocoa("ask", "word " * 9000), "tokens")
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    assert_refused(cocoa(*ASK), "--raw")


def assert_refused(result: Result, words: str) -> None:
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith("cocoa: ")
    assert words in result.stderr
