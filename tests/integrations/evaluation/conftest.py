"""The command line in this process, on the model of the other tests."""

import pytest
from typer.testing import CliRunner

from cocoa_engine import CocoaEngine
from cocoa_engine.cli.app import app
from tests.helpers.cocoa import Cocoa


@pytest.fixture
def cocoa(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> Cocoa:
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: engine)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *args: CliRunner().invoke(app, list(map(str, args)), prog_name="cocoa")
