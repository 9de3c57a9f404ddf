"""Renderings as files: HTML, Markdown, SVG, and the choice among formats."""

import io
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files

from cocoa_engine.errors import ConfigError, safe, unknown
from cocoa_engine.rendering import wording
from cocoa_engine.rendering.highlights import (
    MOST_SHADED,
    Answer,
    Piece,
    Range,
    RiskScale,
    differences,
    marked,
    pieces,
    split_whitespace,
    visible,
)
from cocoa_engine.risk import Check, Unit
from cocoa_engine.spans import Span

_PAGE = """<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>body {{ margin: 1.5em auto; padding: 0 1em; max-width: 72em; }} .cocoa-risk {{ margin: 0 auto; }}</style>
</head>
<body>
{body}
</body>
</html>
"""


def html_document(answers: Sequence[Answer], *, title: str | None = None) -> str:
    """A complete page with :func:`fragment` as its body."""
    return _PAGE.format(title=_text(title or "Where this answer may be wrong"), body=fragment(answers, title=title))


def fragment(answers: Sequence[Answer], *, title: str | None = None) -> str:
    """One answer, or several side by side with their differences marked, as HTML that can be put into any page.

    The verdict comes first, then the text with its riskiest claims shaded, then the claims to check. Everything else is
    folded under "Details".
    """
    several = len(answers) > 1
    differing = differences([answer.text for answer in answers])
    parts = ["<style>", style_sheet(), "</style>"]
    if title is not None:
        parts.append(f'<p class="cocoa-prompt" dir="auto">{_text(title)}</p>')
    parts.append(f'<div class="cocoa-columns{" cocoa-many" if several else ""}">')
    names = wording.answer_names(answers)
    for number, (answer, name, ranges) in enumerate(zip(answers, names, differing, strict=True)):
        parts.append('<div class="cocoa-answer">')
        if several:
            parts.append(f'<p class="cocoa-name">{_text(name)}</p>')
        parts += [_answer(answer, ranges, number), "</div>"]
    parts.append("</div>")
    if several:
        parts.append('<p>Words that another answer lacks are <span class="cocoa-differs">marked</span>.</p>')
        if len({answer.text for answer in answers}) == 1:
            parts.append("<p><strong>The answers are the same.</strong></p>")
        if (kinds := wording.describe_different_kinds(answers)) is not None:
            parts.append(f"<p>{_text(kinds)}</p>")
    return '<div class="cocoa-risk">' + "\n".join(parts) + "\n</div>"


@cache
def style_sheet() -> str:
    """The style sheet without comments and indentation, since a notebook stores a copy with every answer."""
    css = files(__package__).joinpath("risk.css").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)).strip()


def _text(text: str) -> str:
    return escape(safe(text))


def _answer(answer: Answer, differing: Sequence[Range], number: int) -> str:
    # ids are derived from the answer, so that a saved notebook changes only if its answer does
    name = f"cocoa-{sha256(f'{number} {answer.model_dump_json()}'.encode()).hexdigest()[:10]}"
    scale = RiskScale.of(answer.spans)
    checks = answer.check_these(MOST_SHADED)
    shaded = (_piece(piece, answer, checks, name) for piece in pieces(answer, checks, scale, differing))
    parts = [
        f'<p class="cocoa-verdict">{_text(wording.verdict(answer))}</p>',
        f'<div class="cocoa-text" dir="auto">{"".join(shaded)}</div>',
    ]
    if checks:
        listed = "".join(f"<li><bdi>{_text(wording.describe_check(check))}</bdi></li>" for check in checks)
        parts.append(f'<p class="cocoa-heading">{wording.CHECK_THESE}</p><ol class="cocoa-check">{listed}</ol>')
    elif nothing := wording.nothing_listed(answer):
        parts.append(f"<p>{nothing}</p>")
    if len(sentences := answer.sentences) > 1:
        parts.append(_bars(sentences, scale))
    spans = (_span(span, scale.level(span.risk), f"{name}-{at}") for at, span in enumerate(answer.spans, 1))
    signs = [f'{level} <span class="cocoa-level-{level}">{text}</span>' for level, text in enumerate(scale.ranges)]
    if wording.any_reached([answer]):
        signs.append(f'<span class="cocoa-reached">{wording.REACHED}</span>')
    legend = "".join(f"<li>{sign}</li>" for sign in signs)
    model = f" Model: {_text(answer.model_name)}." if answer.model_name else ""
    parts.append(
        "<details><summary>Details</summary>"
        "<p>Every span: hover over it, or focus it with Tab, to see its scores and what it competed with.</p>"
        f'<div class="cocoa-text" dir="auto">{"".join(spans)}</div>'
        f'<div class="cocoa-about"><p>{escape(wording.describe_scale([answer], scale))}</p>'
        + (f'<ul class="cocoa-legend">{legend}</ul>' if legend else "")
        + f"<p>{_text(wording.summary(answer))}{model}</p></div></details>"
    )
    return "".join(parts)


def _piece(piece: Piece, answer: Answer, checks: Sequence[Check], name: str) -> str:
    """A part of the text. The last piece of a shaded claim is followed by the claim's card."""
    words = f'<span class="cocoa-differs">{_text(piece.text)}</span>' if piece.differs else _text(piece.text)
    if piece.reached and not piece.text.strip():
        return f'{words}<span class="cocoa-reached {_sign(piece.text)}"></span>'
    reached = " cocoa-reached" if piece.reached else ""
    if piece.number is None:
        return f'<span class="{reached.strip()}">{words}</span>' if reached else words
    begins = f"{name}-check-{piece.number + 1}"
    focus = f' id="{begins}" tabindex="0" aria-describedby="{begins}-card"' if piece.first else ""
    style = f'class="cocoa-span cocoa-level-{piece.level}{reached}" style="anchor-name:--{begins}"'
    drawn = f"<span {style}{focus}>{words}</span>"
    if not piece.last:
        return drawn
    check = checks[piece.number]
    why = wording.describe_check(check).partition(check.text)[2]
    others = "".join(f"<li><bdi>{_text(other)}</bdi></li>" for other in check.competing)
    competed = f"<p>Other candidates say:</p><ul>{others}</ul>" if others else ""
    return (
        f'{drawn}<div class="cocoa-card" id="{begins}-card" role="tooltip" dir="ltr" hidden '
        f'style="position-anchor:--{begins}"><p><bdi class="cocoa-quote">{escape(visible(check.text))}</bdi>: '
        f"{escape(why.strip(' :') or 'no reason')}</p>{competed}</div>"
    )


def _sign(text: str) -> str:
    """The class of the sign that stands for a span without visible text."""
    return "cocoa-line" if "\n" in text else "cocoa-space" if text else "cocoa-end"


def _bars(sentences: Sequence[Unit], scale: RiskScale) -> str:
    rows = []
    for sentence in sentences:
        width = 0 if sentence.risk is None or not scale.absolute else round(100 * min(max(sentence.risk, 0.0), 1.0))
        rows.append(
            f'<li tabindex="0"><span class="cocoa-bar"><span class="cocoa-level-{scale.level(sentence.risk)}" '
            f'style="width:{width}%"></span></span> <span class="cocoa-number">{wording.risk_text(sentence)}</span> '
            f'<bdi class="cocoa-words">{escape(wording.one_line(sentence.text))}</bdi></li>'
        )
    return f'<p class="cocoa-heading">Sentences:</p><ol class="cocoa-bars">{"".join(rows)}</ol>'


def _span(span: Span, level: int, name: str) -> str:
    before, core, after = split_whitespace(span.text)
    if not core and not span.candidates and not span.reaches_max_risk:
        return _text(span.text)
    # the sign is from the style sheet, so that copying the answer does not copy it
    blank = "" if core else f" {_sign(span.text)}"
    reached = " cocoa-reached" if span.reaches_max_risk else ""
    if not core:
        before, after = "", span.text
    return (
        f'{_text(before)}<span class="cocoa-span cocoa-level-{level}{blank}{reached}" id="{name}" tabindex="0" '
        f'aria-describedby="{name}-card" style="anchor-name:--{name}">{_text(core)}</span>'
        f'<div class="cocoa-card" id="{name}-card" role="tooltip" dir="ltr" hidden style="position-anchor:--{name}">'
        f"{_card(span, level)}</div>{_text(after)}"
    )


def _card(span: Span, level: int) -> str:
    figures = "".join(
        f'<div title="{escape(meaning)}"><dt>{escape(name)}</dt><dd>{value}</dd></div>'
        for name, value, meaning in wording.statistics(span)
    )
    kind = "a text scored as given" if span.kind == "given" else "no other token competed"
    if span.candidates:
        kind = f"chosen from {wording.count(len(span.candidates), 'competing candidate')}"
    reached = f"; {wording.REACHED}" if span.reaches_max_risk else ""
    rows = []
    for is_chosen, text, values in wording.candidate_rows(span):
        cells = "".join(f"<td>{value}</td>" for value in values)
        name = f'<th scope="row"><bdi class="cocoa-clip">{escape(text)}</bdi></th>'
        rows.append(f'<tr class="cocoa-kept">{name}{cells}</tr>' if is_chosen else f"<tr>{name}{cells}</tr>")
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("candidate", *wording.CANDIDATE_COLUMNS))
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""
    return (
        f'<p><bdi class="cocoa-quote">{escape(visible(span.text))}</bdi>: {kind}; '
        f"risk level {level} of 0 to 3{reached}</p>"
        f'<dl class="cocoa-values">{figures}</dl>{table}'
    )


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
    "html": html_document,
    "markdown": markdown_document,
    "svg": svg_document,
}
"""Functions that render answers to the same prompt as one document, with an optional ``title``, by format."""


def render(answers: Sequence[Answer], format: str, *, title: str | None = None) -> str:
    """Render answers in one of the registered formats."""
    if format not in DOCUMENTS:
        raise ConfigError(unknown([format], DOCUMENTS, what="format"))
    return DOCUMENTS[format](answers, title=title)
