"""The pages hang together, and the architecture page has every module in the layer of the import contract."""

from __future__ import annotations

import pkgutil
import re
import runpy
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import cocoa_engine
import cocoa_integrations
from docs._generate.links import ROOT_PAGES, is_local, links, rewrite_links, target
from docs._generate.parts import PARTS, fill
from tests.helpers.pages import DOCS, PAGES, ROOT, SITE_PAGES, anchors, name_of
from tests.helpers.paths import PYPROJECT


def _nav() -> list[str]:
    def flat(entries: list[Any]) -> list[str]:
        found: list[str] = []
        for entry in entries:
            for value in [entry] if isinstance(entry, str) else entry.values():
                found += [value] if isinstance(value, str) else flat(value)
        return found

    return flat(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    assert [name for name in ROOT_PAGES if not (ROOT / name).exists()] == []
    assert len(set(_nav())) == len(_nav())
    written = [page.relative_to(DOCS).as_posix() for page in SITE_PAGES]
    assert sorted(_nav()) == sorted([*written, *ROOT_PAGES.values()])


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_linked_files_exist(page: Path) -> None:
    found = [link for link in links(page.read_text(encoding="utf-8")) if is_local(link) or link.startswith("#")]
    to = {link: target(link, page) if is_local(link) else page for link in found}
    assert [link for link, file in to.items() if not file.exists()] == []
    to_parts = [link for link, file in to.items() if "#" in link and file.suffix == ".md"]
    assert [link for link in to_parts if link.partition("#")[2] not in anchors(to[link])] == []


def test_links_lead_to_the_same_file_on_the_site() -> None:
    page = (
        "[a](../../examples/chat.py) [b](settings.md#alpha) [`c`](../../cocoa_engine) [d](https://x.org) "
        "[e](../../CHANGELOG.md) ![f](../answer.svg)\n\n```text\n[a](../../examples/chat.py)\n```\n"
    )
    assert rewrite_links(page, DOCS / "reference" / "cli.md", "reference/cli.md") == (
        "[a](../files/examples/chat.py.txt) [b](settings.md#alpha) `c` [d](https://x.org) "
        "[e](../changelog.md) ![f](../answer.svg)\n\n```text\n[a](../../examples/chat.py)\n```\n"
    )


def test_every_generated_part_is_on_one_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in SITE_PAGES)
    for name in PARTS:
        assert text.count(f"<!-- generated: {name} -->\n") == 1
    note = "Note for readers of the plain file."
    filled = fill(f"before\n<!-- generated: runtime -->\n{note}\n<!-- end -->\nafter\n")
    assert note not in filled
    assert "`cuda_graphs`" in filled
    assert filled.startswith("before\n")
    assert filled.endswith("after\n")


@pytest.mark.slow
def test_the_tables_of_the_ends_of_answers_are_those_of_the_measures_beside_them() -> None:
    text = (DOCS / "explanation" / "evaluation.md").read_text(encoding="utf-8")
    study = runpy.run_path(str(DOCS / "explanation" / "decoding-default" / "tables.py"))
    for marker, table in (("rules", "quality"), ("lengths", "lengths")):
        shown = text.split(f"<!-- study: {marker} -->\n")[1].split("<!-- end of the study -->")[0]
        assert shown.splitlines() == list(study[table]())


_PAGE = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
_ENGINE_ROW = re.compile(r"^\| (\d+) \| (.+?) \|", re.MULTILINE)
_ADAPTER_ROW = re.compile(r"^\| ((?:`\w+(?:/|\.py)`(?:, )?)+) \|", re.MULTILINE)


def _names(cell: str) -> list[str]:
    return [name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", cell)]


def _modules(package: ModuleType) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


LAYERS = [(int(number), name) for number, cell in _ENGINE_ROW.findall(_PAGE) for name in _names(cell)]
ADAPTERS = [name for cell in _ADAPTER_ROW.findall(_PAGE) for name in _names(cell)]


def test_every_module_is_in_the_table_once_in_the_order_of_the_contract() -> None:
    assert sorted(name for _, name in LAYERS) == _modules(cocoa_engine)
    assert sorted(ADAPTERS) == _modules(cocoa_integrations)
    (contract,) = (one for one in PYPROJECT["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
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
