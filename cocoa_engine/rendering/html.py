"""Answers as HTML: for notebooks, reports and the web. Nothing in it is fetched, and it holds no script.

Every span is shaded and underlined by its risk; pointing at it or tabbing to it shows its figures and what competed.
Text of a model is escaped, its control characters are shown, and its direction is its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files

from cocoa_engine.rendering.differences import Range, cut, differences
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.rendering.words import (
    REACHED,
    any_reached,
    edges,
    figures,
    kind_words,
    names,
    risk_words,
    safe,
    scale_words,
    summary_words,
    taken,
    visible,
)
from cocoa_engine.results import Generation
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


def document(generations: Sequence[Generation], *, title: str | None = None) -> str:
    """A whole page of :func:`fragment`."""
    return _PAGE.format(
        title=escape(title or "Where this answer may be wrong"), body=fragment(generations, title=title)
    )


def fragment(generations: Sequence[Generation], *, title: str | None = None) -> str:
    """One answer, or several side by side with their differences marked, as HTML that can stand in any page.

    Args:
        generations: at least one; levels of risk are on one scale for all.
        title: what to put above it, such as the question.
    """
    scale = RiskScale.of(span for one in generations for span in one.spans)
    several = len(generations) > 1
    differing = differences([one.text for one in generations])
    parts = ["<style>", _style(), "</style>"]
    if title is not None:
        parts.append(f'<p class="cocoa-prompt" dir="auto">{_text(title)}</p>')
    parts.append(f'<div class="cocoa-columns{" cocoa-many" if several else ""}">')
    for number, (one, name, ranges) in enumerate(zip(generations, names(generations), differing, strict=True)):
        parts.append('<div class="cocoa-answer">')
        if several:
            parts.append(f'<p class="cocoa-name">{_text(name)}</p>')
        parts += [_answer(one, ranges, scale, number), "</div>"]
    parts.append("</div>")
    if several and len({one.text for one in generations}) == 1:
        parts.append("<p><strong>The answers are the same.</strong></p>")
    parts.append(_about(generations, scale))
    return '<div class="cocoa-risk">' + "\n".join(parts) + "\n</div>"


@cache
def _style() -> str:
    """The style sheet, without its comments and indentation: a notebook keeps a copy with every answer."""
    css = files(__package__).joinpath("risk.css").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)).strip()


def _text(text: str) -> str:
    return escape(safe(text))


def _answer(generation: Generation, differing: Sequence[Range], scale: RiskScale, number: int) -> str:
    """The text, with the card of each span right after it."""
    # the same answer has the same names in every run, so that a saved notebook changes only if its answer does
    name = f"cocoa-{sha256(f'{number} {generation.model_dump_json()}'.encode()).hexdigest()[:10]}"
    parts = ['<div class="cocoa-text" dir="auto">']
    for place, span in enumerate(generation.spans, start=1):
        parts.append(_span(span, generation, differing, scale.level(span.risk), f"{name}-{place}"))
    parts.append("</div>")
    return "".join(parts)


def _span(span: Span, generation: Generation, differing: Sequence[Range], level: int, name: str) -> str:
    before, core, after = edges(span.text)
    if not core and not span.candidates and not span.reaches_max_risk:
        return _text(span.text)
    words = "".join(
        f'<span class="cocoa-differs">{_text(part)}</span>' if differs else _text(part)
        for part, differs in cut(core, span.start + len(before), differing)
    )
    # of what competed or reached max_risk and has no text, the style sheet draws a sign, which is not copied
    blank = "" if core else " cocoa-line" if "\n" in span.text else " cocoa-space" if span.text else " cocoa-end"
    reached = " cocoa-reached" if span.reaches_max_risk else ""
    if not core:
        before, after = "", span.text
    return (
        f'{_text(before)}<span class="cocoa-span cocoa-level-{level}{blank}{reached}" id="{name}" tabindex="0" '
        f'aria-describedby="{name}-card" style="anchor-name:--{name}">{words}</span>'
        f'<div class="cocoa-card" id="{name}-card" role="tooltip" dir="ltr" hidden style="position-anchor:--{name}">'
        f"{_card(span, generation, level)}</div>{_text(after)}"
    )


def _card(span: Span, generation: Generation, level: int) -> str:
    rows = "".join(
        f'<div title="{escape(meaning)}"><dt>{escape(name)}</dt><dd>{value}</dd></div>'
        for name, value, meaning in figures(span, generation.config)
    )
    reached = f"; {REACHED}" if span.reaches_max_risk else ""
    return (
        f'<p><bdi class="cocoa-quote">{escape(visible(span.text))}</bdi>: {kind_words(span)}; '
        f"risk level {level} of 0 to 3{reached}</p>"
        f'<dl class="cocoa-figures">{rows}</dl>{_candidates(span)}'
    )


def _candidates(span: Span) -> str:
    if not span.candidates:
        return ""
    rows = "".join(_candidate(one, index == span.chosen) for index, one in enumerate(span.candidates))
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("candidate", "log p", "ConMLDS", "fMLDS", "score", "taken")
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _candidate(candidate: Candidate, kept: bool) -> str:
    numbers = (
        f"{candidate.log_prob:.2f}",
        f"{candidate.con_mlds:.3f}",
        f"{candidate.f_mlds:.3f}",
        f"{candidate.score:.2f}",
        taken(candidate, kept),
    )
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    text = f'<th scope="row"><bdi class="cocoa-clip">{escape(visible(candidate.text))}</bdi></th>'
    return f'<tr class="cocoa-kept">{text}{cells}</tr>' if kept else f"<tr>{text}{cells}</tr>"


def _about(generations: Sequence[Generation], scale: RiskScale) -> str:
    """The legend, and what each answer is."""
    parts = ['<div class="cocoa-about">', f"<p>{escape(scale_words(generations, scale))}</p>"]
    signs = [
        f'<li>{level} <span class="cocoa-level-{level}">{one}</span></li>' for level, one in enumerate(scale.ranges)
    ]
    if any_reached(generations):
        signs.append(f'<li><span class="cocoa-reached">{REACHED}</span></li>')
    if signs:
        parts.append(f'<ul class="cocoa-legend">{"".join(signs)}</ul>')
    for one in generations:
        model = f" Model: {_text(one.model_name)}." if one.model_name else ""
        parts.append(f"<p>{_text(summary_words(one).removesuffix('.'))}; {risk_words(one)}.{model}</p>")
    if len(generations) > 1:
        parts.append('<p>Words that another answer lacks are <span class="cocoa-differs">marked</span>.</p>')
    parts.append("<p>Point at a part of the text, or tab to it, for its figures and what competed there.</p></div>")
    return "".join(parts)
