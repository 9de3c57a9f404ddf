"""The command line in this process, on the model that the other tests use or on a tiny one."""

import json
import os
import pty
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.style import Style
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.cli import calibrate
from cocoa_engine.cli.app import app
from cocoa_engine.lab import fit, signal_report
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab.data import Question
from cocoa_engine.lab.measured import question_config, question_prompt
from tests.helpers.cocoa import Cocoa
from tests.helpers.in_threads import join, start
from tests.helpers.processes import read_terminal
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

WORDS = ("red", "blue", "old", "new", "big", "cold", "wet", "dry", "soft", "loud", "dark", "pale")


@pytest.fixture
def loads(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, dict[str, object]]]:
    """Replaces loading by the engine of this run; lists the model and the options of each load."""
    calls: list[tuple[str | None, dict[str, object]]] = []

    def from_pretrained(model_name: str | None = None, **options: object) -> CocoaEngine:
        calls.append((model_name, options))
        return engine

    monkeypatch.setattr(CocoaEngine, "from_pretrained", from_pretrained)
    return calls


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plot is drawn. Drawing takes longer than a measurement of a few answers."""
    monkeypatch.setattr(signal_report, "draw", lambda *_: [])
    monkeypatch.setattr(calibrate, "draw", lambda *_: [])


@pytest.fixture
def divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit divides its items into folds once, not five times."""
    monkeypatch.setattr(fit, "MAX_REPEATS", 1)


@pytest.fixture
def few_needles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of texts, whose facts count though the model recalls nothing, and few short answers."""
    small = {"ROUNDS": 2, "STEADY": 2.0, "RECALLED": -1.0, "MIN_SPANS": 5, "MAX_NEW_TOKENS": 6, "PROMPTS": 6}
    for name, value in small.items():
        monkeypatch.setattr(lab_heads, name, value)
    monkeypatch.setitem(lab_heads.with_reference.__kwdefaults__, "prompts", 6)


@pytest.fixture
def cocoa(loads: list[object], monkeypatch: pytest.MonkeyPatch) -> Cocoa:
    """Runs ``cocoa`` with some arguments; colours only if the test asks for them."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*args: object, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, list(map(str, args)), input=stdin, prog_name="cocoa")

    return run


@pytest.fixture(scope="session")
def tiny() -> CocoaEngine:
    """Random weights. It answers two prompts at a time."""
    model = tiny_model("llama", seed=6, max_position_embeddings=2048)
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(max_batch_size=2), model_name="tiny")
    engine.generate("Hello", max_new_tokens=1)  # the kernels are loaded before tests choose another cache directory
    return engine


@pytest.fixture
def tiny_cocoa(tiny: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> Cocoa:
    """Runs ``cocoa`` on the tiny model."""
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: tiny)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(app, list(map(str, args)), prog_name="cocoa")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., tuple[str, str]]]:
    """Runs ``cocoa`` with stderr on a terminal, or all streams if lines are typed; Ctrl-D follows the last one.

    Returns what the terminal shows, and what came to stdout elsewhere.
    """
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    for cached in (Style.parse, Style._add):  # a style keeps the codes of the first console that showed it
        cached.cache_clear()
    shown: list[bytes] = []

    def run(*args: object, typed: Sequence[str] = (), code: int = 0, **environment: str) -> tuple[str, str]:
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", **environment}.items():
            monkeypatch.setenv(name, value)
        reader = start(lambda: read_terminal(master, shown))
        (tmp_path / "stdout").touch()
        if typed:
            os.write(master, "".join(f"{line}\n" for line in typed).encode() + b"\x04")
        with ExitStack() as streams:
            for name in ("stdin", "stdout", "stderr") if typed else ("stdout", "stderr"):
                place = slave if typed or name == "stderr" else tmp_path / "stdout"
                mode = "r" if name == "stdin" else "w"
                stream = streams.enter_context(open(place, mode, encoding="utf-8", closefd=place != slave))
                monkeypatch.setattr(sys, name, stream)
            with pytest.raises(SystemExit) as end:
                app(list(map(str, args)), prog_name="cocoa")
        os.close(slave)
        join([reader])
        assert end.value.code == code, b"".join(shown)
        return b"".join(shown).decode(), (tmp_path / "stdout").read_text(encoding="utf-8")

    yield run
    monkeypatch.undo()
    os.close(master)


@pytest.fixture
def data(tiny: CocoaEngine, tmp_path: Path) -> dict[str, Path]:
    """Files of each kind that the commands read. The known answer to every other question is what the model says."""
    files: dict[str, list[dict[str, object]]] = {name: [] for name in ("texts", "questions", "rows", "tasks")}
    for number, word in enumerate(WORDS):
        other = WORDS[number - 1]
        source, text = f"A {word} house.", f"It is {word} and {other}."
        row = {"prompt": f"Text: {source} Summary:", "text": text, "spans": [[text.index(other), len(text)]]}
        row |= {"id": f"{number}a", "source": source}
        files["texts"] += [row, {**row, "id": f"{number}b", "text": f"It is {word}.", "spans": []}]
        question = Question(f"Is it {word}?", None, (), "")
        config = question_config(tiny, tiny.config.replace(max_new_tokens=6))
        said = tiny.generate(question_prompt(tiny, question.request), config=config).text
        files["questions"].append({"question": question.text, "answers": [said if number % 2 else "zebra"]})
        files["rows"].append({"prompt": "It is", "text": f" {word}."})
        files["tasks"].append({"question": question.text, "answer": "It is. #### 1"})
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return {name: tmp_path / f"{name}.jsonl" for name in files}
