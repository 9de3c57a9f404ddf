"""The progress of commands on stderr: lines where that is no terminal, one bar for all stages where it is one."""

from __future__ import annotations

import io
import itertools
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cocoa_engine import CocoaEngine, Span, SpanStream
from cocoa_engine.cli import progress as module
from cocoa_engine.cli.output import can_redraw, live
from cocoa_engine.cli.progress import Progress, Stage
from cocoa_engine.errors import ModelLoadError
from cocoa_engine.execution.backends import shared_cache
from cocoa_engine.lab import heads as lab_heads
from tests.helpers.cocoa import Cocoa

LINE = re.compile(r"(\d[\d,]* of \d[\d,]* [a-z][a-z0-9 ]*|[a-z].*), (\d+ h )?\d+ (s|min) (left|so far)")
"""A line after the name of the command."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that progress is measured with, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_that_of_this_stage_and_the_later_ones(clock: list[float]) -> None:
    progress = Progress("heads")
    progress.plan({"needles": 90, "answering": 60})
    with progress.stage("needles", "needles", 90) as stage:
        clock[0] += 30
        assert progress.describe() == "0 of 90 needles, 30 s so far"
        clock[0] += 30
        stage.advance(30)  # two seconds each
        assert progress.describe() == "30 of 90 needles, 4 min left"
        stage.at(60, 90)  # from a cache, in no time
        assert progress.describe() == "60 of 90 needles, 3 min left"
        clock[0] += 60
        assert progress.describe() == "60 of 90 needles, 2 min left"
    assert progress.fraction() == 0.6
    with progress.stage("answering", "prompts", 60) as stage:
        assert progress.describe() == "0 of 60 prompts, 2 min left"  # as fast as the stage before
        clock[0] += 60
        assert progress.describe() == "0 of 60 prompts, 60 s left"
        clock[0] += 5340
        assert progress.describe() == "0 of 60 prompts, 1 h 30 min so far"
        stage.advance(30)
        assert progress.describe() == "30 of 60 prompts, 1 h 30 min left"
        assert progress.fraction() == 0.8
    assert progress.fraction() == 1.0
    words = {119.4: "119 s", 119.6: "2 min", 3569: "59 min", 3571: "1 h 0 min", 10**6: "277 h 47 min"}
    assert {seconds: module._duration(seconds) for seconds in words} == words


STAGES = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), min_size=1, max_size=6)


@given(STAGES, st.data())
def test_the_bar_never_goes_back(stages: list[tuple[int, bool, bool]], data: st.DataObject) -> None:
    """Whatever is planned, counted and nested, and whatever totals turn out to be."""
    progress, seen = Progress("ask"), [0.0]
    progress.plan({str(number): share for number, (share, _, _) in enumerate(stages) if share})

    def look() -> None:
        seen.append(progress.fraction() or 0.0)

    for number, (_, counts, nests) in enumerate(stages):
        total = data.draw(st.integers(1, 4)) if counts else 0
        with progress.stage(str(number), "steps", total) as stage:
            look()
            if nests:
                with progress.stage("inside", "parts", 2) as inside:
                    inside.advance()
                    look()
            for _ in range(total):
                stage.advance()
                look()
    if len(seen) > 1 and any(share for share, _, _ in stages):
        assert seen == sorted(seen)
        assert progress.fraction() == pytest.approx(1.0)


def test_a_line_comes_while_one_step_hangs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.01)
    said = ""
    with Progress("heads").stage("loading \x1b[31mmodel"):
        deadline = time.monotonic() + 60
        while said.count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capfd.readouterr().err
    assert said.splitlines()[:3] == ["heads: loading ␛[31mmodel, 0 s so far"] * 3
    threads = [thread.name for thread in threading.enumerate()]
    assert "cocoa-progress" not in threads


def test_a_closed_stderr_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.01)
    stream = (tmp_path / "stderr").open("w")
    monkeypatch.setattr(sys, "stderr", stream)
    described = 0

    def describe(seconds: float) -> str:
        nonlocal described
        described += 1
        return "0 s"

    monkeypatch.setattr(module, "_duration", describe)
    with Progress("ask").stage("loading"):
        stream.close()
        before, deadline = described, time.monotonic() + 60
        while described < before + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert described >= before + 3


# --- commands


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a command takes long enough for a line."""
    at = Stage.at

    def slow(stage: Stage, done: int, total: int) -> None:
        time.sleep(0.03)
        at(stage, done, total)

    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(Stage, "at", slow)


@pytest.fixture
def cocoa(tiny_cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cocoa:
    """Runs ``cocoa`` on a tiny model, which passes for one that finds needles."""
    for name, value in {"RECALLED": -1.0, "MIN_SPANS": 5, "MAX_NEW_TOKENS": 6, "PROMPTS": 4}.items():
        monkeypatch.setattr(lab_heads, name, value)
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    return tiny_cocoa


FITS = ["--folds", "2", "--draws", "20", "--max-new-tokens", "6"]
COMMANDS = {
    "heads": ["heads", "--lengths", "16", "--prompts", "6"],
    "signal": ["signal", "--data", "{texts}", "--draws", "20", "--out", "{out}"],
    "calibrate": ["calibrate", "--data", "{texts}", *FITS, "--out", "{out}.json"],
    "calibrate --questions": ["calibrate", "--data", "{texts}", "--questions", "{questions}", *FITS, "--out", "{out}"],
    "calibrate --self": ["calibrate", "--self", "--prompts", "20", *FITS, "--level", "span", "--out", "{out}.json"],
    "alpha": ["alpha", "--data", "{texts}", "--max-new-tokens", "6", "--json"],
    "threshold": ["threshold", "--prompts", "{questions}", "--max-new-tokens", "6", "--json"],
    "compare": ["compare", "Who?", "--raw", "--max-new-tokens", "6"],
    "bench": ["bench", "--tokens", "4", "--rounds", "2", "--json"],
    "score": ["score", "--rows", "{rows}", "--out", "{out}.jsonl"],
    "eval": ["eval", "gsm8k", "--data", "{tasks}", "--max-new-tokens", "6", "--out", "{out}"],
}
LOADING = {name: COMMANDS[name] for name in ("heads", "score", "eval")}
LOADING |= {"ask": ["ask", "Who?"], "chat": ["chat"], "serve": ["serve", "--port", "0"]}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "divided_once", "slow_steps")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_long_command_prints_lines(cocoa: Cocoa, data: dict[str, Path], tmp_path: Path, name: str) -> None:
    command = [word.format(**data, out=tmp_path / "out") for word in COMMANDS[name]]
    result = cocoa(*command)
    if name != "calibrate --questions":  # the tiny model's answers may all be wrong
        assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if line.startswith(f"{command[0]}: ")]
    assert [line for line in said if not LINE.fullmatch(line.partition(": ")[2])] == []
    assert any(re.search(r": [\d,]+ of [\d,]+ ", line) for line in said)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", result.stderr)
    assert " left" not in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADING)
def test_loading_prints_lines(
    cocoa: Cocoa, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    def slow(*_: object, **__: object) -> CocoaEngine:
        time.sleep(0.2)
        raise ModelLoadError("it is damaged")

    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(CocoaEngine, "from_pretrained", slow)
    command = [word.format(**data, out=tmp_path / "out") for word in LOADING[name]]
    result = cocoa(*command)
    assert f"{command[0]}: loading the embedded model (slower the first time), 0 s so far\n" in result.stderr
    assert result.stderr.endswith("it is damaged\n")
    assert result.exit_code == 2


def test_a_long_answer_and_a_long_prompt_print_lines(cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(shared_cache, "PREFILL_CHUNK", 4)
    span = SpanStream.__next__

    def slow(stream: SpanStream) -> Span:
        time.sleep(0.05)
        return span(stream)

    monkeypatch.setattr(SpanStream, "__next__", slow)
    result = cocoa("ask", "--raw", "a b c d e f g h " * 60, "--max-new-tokens", "64")
    said = result.stderr.splitlines()
    assert any(re.fullmatch(r"ask: [\d,]+ of [\d,]+ tokens of the prompt, .*", line) for line in said)
    assert any(re.fullmatch(r"ask: answering, \d+ s so far", line) for line in said)


@pytest.mark.slow
@pytest.mark.usefixtures("cocoa", "slow_steps")
@pytest.mark.parametrize("color", [True, False])
def test_a_terminal_gets_one_bar_that_is_gone_at_the_end(terminal: Callable[..., tuple[str, str]], color: bool) -> None:
    shown, printed = terminal(*COMMANDS["heads"], **({} if color else {"NO_COLOR": "1"}))
    assert re.search(r"━.* of 15 needles, ", shown)
    assert re.search(r"━.* of 6 prompts, ", shown)
    assert "heads: " not in shown
    assert shown.rindex("\x1b[2K") > shown.rindex("━")  # erased
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert bool(re.search(r"\x1b\[[\d;]*3[1-8]", shown)) == color
    assert "\x1b" not in printed
    assert "written to" in printed.lower()


@pytest.mark.parametrize("drawn", [lambda console: Progress("ask").stage("answering"), live])
def test_the_cursor_is_visible_if_the_process_is_killed(
    drawn: Callable[[Console], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    console = Console(file=stream, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm-256color"})
    monkeypatch.setattr(module, "progress_console", lambda: console)
    assert can_redraw(console)
    assert not can_redraw(Console(file=stream, force_terminal=True, _environ={"TERM": "dumb"}))
    with drawn(console):
        shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("number", "code", "suffix"), [(signal.SIGINT, 130, "jsonl"), (signal.SIGTERM, 143, "parquet")]
)
def test_a_signal_keeps_the_rows_so_far_and_the_file_is_replaced_when_all_are_scored(
    cocoa: Cocoa, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, suffix: str
) -> None:
    """If the command does not take the signal, the test fails."""

    def not_taken(number: int, frame: object) -> None:
        pytest.fail("SIGTERM would end the process")

    calls, score, out = itertools.count(1), CocoaEngine.score, Path(f"out.{suffix}")
    out.write_text("kept")

    def called(*args: object, **options: object) -> object:
        if next(calls) == 2:
            signal.raise_signal(number)
        return score(*args, **options)

    monkeypatch.setattr(CocoaEngine, "score", called)
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: not_taken}
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}  # type: ignore[arg-type]
    result = cocoa("score", "--rows", data["rows"], "--out", out)
    for each, handler in before.items():
        signal.signal(each, handler)
    assert result.exit_code == code
    incomplete = Path(f"{out}.incomplete").resolve()
    assert result.stderr == f"cocoa: 1 rows are kept in {incomplete}\ncocoa: interrupted\n"
    (row,) = incomplete.read_text().splitlines()
    assert "risk" in json.loads(row)
    assert out.read_text() == "kept"
    assert [file.name for file in Path().iterdir() if file.name.startswith(".out")] == []
    result = cocoa("score", "--rows", data["rows"], "--out", out)
    assert result.exit_code == 0
    assert f"{out} is replaced" in result.stderr.replace("\n", " ")
    assert out.read_bytes() != b"kept"


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), max_size=200), st.integers(10, 200))
def test_the_bar_is_one_line_whatever_the_stage_is_called(name: str, width: int) -> None:
    progress = Progress("ask")
    for one in (name, "loading the embedded model (slower the first time)"):
        with progress.stage(one):
            console = Console(width=width)
            with console.capture() as captured:
                console.print(progress._drawn(console))
        assert len(captured.get().splitlines()) == 1
        assert "s so far" in captured.get() or width < 40
