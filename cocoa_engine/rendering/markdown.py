"""Answers as Markdown, for issues, chats and logs. A model's own Markdown and HTML is shown as it was written."""

from __future__ import annotations

import re

from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.rendering.words import (
    REACHED,
    any_reached,
    before,
    edges,
    mark,
    risk_words,
    safe,
    scale_words,
    summary_words,
    taken,
    visible,
)
from cocoa_engine.results import Generation
from cocoa_engine.spans import Span

_MEANS = re.compile(r"([\\`*_\[\]<>#|~&$])")
_MEANS_FIRST = re.compile(r"^(\d*)([-+=:.)])")  # at the start of a line: a list, a heading's underline, a table


def to_markdown(generation: Generation) -> str:
    """The answer with its levels of risk written into it, a legend, and a table of what competed."""
    scale = RiskScale.of(generation.spans)
    marked = (_marked(span, mark(scale.level(span.risk), span.reaches_max_risk)) for span in generation.spans)
    parts = [_lines("".join(marked))]
    legend = _escaped(scale_words([generation], scale))
    levels = ", ".join(f"{level}: {one}" for level, one in enumerate(scale.ranges))
    reached = f"!: {REACHED}" if any_reached([generation]) else ""
    parts.append(" ".join(part for part in (legend, levels, reached) if part))
    risk_points = [span for span in generation.spans if span.candidates]
    if risk_points:
        rows = ["| after | candidate | log p | ConMLDS | fMLDS | score | taken |", "|---|---|--:|--:|--:|--:|---|"]
        parts.append("\n".join([*rows, *(row for span in risk_points for row in _rows(generation, span))]))
    parts.append(_escaped(f"{summary_words(generation).removesuffix('.')}; {risk_words(generation)}."))
    return "\n\n".join(part for part in parts if part) + "\n"


def _marked(span: Span, risk: str) -> str:
    leading, core, trailing = edges(safe(span.text))
    if span.reaches_max_risk and not core:
        return f"{leading}[{visible(span.text)}|{risk}]"
    return f"{leading}[{core}|{risk}]{trailing}" if risk and core else leading + core + trailing


def _escaped(text: str) -> str:
    return _MEANS_FIRST.sub(r"\1\\\2", _MEANS.sub(r"\\\1", text))


def _lines(text: str) -> str:
    """A text whose line ends and indentation Markdown keeps."""
    lines = []
    for line in text.strip("\n").split("\n"):
        words = line.lstrip(" \t")
        indent = line[: len(line) - len(words)].replace("\t", "    ")
        lines.append("&nbsp;" * len(indent) + _escaped(words.rstrip()))
    return re.sub(r"(?<!\n)\n(?!\n)", "\\\\\n", "\n".join(lines))


def _rows(generation: Generation, span: Span) -> list[str]:
    rows = []
    place = _escaped(before(generation.text, span.start)) or "at the start"
    for index, candidate in enumerate(span.candidates):
        figures = (
            f"{candidate.log_prob:.2f}",
            f"{candidate.con_mlds:.3f}",
            f"{candidate.f_mlds:.3f}",
            f"{candidate.score:.2f}",
        )
        cells = (
            place if index == 0 else "",
            _escaped(visible(candidate.text)),
            *figures,
            taken(candidate, index == span.chosen),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows
