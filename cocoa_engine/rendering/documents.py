"""Renderings as files: Markdown, SVG, and the choice among formats."""

from __future__ import annotations

import io
import re
import shlex
import textwrap
from collections.abc import Sequence
from typing import Protocol

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_engine.rendering import html
from cocoa_engine.rendering.highlights import MOST_SHADED, Piece, RiskScale, pieces, stopped_without_text
from cocoa_engine.rendering.inputs import Answer
from cocoa_engine.rendering.wording import (
    CANDIDATE_COLUMNS,
    CHECK_THESE,
    NOTHING,
    REACHED,
    answer_names,
    any_reached,
    candidate_values,
    describe_answer,
    describe_check,
    describe_choice,
    describe_different_kinds,
    describe_risk,
    describe_scale,
    mark,
    split_whitespace,
    verdict,
    visible,
    words_before,
)
from cocoa_engine.safe_text import safe
from cocoa_engine.spans import RAW, Span

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$])")
_SPECIAL_AT_START = re.compile(r"^(\d*)([-+=:.)])")  # at the start of a line: a list, a heading's underline, a table


def markdown_document(answers: Sequence[Answer], *, title: str | None = None) -> str:
    """Answers one below the other, under an optional title; more than one answer get their names as headings."""
    heading = [f"# {_escaped(' '.join(safe(title).split()))}"] if title is not None else []
    if len(answers) == 1:
        return "\n\n".join([*heading, to_markdown(answers[0])])
    sections = (
        f"## {_escaped(name)}\n\n{to_markdown(one)}" for one, name in zip(answers, answer_names(answers), strict=True)
    )
    kinds = describe_different_kinds(answers)
    return "\n\n".join([*heading, *sections, *([] if kinds is None else [_escaped(kinds) + "\n"])])


def to_markdown(answer: Answer) -> str:
    """One answer: a verdict, the text with the level of risk after its riskiest claims, and the claims to check.

    Everything else is folded: the risk of the sentences, the legend, a table of the risk points, the cost.
    """
    scale = RiskScale.of(answer.spans)
    checks = answer.check_these(MOST_SHADED)
    marked = "".join(_marked(piece) for piece in pieces(answer, checks, scale))
    if (stopped := stopped_without_text(answer)) is not None:
        marked += f"[{visible(stopped)}|0!]"
    parts = [f"**{_escaped(verdict(answer))}**", _lines(marked)]
    listed = [f"{number}. {_escaped(describe_check(one))}" for number, one in enumerate(checks, start=1)]
    nothing = "" if answer.risk_source in RAW else NOTHING
    parts.append("\n".join([CHECK_THESE, "", *listed]) if listed else nothing)
    parts += ["<details><summary>Details</summary>", *_details(answer, scale), "</details>"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _details(answer: Answer, scale: RiskScale) -> list[str]:
    legend = _escaped(describe_scale([answer], scale))
    levels = ", ".join(f"{level}: {one}" for level, one in enumerate(scale.ranges))
    reached = f"!: {REACHED}" if any_reached([answer]) else ""
    parts = [" ".join(part for part in (legend, levels, reached) if part)]
    if answer.sentences:
        rows = ["| sentence | risk |", "|---|--:|"]
        for one in answer.sentences:
            risk = "–" if one.risk is None else f"{one.risk:.2f}"
            rows.append(f"| {_escaped(safe(' '.join(one.text.split())))} | {risk} |")
        parts.append("\n".join(rows))
    risk_points = [span for span in answer.spans if span.candidates]
    if risk_points:
        rows = [f"| after | candidate | {' | '.join(CANDIDATE_COLUMNS)} | taken |", "|---|---|--:|--:|--:|--:|---|"]
        parts.append("\n".join([*rows, *(row for span in risk_points for row in _rows(answer, span))]))
    parts.append(_escaped(f"{describe_answer(answer).removesuffix('.')}; {describe_risk(answer)}."))
    return parts


def _marked(one: Piece) -> str:
    leading, core, trailing = split_whitespace(safe(one.text))
    risk = mark(one.level, one.reached)
    return f"{leading}[{core}|{risk}]{trailing}" if risk and core else leading + core + trailing


def _escaped(text: str) -> str:
    return _SPECIAL_AT_START.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", text))


def _lines(text: str) -> str:
    """A text as Markdown that keeps its line ends and indentation."""
    lines = []
    for line in text.strip("\n").split("\n"):
        words = line.lstrip(" \t")
        indent = line[: len(line) - len(words)].replace("\t", "    ")
        lines.append("&nbsp;" * len(indent) + _escaped(words.rstrip()))
    return re.sub(r"(?<!\n)\n(?!\n)", "\\\\\n", "\n".join(lines))


def _rows(answer: Answer, span: Span) -> list[str]:
    rows = []
    after = _escaped(words_before(answer.text, span.start)) or "at the start"
    for index, candidate in enumerate(span.candidates):
        cells = (
            after if index == 0 else "",
            _escaped(visible(candidate.text)),
            *candidate_values(candidate),
            describe_choice(candidate, index == span.chosen),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


WIDTH = 92
"""The width of the picture, in text columns."""


def svg_document(answers: Sequence[Answer], *, title: str | None = None, table: bool = False) -> str:
    """A picture of a terminal that shows :func:`~cocoa_engine.rendering.terminal.report`.

    Args:
        answers: at least one; several are shown side by side.
        title: the prompt, for the window's title bar.
        table: add every candidate of every risk point.
    """
    from rich.console import Console  # an import of its own: documents of text do not need it

    from cocoa_engine.rendering.terminal import report

    console = Console(
        file=io.StringIO(),
        record=True,
        width=WIDTH,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(report(answers, table=table))
    command = "cocoa ask" if title is None else f"cocoa ask {shlex.quote(safe(title))}"
    picture = console.export_svg(title=textwrap.shorten(command, WIDTH - 10, placeholder=" …"))
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


class Renderer(Protocol):
    """Renders answers to the same prompt as one document, with an optional title, such as the prompt."""

    def __call__(self, answers: Sequence[Answer], *, title: str | None = None) -> str: ...


DOCUMENTS: dict[str, Renderer] = {
    "html": html.document,
    "markdown": markdown_document,
    "svg": svg_document,
}


def render(answers: Sequence[Answer], format: str, *, title: str | None = None) -> str:
    """Render answers in one of the registered formats.

    Raises:
        ConfigError: the format is unknown.
    """
    if format not in DOCUMENTS:
        raise ConfigError(unknown([format], DOCUMENTS, what="format"))
    return DOCUMENTS[format](answers, title=title)
