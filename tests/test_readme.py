"""The README's promises: its examples run, its table of settings is the settings' own."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_an_example_for_each_way_in() -> None:
    for package in ("cocoa_engine", "cocoa_integrations.langchain", "cocoa_integrations.llama_index"):
        assert any(f"from {package} import" in example for example in EXAMPLES)
    assert all(len(example.strip().splitlines()) <= 12 for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=map(str, range(len(EXAMPLES))))
def test_examples_run(
    example: str, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    gc.collect()  # what an example before holds in cycles (agents) would share its engine

    def already_loaded(*arguments: Any, **options: Any) -> CocoaEngine:  # the same model: it need not be read again
        asked.append(arguments)
        return engine

    monkeypatch.setattr(CocoaEngine, "from_pretrained", already_loaded)
    exec(compile(example, "README.md", "exec"), {})
    assert asked
    assert len(capsys.readouterr().out) > 20


def test_settings_table_is_complete_and_true() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", README, re.MULTILINE)
    fields = {**CocoaConfig.model_fields, **Runtime.model_fields}
    assert [name for name, _ in rows] == list(fields)
    assert dict(rows) == {name: str(field.default) for name, field in fields.items()}


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
