"""Where an answer has its risk: the fields ``cocoa_risk`` and ``cocoa_spans``, and OpenAI's ``logprobs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cocoa_engine import Generation, Span
from cocoa_engine.report import Part
from cocoa_integrations._shared.finite import finite
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY, risk_report, span_metadata
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations.server.protocol.decoding import CocoaOptions


@dataclass(frozen=True)
class RiskFields:
    """How the risk of an answer is written.

    Attributes:
        in_message: whether it is in the message, or in the deltas of a stream.
        in_logprobs: whether it is in ``logprobs``.
        candidates: whether spans list the candidates that competed.
        logprobs: ``logprobs`` of the request.
    """

    in_message: bool
    in_logprobs: bool
    candidates: bool
    logprobs: bool | None

    @classmethod
    def of(cls, options: CocoaOptions, logprobs: bool | None, *, allow_logprobs: bool = True) -> RiskFields:
        """Read it off a request.

        Args:
            options: the object ``cocoa``.
            logprobs: ``logprobs`` of the request. An explicit ``False`` asks for `None`.
            allow_logprobs: whether the server writes risk into ``logprobs``.
        """
        return cls(
            in_message=options.report in ("both", "message"),
            in_logprobs=options.report in ("both", "logprobs") and logprobs is not False and allow_logprobs,
            candidates=options.candidates,
            logprobs=logprobs,
        )

    @property
    def reported(self) -> bool:
        """Whether the answer has its risk anywhere."""
        return self.in_message or self.in_logprobs

    def span(self, span: Span, number: int, part: Part | None = None) -> dict[str, Any]:
        """One entry of ``cocoa_spans``."""
        entry = {"index": number, **span_metadata(span, number, part)}
        if self.candidates:
            entry["rivals"] = [
                {
                    "text": one.text,
                    "log_prob": finite(one.log_prob),
                    "con_mlds": finite(one.con_mlds),
                    "f_mlds": finite(one.f_mlds),
                    "score": finite(one.score),
                    "is_greedy": one.is_greedy,
                }
                for one in span.candidates
            ]
        return entry

    def report(self, generation: Generation, split: Split | None, **parts: Any) -> dict[str, Any]:
        """The ``cocoa_risk`` report of a complete answer.

        Args:
            generation: the answer.
            split: separates its reasoning.
            **parts: further keys of the report.
        """
        answered = generation if split is None else split.answered
        report = {
            **risk_report(generation, split),
            **parts,
            "finish_reason": generation.finish_reason,
            "verdict": answered.verdict,
        }
        report["spans"] = [
            self.span(span, number, None if split is None else split.part(number))
            for number, span in enumerate(generation.spans)
        ]
        return report

    def in_delta(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """The part of a ``delta`` with new spans."""
        return {SPANS_KEY: entries} if self.in_message and entries else {}

    def in_answer(self, report: dict[str, Any]) -> dict[str, Any]:
        """The part of a ``message``, or of the last ``delta``, with the report."""
        return {RISK_KEY: report} if self.in_message else {}

    def logprobs_of(self, tokens: list[dict[str, Any]] | None, **risk: Any) -> dict[str, Any] | None:
        """``logprobs`` of a choice.

        Args:
            tokens: the entries of the tokens, if they were asked for.
            **risk: ``cocoa_risk`` or ``cocoa_spans``.
        """
        if not (self.logprobs or self.in_logprobs):
            return None
        return {"content": tokens, "refusal": None, **(risk if self.in_logprobs else {})}


class HasGeneration(Protocol):
    """An answer."""

    @property
    def generation(self) -> Generation:
        """The answer as the engine returned it."""

    @property
    def split(self) -> Split:
        """Separates its reasoning."""


def usage_of(answers: Sequence[HasGeneration], fields: RiskFields, *, n: int | None = None) -> dict[str, Any]:
    """The token counts of the answers to one request.

    Args:
        answers: the answers.
        fields: how the risk is written.
        n: the number of answers to each prompt, which counts once. By default, all answer the same prompt.
    """
    of_prompts = [one.generation.usage for one in answers[:: n or len(answers)]]
    prompt = sum(one.prompt_tokens for one in of_prompts)
    completion = sum(one.generation.usage.completion_tokens for one in answers)
    details: dict[str, Any] = {
        "reasoning_tokens": sum(one.split.reasoning_tokens(one.generation) for one in answers if one.split.parts)
    }
    if fields.reported and (risk := max_risk_of([one.split for one in answers])) is not None:
        details["cocoa_max_risk"] = risk
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in of_prompts)},
        "completion_tokens_details": details,
    }


def max_risk_of(splits: list[Split]) -> float | None:
    """The highest risk of all answers without their reasoning; ``None`` if one is not a finite number."""
    risks = [finite(split.answered.max_risk) for split in splits]
    known = [risk for risk in risks if risk is not None]
    return max(known) if known and len(known) == len(risks) else None
