"""The command line in this process, on the model that the other tests use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaEngine
from cocoa_engine.cli import calibrate
from cocoa_engine.cli.app import app
from cocoa_engine.lab import fit, signal_report


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
def cocoa(loads: list[object], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``cocoa`` with some arguments; colours only if the test asks for them."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*args: object, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, list(map(str, args)), input=stdin, prog_name="cocoa")

    return run
