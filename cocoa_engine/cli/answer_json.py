"""An answer as JSON: what was measured, and the verdict, claims and sentences that are derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps, loads

from pydantic import BaseModel

from cocoa_engine.results import Generation


def answer_json(generation: Generation, divided: Generation | None = None) -> str:
    """An answer as JSON, with its verdict, claims and sentences, and the claims to check.

    Args:
        generation: the answer.
        divided: the same text divided at its risk points, if ``generation`` is one span. The units are then those of
            ``divided``, without the numbers of their spans, which the JSON does not have.
    """
    measured = divided or generation
    units: dict[str, Sequence[BaseModel]] = {
        "check": measured.check_these(),
        "claims": measured.claims,
        "sentences": measured.sentences,
    }
    left_out = {"spans"} if divided else None
    shown = {name: [loads(one.model_dump_json(exclude=left_out)) for one in found] for name, found in units.items()}
    return dumps(
        {**loads(generation.model_dump_json()), "verdict": measured.verdict, **shown},
        ensure_ascii=False,
        separators=(",", ":"),
    )


def answers_json(answers: Sequence[str]) -> str:
    """Answers, each from :func:`answer_json`, as a JSON list."""
    return f"[{','.join(answers)}]"
