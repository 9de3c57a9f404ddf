"""MkDocs hooks: generated parts, pages from the repository root, links out of ``docs/``, and checks of the built pages.

The site must work without a network: the build fails if a page would load a script, a style or a picture from another
host. It also fails if a code block was not recognised, so that its fence is shown as text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # document this checkout, not an installed version

from docs._generate.links import ROOT_PAGES, linked_files, rewrite_links, site_path  # noqa: E402
from docs._generate.parts import fill  # noqa: E402

_NOT_RUN = re.compile(r"^( *)<!-- not run: (.+?) -->$", re.MULTILINE)
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=\"(https?:)?//|<link\b[^>]*rel=\"(?:stylesheet|preload|icon)\"[^>]*href=\"(https?:)?//"
)

_FENCE = re.compile(r"```.*")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from the repository root, and copies of the files that pages link to."""
    for name, path in ROOT_PAGES.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, path, content=(ROOT / name).read_text(encoding="utf-8")))
    linked: dict[str, Path] = {}
    for page in files.documentation_pages():
        source = _source(page)
        linked |= {site_path(file) or "": file for file in linked_files(source.read_text(encoding="utf-8"), source)}
    for path, file in linked.items():
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, content=file.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the generated parts, rewrite links, and show why a code block is not run by the tests."""
    markdown = _NOT_RUN.sub(r"\1*Not run by the tests: \2.*{.not-run}\n", markdown)
    return fill(rewrite_links(markdown, _source(page.file), page.file.src_uri))


def on_post_build(config: MkDocsConfig) -> None:
    """Check every page for files that a browser would fetch from another host, and for fences shown as text.

    Raises:
        PluginError: a page has one of these.
    """
    for file in Path(config.site_dir).rglob("*.html"):
        page = file.read_text(encoding="utf-8")
        if fetched := _FETCHED.search(page):
            raise PluginError(f"{file} would fetch from another host: {fetched[0]}")
        if fence := _FENCE.search(page):
            raise PluginError(f"{file} shows the fence of a code block as text: {fence[0]}")


def _source(file: File) -> Path:
    """The source file of a page."""
    names = {path: name for name, path in ROOT_PAGES.items()}
    return ROOT / names[file.src_uri] if file.src_uri in names else ROOT / "docs" / file.src_uri
