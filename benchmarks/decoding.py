"""Statistics of decoding that are not times: risk points, candidates, spans, fed tokens, the difference from greedy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate
from typing import Any

from cocoa_engine import Candidate, Generation, Span
from cocoa_engine.equations import may_be_kept

KINDS = {
    "kept": "kept in the answer",
    "to_own_risk_point": "rivals, up to their own next risk point",
    "to_common_boundary": "rivals, from there to the common boundary",
    "cut": "of chosen candidates, cut by the token limit",
    "wrong_guesses": "guesses that were not used",
    "last_of_rivals": "of the rivals' tokens: the last ones, fed for the MLDS alone",
    "beyond_the_bound": "of the rivals' tokens: fed after the rival could not win any more",
}
"""The counts and their names in tables. The first five add up to all fed tokens."""


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


def where_fed(answers: Sequence[Generation]) -> dict[str, float]:
    """Tokens fed per kept token, by :data:`KINDS`.

    A candidate that cannot win any more need not be grown further without changing a choice. With a summed log p, each
    further token can only lower log p_S, and MLDS(S) >= 0. The score of CoCoA-SIG, log p_S * (1 + alpha * MLDS(S)), is
    therefore never above the log p of the tokens so far, and neither is that of CoCoA. With the winner's final score
    s, a rival has lost once its log p so far is below s. It must still be grown to its own next risk point, because the
    latest of these is where all candidates end. ``beyond_the_bound`` counts the tokens that this rule would save if s
    were known from the start: the most that any exact rule with this bound can save.

    Args:
        answers: answers by CoCoA-SIG, or by greedy decoding, with a summed log p.
    """
    kept = sum(answer.usage.completion_tokens for answer in answers)
    counts = dict.fromkeys(KINDS, 0)
    counts["kept"] = kept
    for answer in answers:
        for span in answer.spans:
            if span.chosen is None:
                continue
            counts["cut"] += len(span.candidates[span.chosen].token_ids) - len(span.token_ids)
            for rival in (one for number, one in enumerate(span.candidates) if number != span.chosen):
                own = own_boundary(rival, answer.config.gamma)
                counts["to_own_risk_point"] += own
                counts["to_common_boundary"] += len(rival.token_ids) - own
                counts["last_of_rivals"] += 1
                counts["beyond_the_bound"] += len(rival.token_ids) - needed(rival, own, _winning_score(answer, span))
    fed = sum(answer.usage.fed_tokens for answer in answers)
    counts["wrong_guesses"] = fed - sum(counts[kind] for kind in list(KINDS)[:4])
    return {kind: count / kept for kind, count in counts.items()}


def own_boundary(candidate: Candidate, gamma: float) -> int:
    """The number of tokens after which a candidate is at its own next risk point, or ends."""
    competes = -math.log(gamma)
    following = enumerate(candidate.token_margins[1:], start=1)
    return next((count for count, margin in following if margin <= competes), len(candidate.token_ids))


def needed(rival: Candidate, own: int, winning_score: float) -> int:
    """The number of a rival's tokens that must be fed to know that it does not win, if the winner's score is known."""
    for count, log_prob in enumerate(accumulate(rival.token_log_probs), start=1):
        if log_prob < winning_score:  # the log p of a token is known before it is fed
            return max(own, count - 1)
    return len(rival.token_ids)


def _winning_score(answer: Generation, span: Span) -> float:
    """The score that a rival must reach; that of a candidate that may not be kept does not count."""
    allowed = may_be_kept(answer.config.span_log_prob, [one.ends_answer for one in span.candidates])
    return max(one.score for one, may in zip(span.candidates, allowed, strict=True) if may)
