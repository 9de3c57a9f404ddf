"""The architecture page has every module, in the layer that the import contract gives it."""

from __future__ import annotations

import pkgutil
import re
import sys
from itertools import pairwise
from types import ModuleType

import pytest

import cocoa_engine
import cocoa_integrations
from tests.helpers.pages import DOCS, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PAGE = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
_ENGINE_ROW = re.compile(r"^\| (\d+) \| (.+?) \|", re.MULTILINE)
_ADAPTER_ROW = re.compile(r"^\| ((?:`\w+(?:/|\.py)`(?:, )?)+) \|", re.MULTILINE)


def _names(cell: str) -> list[str]:
    return [name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", cell)]


def _modules(package: ModuleType) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


LAYERS = [(int(number), name) for number, cell in _ENGINE_ROW.findall(_PAGE) for name in _names(cell)]
ADAPTERS = [name for cell in _ADAPTER_ROW.findall(_PAGE) for name in _names(cell)]


@pytest.mark.parametrize(
    ("package", "listed"),
    [(cocoa_engine, [name for _, name in LAYERS]), (cocoa_integrations, ADAPTERS)],
    ids=["cocoa_engine", "cocoa_integrations"],
)
def test_every_module_is_in_the_table_once(package: ModuleType, listed: list[str]) -> None:
    assert sorted(listed) == _modules(package)


def test_the_table_has_the_order_of_the_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (one for one in project["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    layer_of = {name: number for number, name in LAYERS}
    order = [[layer_of[name] for name in re.findall(r"\w+", layer)] for layer in contract["layers"]]
    assert sorted(name for layer in contract["layers"] for name in re.findall(r"\w+", layer)) == sorted(layer_of)
    for above, below in pairwise(order):
        assert min(above) >= max(below)


def test_the_lines_of_the_loop_are_those_of_the_files() -> None:
    shown = _PAGE.partition("```text\n")[2].partition("```")[0].strip().split("\n\n")
    assert len(shown) >= 5
    for part in shown:
        title, *lines = part.split("\n")
        file = ROOT / title.removeprefix("# ").partition(":")[0]
        code = [line.strip() for line in file.read_text(encoding="utf-8").split("\n")]
        assert [line for line in lines if line.strip() not in code] == []
