"""Whether two answers are the same but for rounding and for what they cost."""

from __future__ import annotations

from typing import Any

import pytest

from cocoa_engine import Candidate, Generation, Span, SpanStream


def assert_alike(a: Generation, b: Generation, tolerance: float = 1e-3) -> None:
    """The same tokens, spans and choices; figures within ``tolerance``, long log-probabilities relatively to it."""
    assert (a.text, a.token_ids, a.finish_reason, a.config) == (b.text, b.token_ids, b.finish_reason, b.config)
    for x, y in zip(a.spans, b.spans, strict=True):
        assert (x.text, x.start, x.end, x.kind, x.chosen) == (y.text, y.start, y.end, y.kind, y.chosen)
        _assert_alike(x, y, tolerance)
        for one, other in zip(x.candidates, y.candidates, strict=True):
            assert (one.text, one.is_greedy) == (other.text, other.is_greedy)
            _assert_alike(one, other, tolerance)


def _assert_alike(a: Span | Candidate, b: Span | Candidate, tolerance: float) -> None:
    assert a.token_ids == b.token_ids
    for name in ("token_log_probs", "token_entropies", "token_margins"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), abs=tolerance), name
    assert (a.con_mlds, a.f_mlds) == pytest.approx((b.con_mlds, b.f_mlds), abs=tolerance)
    assert (a.log_prob, a.score) == pytest.approx((b.log_prob, b.score), abs=tolerance, rel=tolerance)


def answers(result: Any) -> list[Generation]:
    """Whatever a call returned, as a list."""
    if isinstance(result, SpanStream):
        spans = list(result)
        assert result.generation is not None
        assert spans == result.generation.spans
        return [result.generation]
    return result if isinstance(result, list) else [result]


def assert_all_alike(some: Any, others: Any) -> None:
    for one, other in zip(answers(some), answers(others), strict=True):
        assert_alike(one, other)


def close(a: Any, b: Any, tolerance: float = 1e-3) -> bool:
    """Whether two nested reports are the same, their numbers within ``tolerance``."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key], tolerance) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    return bool(a == pytest.approx(b, abs=tolerance, rel=tolerance)) if isinstance(a, float) else bool(a == b)


def token_counts(usage: Any) -> dict[str, int]:
    """LangChain's token counts of an answer, without what was reused: that depends on the calls before."""
    return {name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")}


def without_reuse(generation_info: dict[str, Any]) -> dict[str, Any]:
    """The ``generation_info`` of LangChain's text model with :func:`token_counts` as its usage."""
    return {**generation_info, "usage_metadata": token_counts(generation_info["usage_metadata"])}
