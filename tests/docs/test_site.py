"""The pages hang together: every page can be reached, every link leads to a file."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs._generate.links import ROOT_PAGES, is_local, links, rewrite_links, target
from docs._generate.parts import PARTS, fill
from tests.helpers.pages import DOCS, PAGES, ROOT, SITE_PAGES, anchors, name_of


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
