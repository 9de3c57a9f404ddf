"""The engine's example runs as it stands; those of the adapters are run beside their tests."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from cocoa_engine import CocoaEngine

EXAMPLE = Path(__file__).parent.parent / "examples" / "engine.py"


def test_engine(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda: engine)  # loaded already
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    for part in ("answer: ", "riskiest span: ", "kept", "greedy's", "stream: [", "batch:", "score:", "' Paris.'"):
        assert part in out
