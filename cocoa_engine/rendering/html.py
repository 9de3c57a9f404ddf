"""Answers as HTML, for notebooks, reports and the web. The HTML has no script and fetches nothing.

Every span is shaded and underlined by its risk. Hovering over a span, or focusing it with Tab, shows its scores and the
candidates that competed. Text from the model is escaped, its control characters are made visible, and its writing
direction is isolated from the page's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files

from cocoa_engine.rendering.differences import Range, cut, differences
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
    describe_kind,
    describe_risk,
    describe_scale,
    split_whitespace,
    statistics,
    visible,
)
from cocoa_engine.safe_text import safe
from cocoa_engine.spans import Candidate, Span

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


def document(answers: Sequence[Answer], *, title: str | None = None) -> str:
    """A complete page with :func:`fragment` as its body."""
    return _PAGE.format(title=escape(title or "Where this answer may be wrong"), body=fragment(answers, title=title))


def fragment(answers: Sequence[Answer], *, title: str | None = None) -> str:
    """One answer, or several side by side with their differences marked, as HTML that can be put into any page.

    Args:
        answers: at least one. All of them share one scale of risk.
        title: a heading, such as the question.
    """
    scale = RiskScale.of(span for one in answers for span in one.spans)
    several = len(answers) > 1
    differing = differences([one.text for one in answers])
    parts = ["<style>", _style(), "</style>"]
    if title is not None:
        parts.append(f'<p class="cocoa-prompt" dir="auto">{_text(title)}</p>')
    parts.append(f'<div class="cocoa-columns{" cocoa-many" if several else ""}">')
    for number, (one, name, ranges) in enumerate(zip(answers, answer_names(answers), differing, strict=True)):
        parts.append('<div class="cocoa-answer">')
        if several:
            parts.append(f'<p class="cocoa-name">{_text(name)}</p>')
        parts += [_answer(one, ranges, scale, number), "</div>"]
    parts.append("</div>")
    if several and len({one.text for one in answers}) == 1:
        parts.append("<p><strong>The answers are the same.</strong></p>")
    parts.append(_about(answers, scale))
    return '<div class="cocoa-risk">' + "\n".join(parts) + "\n</div>"


@cache
def _style() -> str:
    """The style sheet without comments and indentation, since a notebook stores a copy with every answer."""
    css = files(__package__).joinpath("risk.css").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)).strip()


def _text(text: str) -> str:
    return escape(safe(text))


def _answer(answer: Answer, differing: Sequence[Range], scale: RiskScale, number: int) -> str:
    """The text, each span followed by its card."""
    # ids are derived from the answer, so that a saved notebook changes only if its answer does
    name = f"cocoa-{sha256(f'{number} {answer.model_dump_json()}'.encode()).hexdigest()[:10]}"
    parts = ['<div class="cocoa-text" dir="auto">']
    for number_of_span, span in enumerate(answer.spans, start=1):
        parts.append(_span(span, answer, differing, scale.level(span.risk), f"{name}-{number_of_span}"))
    parts.append("</div>")
    return "".join(parts)


def _span(span: Span, answer: Answer, differing: Sequence[Range], level: int, name: str) -> str:
    before, core, after = split_whitespace(span.text)
    if not core and not span.candidates and not span.reaches_max_risk:
        return _text(span.text)
    words = "".join(
        f'<span class="cocoa-differs">{_text(part)}</span>' if differs else _text(part)
        for part, differs in cut(core, span.start + len(before), differing)
    )
    # a span that competed or reached max_risk but has no visible text gets a sign from the style sheet, so that
    # copying the answer does not copy the sign
    blank = "" if core else " cocoa-line" if "\n" in span.text else " cocoa-space" if span.text else " cocoa-end"
    reached = " cocoa-reached" if span.reaches_max_risk else ""
    if not core:
        before, after = "", span.text
    return (
        f'{_text(before)}<span class="cocoa-span cocoa-level-{level}{blank}{reached}" id="{name}" tabindex="0" '
        f'aria-describedby="{name}-card" style="anchor-name:--{name}">{words}</span>'
        f'<div class="cocoa-card" id="{name}-card" role="tooltip" dir="ltr" hidden style="position-anchor:--{name}">'
        f"{_card(span, answer, level)}</div>{_text(after)}"
    )


def _card(span: Span, answer: Answer, level: int) -> str:
    rows = "".join(
        f'<div title="{escape(meaning)}"><dt>{escape(name)}</dt><dd>{value}</dd></div>'
        for name, value, meaning in statistics(span, answer.config)
    )
    reached = f"; {REACHED}" if span.reaches_max_risk else ""
    return (
        f'<p><bdi class="cocoa-quote">{escape(visible(span.text))}</bdi>: {describe_kind(span)}; '
        f"risk level {level} of 0 to 3{reached}</p>"
        f'<dl class="cocoa-figures">{rows}</dl>{_candidates(span)}'
    )


def _candidates(span: Span) -> str:
    if not span.candidates:
        return ""
    rows = "".join(_candidate(one, index == span.chosen) for index, one in enumerate(span.candidates))
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("candidate", *CANDIDATE_COLUMNS, "taken"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _candidate(candidate: Candidate, kept: bool) -> str:
    values = (*candidate_values(candidate), describe_choice(candidate, kept))
    cells = "".join(f"<td>{value}</td>" for value in values)
    text = f'<th scope="row"><bdi class="cocoa-clip">{escape(visible(candidate.text))}</bdi></th>'
    return f'<tr class="cocoa-kept">{text}{cells}</tr>' if kept else f"<tr>{text}{cells}</tr>"


def _about(answers: Sequence[Answer], scale: RiskScale) -> str:
    """The legend, and a summary of each answer."""
    parts = ['<div class="cocoa-about">', f"<p>{escape(describe_scale(answers, scale))}</p>"]
    signs = [
        f'<li>{level} <span class="cocoa-level-{level}">{one}</span></li>' for level, one in enumerate(scale.ranges)
    ]
    if any_reached(answers):
        signs.append(f'<li><span class="cocoa-reached">{REACHED}</span></li>')
    if signs:
        parts.append(f'<ul class="cocoa-legend">{"".join(signs)}</ul>')
    for one in answers:
        model = f" Model: {_text(one.model_name)}." if one.model_name else ""
        parts.append(f"<p>{_text(describe_answer(one).removesuffix('.'))}; {describe_risk(one)}.{model}</p>")
    if len(answers) > 1:
        parts.append('<p>Words that another answer lacks are <span class="cocoa-differs">marked</span>.</p>')
    parts.append(
        "<p>Hover over a span, or focus it with Tab, to see its scores and the candidates it competed with.</p></div>"
    )
    return "".join(parts)
