"""The registry of document formats for :meth:`Generation.render` and the command line.

To add a format, write its file here and add a line to :data:`DOCUMENTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_engine.rendering import html, markdown, svg
from cocoa_engine.rendering.inputs import Answer


class Renderer(Protocol):
    """Renders answers to the same prompt as one document, with an optional title, such as the prompt."""

    def __call__(self, answers: Sequence[Answer], *, title: str | None = None) -> str: ...


DOCUMENTS: dict[str, Renderer] = {
    "html": html.document,
    "markdown": markdown.document,
    "svg": svg.document,
}


def render(answers: Sequence[Answer], format: str, *, title: str | None = None) -> str:
    """Render answers in one of the registered formats.

    Raises:
        ConfigError: the format is unknown.
    """
    if format not in DOCUMENTS:
        raise ConfigError(unknown([format], DOCUMENTS, what="format"))
    return DOCUMENTS[format](answers, title=title)
