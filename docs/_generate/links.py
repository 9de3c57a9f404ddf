"""Links from a page to files outside ``docs/``. In a clone they work as they are; the site gets a copy of the file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
"""Files of the repository root that are pages of the site, and their paths there."""

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s]+)(\))")
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_HTML_SOURCE = re.compile(r"(?:src|href)=\"([^\"]+)\"")


def links(page: str) -> list[str]:
    """The targets of a page's links and pictures, without those in code blocks."""
    text = _FENCE.sub("", page)
    return [match[1] for match in _LINK.findall(text)] + _HTML_SOURCE.findall(text)


def is_local(link: str) -> bool:
    """Whether a link leads to a file of this repository."""
    return not re.match(r"[a-z]+:|#|/", link)


def target(link: str, source: Path) -> Path:
    """The file or folder that a local link in the file ``source`` leads to."""
    return Path(os.path.normpath(source.parent / link.partition("#")[0]))


def linked_files(page: str, source: Path) -> Iterator[Path]:
    """The files outside ``docs/`` that a page links to and that have a path on the site."""
    for link in filter(is_local, links(page)):
        file = target(link, source)
        if file.is_file() and not file.is_relative_to(DOCS) and site_path(file) is not None:
            yield file


def site_path(file: Path) -> str | None:
    """The path of a repository file relative to the site's root; ``None`` if it is not on the site."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    if not file.is_relative_to(ROOT) or not file.is_file():
        return None
    name = file.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    return ROOT_PAGES.get(name, f"files/{name}" + (".txt" if file.suffix in {".py", ".md", ""} else ""))


def rewrite_links(page: str, source: Path, page_path: str) -> str:
    """A page with its local links rewritten for the site. A link to a file that is not on the site becomes its text.

    Args:
        page: the Markdown.
        source: the file that the Markdown is from.
        page_path: where the page is on the site, such as ``reference/cli.md``.
    """

    def rewrite(match: re.Match[str]) -> str:
        opening, link, closing = match.groups()
        if not is_local(link):
            return match[0]
        path = site_path(target(link, source))
        if path is None:
            return opening[1:-2]
        fragment = link.partition("#")[2]
        relative = os.path.relpath(path, os.path.dirname(page_path))
        return opening + relative + (f"#{fragment}" if fragment else "") + closing

    pieces: list[str] = []
    end = 0
    for fence in _FENCE.finditer(page):
        pieces += [_LINK.sub(rewrite, page[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, _LINK.sub(rewrite, page[end:])])
