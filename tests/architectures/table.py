"""The outcomes as a table of Markdown, with their counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import __version__ as transformers_version

from cocoa_engine.safe_text import safe, shortened
from tests.architectures.sweep import Outcome

PATHS = {
    "shared_cache/static_lean": "lean pass",
    "shared_cache/lean": "lean pass",
    "shared_cache/modules": "modules",
    "shared_cache/masked_modules": "masked modules",
    "copied_cache/plain": "copied cache",
    "recompute/plain": "recompute",
}
FAST = ("lean pass", "modules", "masked modules")


def document(outcomes: Sequence[Outcome]) -> str:
    """The counts, then a table with one row for each architecture."""
    rows = [
        f"| {one.model_type} | {one.model_class.replace('_', chr(92) + '_') or '–'} | {_path(one)} | {_result(one)} "
        f"| {one.attention or '–'} |"
        for one in sorted(outcomes, key=lambda one: one.model_type)
    ]
    head = ["| architecture | class | run by | result | source attention |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*counts(outcomes), "", *head, *rows])


def counts(outcomes: Sequence[Outcome]) -> list[str]:
    """How many architectures had each outcome, as a list of Markdown."""
    equal = [one for one in outcomes if one.verdict == "equal"]
    by_path = {path: sum(_path(one) == path for one in equal) for path in dict.fromkeys(PATHS.values())}

    def number(verdicts: Iterable[str]) -> int:
        return sum(one.verdict in verdicts for one in outcomes)

    def attention(kind: str) -> int:
        return sum(one.attention == kind for one in equal)

    return [
        f"transformers {transformers_version}: {len(outcomes)} architectures.",
        "",
        f"- **{len(equal)} equal** to the reference: "
        + ", ".join(f"{count} by the {path}" for path, count in by_path.items() if count and path in FAST)
        + "; slower: "
        + ", ".join(f"{count} by {path}" for path, count in by_path.items() if count and path not in FAST)
        + ".",
        f"- Source attention is measured in {attention('seen')} of them, and equal to the attention weights; "
        f"{attention('none')} have no attention to the whole prompt.",
        f"- **{number(['refused'])} refused** with one error.",
        f"- **{number(['different', 'failed'])} different or failed.**",
        f"- **{number(['no reference'])} without a reference**: the engine runs them, and a plain forward pass of the "
        "model gives no hidden states to compare with.",
        f"- **{number(['not buildable'])} not buildable**: transformers itself cannot build or run a small one here.",
    ]


def _path(one: Outcome) -> str:
    return PATHS.get(one.backend, "–")


def _result(one: Outcome) -> str:
    if one.verdict == "equal":
        return "equal" if not one.in_float64 else "equal in float64; float32 rounds more"
    return f"{one.verdict}: {safe(shortened(one.reason, 220)).replace('|', '/')}"
