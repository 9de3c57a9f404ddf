"""The report of the text that a response shows, assembled from the reports of the answers in it.

A response may show one answer, a part of one, or several with text between them, as ``response_mode="accumulate"``
does. The offsets of the assembled report refer to the shown text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cocoa_integrations._shared.finite import finite, is_unmeasured, severity
from cocoa_integrations._shared.metadata import is_reasoning, report_of
from cocoa_integrations._shared.units import measured_text, unit_list

EMPTY = "Empty Response"
"""What LlamaIndex's synthesizers show instead of an empty answer."""

MOST_CHECKS = 3
"""The number of claims to check that a report lists."""

SEPARATOR = "\n---------------------\n"
"""What LlamaIndex's ``Accumulate`` puts between answers."""


@dataclass(frozen=True)
class Part:
    """A stretch of the shown text that an answer wrote.

    Attributes:
        answer: the index of the answer.
        start: offset of the first character in the shown text.
        end: offset after the last one.
        spans: the answer's spans in this stretch: their number in the answer, and their entry of ``cocoa_spans`` with
            offsets in the shown text.
    """

    answer: int
    start: int
    end: int
    spans: list[tuple[int, dict[str, Any]]]


def text_of(report: dict[str, Any]) -> str:
    """The text that an answer generated."""
    return "".join(span["text"] for span in report["spans"])


def parts_of(
    shown: str, reports: Sequence[dict[str, Any]], requests: Sequence[int], begins: Sequence[int]
) -> list[Part] | None:
    """The parts of a shown text that answers wrote, in the order of the text.

    The answer that is the whole text is taken, or else all answers that the text contains, or else the answer that
    contains the text. White space at the ends of an answer may be missing from the text.

    Args:
        shown: the text of the response.
        reports: the reports of the answers, in order of completion.
        requests: for each answer, when it was requested. Of equal answers, the one requested first is placed first.
        begins: for each answer, the offset in its generated text at which it begins, after any reasoning.

    Returns:
        The parts, or ``None`` if it cannot be known which answers wrote which part of the text.
    """
    answers = [text_of(report)[begin:] for report, begin in zip(reports, begins, strict=True)]

    def part(number: int, shown_range: tuple[int, int]) -> Part:
        begin = begins[number]
        return _part(
            shown, reports[number], number, shown_range, (begin, begin + len(answers[number])) if begin else None
        )

    for number in reversed(range(len(answers))):
        if answers[number].strip() == shown.strip() or (shown == EMPTY and not answers[number]):
            whole = (0, len(shown) if answers[number] else 0)
            return [part(number, whole)]
    by_request = sorted(range(len(answers)), key=requests.__getitem__)
    ranges = _accumulated(shown, answers, by_request) or _contained(shown, answers, by_request)
    if ranges is None:
        return None
    if not ranges:
        return _container(shown, reports, answers, begins)
    return [part(number, shown_range) for number, shown_range in sorted(ranges.items(), key=_start)]


def merged_report(parts: Sequence[Part], reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The report of a shown text. ``answer_risk`` and ``run_id`` are those of its only answer; several have neither."""
    entries = [entry for part in parts for _, entry in part.spans]
    for number, entry in enumerate(entries):
        entry["span"] = number
    used = [reports[part.answer] for part in parts]
    methods = {report["method"] for report in used}
    names = {report.get("model_name") for report in used}
    report = report_of(
        entries,
        method=methods.pop() if len(methods) == 1 else None,
        risk_source=_common(used, "risk_source"),
        threshold=_common(used, "threshold"),
        answer_risk=used[0]["answer_risk"] if len(used) == 1 else None,
        answer_threshold=used[0].get("answer_threshold") if len(used) == 1 else None,
        model_name=names.pop() if len(names) == 1 else None,
    )
    if (heads := _common(used, "source_heads")) is not None:
        report["source_heads"] = heads
    if any(each.get("out_of_domain") for each in used):
        report["out_of_domain"] = True
    if len(used) == 1 and "run_id" in used[0]:
        report["run_id"] = used[0]["run_id"]
    if reasoned := [each["reasoning"] for each in used if "reasoning" in each]:
        report["reasoning"] = _all_reasoning(reasoned)
    report |= {"check": _checks(parts, reports), **_units(parts)}
    report["parts"] = [{"start": part.start, "end": part.end, "report": part.answer} for part in parts]
    return report


def _common(reports: Sequence[dict[str, Any]], key: str) -> Any:
    """The value that all reports with spans have in common; ``None`` if they differ."""
    values = {report.get(key) for report in reports if report["spans"]}
    return values.pop() if len(values) == 1 else None


def _checks(parts: Sequence[Part], reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims to check of all answers that the text shows, riskiest first, with offsets in it."""
    found = []
    for part in parts:
        shown = dict(part.spans)
        text = "".join(entry["text"] for entry in shown.values())
        for one in reports[part.answer].get("check", ()):
            numbers = one.get("spans", ())
            if not numbers or any(number not in shown for number in numbers):
                continue
            # white space of the answer may be missing from the shown text
            moved = shown[numbers[0]]["end"] - reports[part.answer]["spans"][numbers[0]]["end"]
            start, end = one["start"] + moved, one["end"] + moved
            begin = next(iter(shown.values()))["start"]
            if text[start - begin : end - begin] == one["text"]:
                here = [shown[number]["span"] for number in numbers]
                found.append({**one, "start": start, "end": end, "spans": here})
    return sorted(found, key=lambda one: -severity(one["risk"]))[:MOST_CHECKS]


def _units(parts: Sequence[Part]) -> dict[str, list[dict[str, Any]]]:
    """The claims and sentences of all answers that the text shows."""
    found: dict[str, list[dict[str, Any]]] = {"claims": [], "sentences": []}
    for part in parts:
        text = measured_text([entry for _, entry in part.spans if not is_reasoning(entry)], _risk)
        if text is not None:
            found["claims"] += unit_list(text.claims)
            found["sentences"] += unit_list(text.sentences)
    return found


def _risk(span: dict[str, Any]) -> float | None:
    return None if is_unmeasured(span) else severity(span["risk"])


def _all_reasoning(reasoned: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The risk of the reasoning of several answers. Its spans are not part of the shown text."""
    counts = [len(one["spans"]) for one in reasoned]
    total = sum(severity(one["mean_risk"]) * count for one, count in zip(reasoned, counts, strict=True) if count)
    return {
        "max_risk": finite(max(severity(one["max_risk"]) for one in reasoned)),
        "mean_risk": finite(total / sum(counts)) if sum(counts) else 0.0,
        "risk_points": sum(one["risk_points"] for one in reasoned),
        "spans": [],
    }


def _start(item: tuple[int, tuple[int, int]]) -> tuple[int, int]:
    return item[1]


def _accumulated(shown: str, answers: Sequence[str], by_request: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The ranges of the answers in a text of ``Accumulate``; empty if the text is not one."""
    ranges: dict[int, tuple[int, int]] = {}
    waiting = sorted(by_request, key=lambda number: -len(answers[number]))  # stable: equal answers in order of request
    position = 0
    while True:
        heading = f"{SEPARATOR if ranges else ''}Response {len(ranges) + 1}: "
        if not shown.startswith(heading, position):
            return {}
        position += len(heading)
        following = f"{SEPARATOR}Response {len(ranges) + 2}: "
        for number in waiting:
            text = answers[number] or EMPTY
            end = position + len(text)
            if shown.startswith(text, position) and (end == len(shown) or shown.startswith(following, end)):
                break
        else:
            return {}
        ranges[number] = (position, position + len(answers[number]))
        waiting.remove(number)
        position = end
        if end == len(shown):
            return ranges


def _contained(shown: str, answers: Sequence[str], by_request: Sequence[int]) -> dict[int, tuple[int, int]] | None:
    """The ranges of the answers that a text contains; ``None`` if it contains one more often than it was given."""
    ranges: dict[int, tuple[int, int]] = {}
    free = shown
    for text in sorted({answer.strip() for answer in answers} - {""}, key=len, reverse=True):
        found = list(_occurrences(free, text))
        same = [number for number in by_request if answers[number].strip() == text]
        if len(found) > len(same):
            return None
        for number, start in zip(same[-len(found) :] if found else (), found, strict=True):  # the last ones
            ranges[number] = (start, start + len(text))
            free = free[:start] + "\uffff" * len(text) + free[start + len(text) :]
    return ranges


def _container(
    shown: str, reports: Sequence[dict[str, Any]], answers: Sequence[str], begins: Sequence[int]
) -> list[Part] | None:
    """The part of the last answer that contains the text, up to white space, such as a value of a JSON object."""
    compact = "".join(shown.split())
    for number in reversed(range(len(answers))):
        kept = [offset for offset, char in enumerate(answers[number]) if not char.isspace()]
        squeezed = "".join(answers[number].split())
        if not compact or squeezed.count(compact) != 1:
            continue
        first = squeezed.index(compact)
        bounds = kept[first], kept[first + len(compact) - 1] + 1
        if not _is_word(answers[number], *bounds):
            continue
        shown_range = len(shown) - len(shown.lstrip()), len(shown.rstrip())
        bounds = bounds[0] + begins[number], bounds[1] + begins[number]
        return [_part(shown, reports[number], number, shown_range, bounds)]
    return None


def _occurrences(text: str, part: str) -> Iterator[int]:
    start = text.find(part)
    while start >= 0:
        if _is_word(text, start, start + len(part)):
            yield start
            start += len(part) - 1
        start = text.find(part, start + 1)


def _is_word(text: str, start: int, end: int) -> bool:
    """Whether a stretch of a text neither begins nor ends inside a word."""
    return not (
        (start > 0 and text[start - 1].isalnum() and text[start].isalnum())
        or (end < len(text) and text[end].isalnum() and text[end - 1].isalnum())
    )


def _part(
    shown: str,
    report: dict[str, Any],
    number: int,
    shown_range: tuple[int, int],
    bounds: tuple[int, int] | None = None,
) -> Part:
    """The part that stands in a range of the text, with its spans.

    Args:
        shown: the text of the response.
        report: the report of the answer.
        number: the index of the answer.
        shown_range: the characters of the shown text.
        bounds: the characters of the answer that stand there. Default: all.
    """
    generated = text_of(report)
    start, end = shown_range
    first, last = bounds or (0, len(generated))
    offsets = _offsets(generated[first:last], shown[start:end])
    spans = []
    for index, span in enumerate(report["spans"]):
        if bounds is not None and (span["end"] <= first or span["start"] >= last):
            continue
        cut = [start + offsets[min(max(span[edge], first), last) - first] for edge in ("start", "end")]
        entry = {**span, "start": cut[0], "end": cut[1], "text": shown[cut[0] : cut[1]]}
        spans.append((index, entry))
    return Part(number, start, end, spans)


def _offsets(generated: str, shown: str) -> list[int]:
    """For each offset in a generated text, the one in its shown form. The two differ by white space only."""
    offsets, position = [0], 0
    for char in generated:
        if not char.isspace():
            while shown[position] != char:
                position += 1
            position += 1
        elif position < len(shown) and shown[position] == char:
            position += 1
        offsets.append(position)
    return offsets
