"""Statistics of decoding that are not times: risk points, candidates, spans, and the difference from greedy's text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from cocoa_engine import Generation


def decoding_statistics(answers: Sequence[Generation], greedy: Sequence[Generation]) -> dict[str, Any]:
    """Statistics of a branching method.

    Args:
        answers: its answers.
        greedy: the answers of greedy decoding to the same prompts, in the same order.
    """
    kept = sum(answer.usage.completion_tokens for answer in answers)
    chosen = [span for answer in answers for span in answer.spans if span.candidates]
    lengths = [len(span.token_ids) for span in chosen]
    apart = [
        answer.token_ids != other.token_ids and _tokens_apart(answer.token_ids, other.token_ids)
        for answer, other in zip(answers, greedy, strict=True)
    ]
    return {
        "prompts": len(answers),
        "tokens": kept,
        "risk_points_per_token": len(chosen) / kept,
        "candidates_per_risk_point": statistics.mean(len(span.candidates) for span in chosen) if chosen else None,
        "first_candidate_kept": statistics.mean(span.chosen == 0 for span in chosen) if chosen else None,
        "span_tokens_mean": statistics.mean(lengths) if lengths else None,
        "span_tokens_p95": sorted(lengths)[int(0.95 * (len(lengths) - 1))] if lengths else None,
        "forward_passes_per_kept_token": sum(answer.usage.forward_passes for answer in answers) / kept,
        "fed_per_kept_token": sum(answer.usage.fed_tokens for answer in answers) / kept,
        "prompts_apart_from_greedy": sum(map(bool, apart)) / len(answers),
        "tokens_apart_from_greedy": sum(apart) / kept,
    }


def _tokens_apart(tokens: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens without a counterpart in the other text, after the two texts are aligned."""
    matcher = SequenceMatcher(None, tokens, other, autojunk=False)
    return len(tokens) - sum(block.size for block in matcher.get_matching_blocks())
