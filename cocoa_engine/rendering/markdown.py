"""Answers as Markdown, for issues, chats and logs. Markdown and HTML that the model wrote is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cocoa_engine.rendering.inputs import Answer
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.rendering.wording import (
    CANDIDATE_COLUMNS,
    REACHED,
    answer_names,
    any_reached,
    candidate_values,
    describe_answer,
    describe_choice,
    describe_risk,
    describe_scale,
    mark,
    split_whitespace,
    visible,
    words_before,
)
from cocoa_engine.safe_text import safe
from cocoa_engine.spans import Span

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$])")
_SPECIAL_AT_START = re.compile(r"^(\d*)([-+=:.)])")  # at the start of a line: a list, a heading's underline, a table


def document(answers: Sequence[Answer], *, title: str | None = None) -> str:
    """Answers one below the other, under an optional title; more than one answer get their names as headings."""
    heading = [f"# {_escaped(' '.join(safe(title).split()))}"] if title is not None else []
    if len(answers) == 1:
        return "\n\n".join([*heading, to_markdown(answers[0])])
    sections = (
        f"## {_escaped(name)}\n\n{to_markdown(one)}" for one, name in zip(answers, answer_names(answers), strict=True)
    )
    return "\n\n".join([*heading, *sections])


def to_markdown(answer: Answer) -> str:
    """One answer with the level of risk written after each span, a legend, and a table of the risk points."""
    scale = RiskScale.of(answer.spans)
    marked = (_marked(span, mark(scale.level(span.risk), span.reaches_max_risk)) for span in answer.spans)
    parts = [_lines("".join(marked))]
    legend = _escaped(describe_scale([answer], scale))
    levels = ", ".join(f"{level}: {one}" for level, one in enumerate(scale.ranges))
    reached = f"!: {REACHED}" if any_reached([answer]) else ""
    parts.append(" ".join(part for part in (legend, levels, reached) if part))
    risk_points = [span for span in answer.spans if span.candidates]
    if risk_points:
        rows = [f"| after | candidate | {' | '.join(CANDIDATE_COLUMNS)} | taken |", "|---|---|--:|--:|--:|--:|---|"]
        parts.append("\n".join([*rows, *(row for span in risk_points for row in _rows(answer, span))]))
    parts.append(_escaped(f"{describe_answer(answer).removesuffix('.')}; {describe_risk(answer)}."))
    return "\n\n".join(part for part in parts if part) + "\n"


def _marked(span: Span, risk: str) -> str:
    leading, core, trailing = split_whitespace(safe(span.text))
    if span.reaches_max_risk and not core:
        return f"{leading}[{visible(span.text)}|{risk}]"
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
