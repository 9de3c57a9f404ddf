"""Bad input to any command is one line on stderr, before a model is loaded."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaEngine
from cocoa_engine.cli.app import app
from tests.helpers.cocoa import Cocoa, assert_refused

UNWRITABLE, DATA = "/no/such/folder/x cannot be written", "--data {answers}"
MANY = ",".join(["1"] * 101)
REFUSED = {
    "alpha": ["ask Who? --alpha -1", "ask Who? --alpha much", "ask Who? --alpha nan"],
    "gamma": ["ask Who? --gamma 0"],
    "did you mean 'cocoa-sig'": ["ask Who? --method cocoasig", "compare Who? --methods greedy,cocoasig"],
    "metric": ["ask Who? --metric g_mlds"],
    "m < n": ["ask Who? --middle-layers 9,3"],
    "middle_layers": ["ask Who? --middle-layers 9"],
    "--system": ["ask Who? --raw --system 'Be brief.'", "compare Who? --raw --system 'Be brief.'"],
    UNWRITABLE: ["ask Who? --svg /no/such/folder/x"],
    f"--html {UNWRITABLE}": [f"{command} Who? --html /no/such/folder/x" for command in ("ask", "compare")],
    "--threads": ["ask Who? --threads 0", "bench --threads 0"],
    "--colour": ["ask Who? --colour"],
    "unexpected extra argument": ["ask Who? too many"],
    "is empty": ["ask Who? --source {empty}", "score --prompt a --text b --source {empty}"],
    "cannot be read": ["ask Who? --source missing.txt", "score --prompt a --text b --source missing.txt"],
    "a number in [0, 1], or auto": [f"ask Who? --fail-on-risk {value}" for value in ("1.5", "-1", "nan", "high")],
    "raw MLDS": ["ask Who? --fail-on-risk 0.5 --risk f_mlds"],
    "two or more different methods": [f"compare Who? --methods {methods}" for methods in ("greedy", "greedy,greedy")],
    "method": ["compare Who? --methods greedy,", "bench --methods nope"],
    "--methods": ["bench --methods ,"],
    "--tokens": ["bench --tokens 1"],
    "--rounds": ["bench --rounds 0"],
    "--prompt": ["bench --prompt ' '"],
    "--no-such": ["bench --no-such"],
    "two": ["bench one two"],
    "--text": ["score --prompt a"],
    "--rows": [
        *("score --text a", "score --rows {answers}", "score --out {answers}"),
        "score --rows {answers} --out {answers}x --json",
    ],
    "whole numbers from 1 to 10000000": [
        f"heads --lengths {lengths}" for lengths in ("1000000000", "256,0", "x", "''", MANY)
    ],
    "no file or folder none.csv": ["signal --data none.csv --out o"],
    "cannot be written to": [f"signal {DATA} --out {{answers}}/x"],
    "unknown format 'xls'": [f"signal {DATA} --format xls --out o"],
    "--out": [f"signal {DATA}"],
    "give one of them": [f"calibrate {DATA} --out r --recall 0.5 --miss 0.1"],
    "give either --out FILE to fit a calibrator, or": [f"calibrate {DATA}"],
    "a threshold cannot be chosen": [f"calibrate {DATA} --check embedded --miss 0.1"],
    "must be above 0 and below 1": [f"calibrate {DATA} --out r --miss 0"],
    "not a calibrator": [f"calibrate {DATA} --check {{answers}}"],
    "give --data PATH": ["calibrate --out r"],
    "--probe needs --data PATH": ["calibrate --questions {answers} --out r --probe"],
    "nor a probe fitted": [f"calibrate {DATA} --check embedded --probe"],
    "must end in one of .eps": [f"calibrate {DATA} --out r --plot a.foo"],
    "question": ["calibrate --questions {answers} --out r"],
    "--alpha": [f"alpha {DATA} --alpha 2"],
    "--plot x.foo: the name must end in one of .eps": [f"alpha {DATA} --plot x.foo"],
    "must end in one of": [f"alpha {DATA} --plot x"],
    "--plot /no/such/folder/x.png cannot be": [f"alpha {DATA} --plot /no/such/folder/x.png"],
}


@pytest.mark.parametrize(("command", "words"), [(command, words) for words in REFUSED for command in REFUSED[words]])
def test_bad_input_is_one_line_before_any_work(
    cocoa: Cocoa, loads: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("answers", "empty")}
    rows = [{"id": text, "prompt": "Is it?", "text": text, "label": text == "No."} for text in ("Yes.", "No.")]
    files["answers"].write_text("\n".join(map(json.dumps, rows)))
    files["empty"].write_text(" \n")
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    assert_one_line(cocoa(*(word.format(**files) for word in shlex.split(command))), words)
    assert loads == []


def test_bad_stdin(cocoa: Cocoa, loads: list[object]) -> None:
    for stdin in ("", "  \n", b"\xff\xfe\x00"):
        assert_one_line(cocoa("ask", stdin=stdin), "the question is")
    assert loads == []


def test_an_empty_name_of_a_model() -> None:
    assert_one_line(CliRunner().invoke(app, ["ask", "Hi", "--model", ""]), "name of the model")


def test_bad_input_that_the_engine_finds(cocoa: Cocoa, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt, text in (("The capital of France is", ""), ("", " Paris.")):
        assert_one_line(cocoa("score", "--prompt", prompt, "--text", text), "")
    assert_one_line(cocoa("ask", "Who?", "--middle-layers", "10,99"), "99")
    assert_one_line(cocoa("ask", "word " * 9000), "tokens")
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    assert_one_line(cocoa("ask", "Who?"), "--raw")


def assert_one_line(result: Result, words: str) -> None:
    assert_refused(result, words, lines=1)
    assert (result.stdout, result.stderr[:7]) == ("", "cocoa: ")
