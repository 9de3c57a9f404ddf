"""Whether two answers are the same but for rounding and for what they cost."""

from typing import Any

import pytest

from cocoa_engine import Candidate, Generation, Span, SpanStream
from cocoa_engine.report import ReportEntry

ROUNDING = 1e-4
"""The largest relative difference that the kernels promise between passes of other shapes, or other processors."""


def near(figures: Any) -> Any:
    """Equal to figures, a list or a dictionary of them, but for rounding."""
    return pytest.approx(figures, abs=ROUNDING, rel=ROUNDING)


def assert_alike(a: Generation, b: Generation) -> None:
    """The same tokens, spans and choices; figures are near."""
    assert (a.text, a.token_ids, a.finish_reason, a.config) == (b.text, b.token_ids, b.finish_reason, b.config)
    for x, y in zip(a.spans, b.spans, strict=True):
        assert (x.text, x.start, x.end, x.kind, x.chosen) == (y.text, y.start, y.end, y.kind, y.chosen)
        _assert_alike(x, y)
        for one, other in zip(x.candidates, y.candidates, strict=True):
            assert (one.text, one.is_greedy) == (other.text, other.is_greedy)
            _assert_alike(one, other)


def _assert_alike(a: Span | Candidate, b: Span | Candidate) -> None:
    assert a.token_ids == b.token_ids
    for name in ("token_log_probs", "token_entropies", "token_margins", "con_mlds", "f_mlds", "log_prob", "score"):
        assert getattr(a, name) == near(getattr(b, name)), name


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


def close(a: Any, b: Any) -> bool:
    """Whether two nested reports are the same, their numbers near."""
    if isinstance(a, ReportEntry) and isinstance(b, ReportEntry):
        return close(a.to_dict(), b.to_dict())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == near(b)) if isinstance(a, float) else bool(a == b)


def token_counts(usage: Any) -> dict[str, int]:
    """LangChain's token counts of an answer, without what was reused: that depends on the calls before."""
    return {name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")}


def without_reuse(generation_info: dict[str, Any]) -> dict[str, Any]:
    """The ``generation_info`` of LangChain's text model with :func:`token_counts` as its usage."""
    return {**generation_info, "usage_metadata": token_counts(generation_info["usage_metadata"])}


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers give the same tokens for every text and every chat."""
    written = [each.backend_tokenizer.to_str() for each in (one, other)]
    return (
        written[0] == written[1]
        and type(one) is type(other)
        and one.special_tokens_map == other.special_tokens_map
        and one.chat_template == other.chat_template
        and one.model_max_length == other.model_max_length
    )
