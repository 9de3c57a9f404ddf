"""Generations with figures of one's choice, for what no small model says on demand."""

from typing import Any

from cocoa_engine import Candidate, CocoaConfig, Generation, RiskSource, Span, Usage

ATTACK = (
    '</style></div><script>document.title="taken"</script>',
    " \"'><img src=x onerror=alert(1)> & &amp; <!-- ",
    " שלום עולם \u202eabc\u2066 مرحبا",
    "\x1b[2J\x00\n\tdef f(x):\n\t\treturn [x] ",
)
"""Texts that would break a page, a terminal or its layout if they were not escaped."""


def figures(text: str, risk: float = 0.9, log_prob: float = -2.25, score: float = -7.5) -> dict[str, Any]:
    return {
        "text": text,
        "token_ids": [7],
        "token_log_probs": [log_prob],
        "token_entropies": [1.5],
        "token_margins": [0.25],
        "log_prob": log_prob,
        "con_mlds": 0.02,
        "f_mlds": risk,
        "score": score,
    }


def generation(
    *parts: tuple[str, float],
    candidates: list[Candidate] | None = None,
    risk_source: RiskSource = "token_probability",
    **config: Any,
) -> Generation:
    """An answer of spans with a text and a risk each; ``candidates`` are those of the last, the first one kept."""
    spans: list[Span] = []
    start = 0
    for number, (text, risk) in enumerate(parts):
        competed = candidates if candidates and number == len(parts) - 1 else []
        spans.append(
            Span(
                **figures(text, risk),
                start=start,
                end=start + len(text),
                kind="risk_point" if competed else "greedy",
                candidates=competed,
                chosen=0 if competed else None,
                risk=risk,
                risk_source=risk_source,
            )
        )
        start += len(text)
    return Generation(
        text="".join(text for text, _ in parts),
        token_ids=[7] * len(parts),
        spans=spans,
        finish_reason="eos",
        usage=Usage(prompt_tokens=3, completion_tokens=len(parts), risk_points=bool(candidates), forward_passes=5),
        config=CocoaConfig(**config),
    )


def stopped(*parts: tuple[str, float]) -> Generation:
    """An answer that ``max_risk`` stopped at its last span."""
    answer = generation(*parts, max_risk=parts[-1][1])
    last = answer.spans[-1].model_copy(update={"reaches_max_risk": True})
    return answer.model_copy(update={"spans": [*answer.spans[:-1], last], "finish_reason": "risk"})
