"""The command with its entry point."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaEngine
from cocoa_engine.cli import options as plugins
from cocoa_engine.cli.app import app
from tests.helpers.paths import ROOT


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    """A folder that, on Python's path, declares the commands that pyproject.toml declares: as an installed package."""
    declared = re.search(
        r'^\[project\.entry-points\."cocoa\.commands"\]\n((?:.+\n)+)',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert declared
    info = tmp_path / "site" / "cocoa_as_installed-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cocoa-as-installed\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[cocoa.commands]\n{declared[1]}".replace('"', ""))
    return info.parent


@pytest.fixture
def cocoa(engine: CocoaEngine, entry_point: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Runs ``cocoa`` with some arguments in this process, on the model of the other tests."""
    monkeypatch.syspath_prepend(str(entry_point))
    forget_plugins()
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: engine)
    monkeypatch.setenv("COLUMNS", "120")
    yield lambda *args: CliRunner().invoke(app, list(map(str, args)), prog_name="cocoa")
    forget_plugins()  # the next test may see others


def forget_plugins() -> None:
    """As if no plugin had been looked for in this process."""
    plugins.commands.cache_clear()
    plugins.load_command.cache_clear()
