"""Renderings as files: Markdown, SVG, and the choice among formats."""

import io
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence

from cocoa_engine.errors import ConfigError, safe, unknown
from cocoa_engine.rendering import html, wording
from cocoa_engine.rendering.highlights import MOST_SHADED, Answer, RiskScale, marked, pieces

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$])")
_SPECIAL_AT_START = re.compile(r"^(\d*)([-+=:.)])")  # at the start of a line: a list, a heading's underline, a table


def markdown_document(answers: Sequence[Answer], *, title: str | None = None) -> str:
    """Answers one below the other, under an optional title; more than one answer get their names as headings."""
    parts = [] if title is None else [f"# {_escaped(wording.one_line(title))}"]
    for answer, name in zip(answers, wording.answer_names(answers), strict=True):
        parts += [f"## {_escaped(name)}"] if len(answers) > 1 else []
        parts.append(to_markdown(answer))
    if (kinds := wording.describe_different_kinds(answers)) is not None:
        parts.append(_escaped(kinds) + "\n")
    return "\n\n".join(parts)


def to_markdown(answer: Answer) -> str:
    """One answer: a verdict, the text with the level of risk after its riskiest claims, and the claims to check.

    Everything else is folded: the risk of the sentences, the legend, a table of the risk points, the cost.
    """
    scale = RiskScale.of(answer.spans)
    checks = answer.check_these(MOST_SHADED)
    listed = [f"{number}. {_escaped(wording.describe_check(check))}" for number, check in enumerate(checks, start=1)]
    legend = [
        _escaped(wording.describe_scale([answer], scale)),
        ", ".join(f"{level}: {bounds}" for level, bounds in enumerate(scale.ranges)),
        f"!: {wording.REACHED}" if wording.any_reached([answer]) else "",
    ]
    sentences = ["| sentence | risk |", "|---|--:|"]
    for sentence in answer.sentences:
        sentences.append(f"| {_escaped(wording.one_line(sentence.text))} | {wording.risk_text(sentence)} |")
    columns = " | ".join(wording.CANDIDATE_COLUMNS)
    points = [f"| after | candidate | {columns} |", "|---|---|--:|--:|--:|--:|---|"]
    for span in answer.spans:
        after = _escaped(wording.words_before(answer.text, span.start)) or "at the start"
        for _, text, values in wording.candidate_rows(span):
            points.append(f"| {after} | {_escaped(text)} | {' | '.join(values)} |")
            after = ""
    parts = [
        f"**{_escaped(wording.verdict(answer))}**",
        _lines(marked(pieces(answer, checks, scale))),
        "\n".join([wording.CHECK_THESE, "", *listed]) if listed else wording.nothing_listed(answer),
        "<details><summary>Details</summary>",
        " ".join(filter(None, legend)),
        *("\n".join(rows) for rows in (sentences, points) if len(rows) > 2),
        _escaped(wording.summary(answer)),
        "</details>",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


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


WIDTH = 92  # of the picture, in text columns


def svg_document(answers: Sequence[Answer], *, title: str | None = None, table: bool = False) -> str:
    """A picture of a terminal that shows :func:`~cocoa_engine.rendering.terminal.report`."""
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


DOCUMENTS: dict[str, Callable[..., str]] = {
    "html": html.document,
    "markdown": markdown_document,
    "svg": svg_document,
}
"""Functions that render answers to the same prompt as one document, with an optional ``title``, by format."""


def render(answers: Sequence[Answer], format: str, *, title: str | None = None) -> str:
    """Render answers in one of the registered formats."""
    if format not in DOCUMENTS:
        raise ConfigError(unknown([format], DOCUMENTS, what="format"))
    return DOCUMENTS[format](answers, title=title)
