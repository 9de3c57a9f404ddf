"""Answers of a server: its ``cocoa_risk`` and ``cocoa_spans``, as a model in the same process has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import JSONDecodeError
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from cocoa_engine import Candidate, CocoaConfig, Generation, Span, Usage
from cocoa_engine.errors import DataError
from cocoa_engine.messages import explain
from cocoa_engine.report import Part, RiskReport, SpanReport
from cocoa_integrations._shared.metadata import begin_of, is_reasoning
from cocoa_integrations._shared.reasoning import Split

_ALWAYS = ("text", "con_mlds", "f_mlds", "score", "flagged", "source_attention", "reaches_max_risk")
"""What a server writes of every span, and compact reports leave out."""


def _complete(entries: list[SpanReport]) -> list[SpanReport]:
    for number, entry in enumerate(entries):
        for name in (*_ALWAYS, *(("chosen",) if entry.rivals else ())):
            if name not in entry.model_fields_set:
                raise ValueError(f"span {number} lacks {name}")
    return entries


def _complete_report(report: RiskReport) -> RiskReport:
    _complete(report.spans)
    return report


# What the adapters and OpenAI's clients read of a response. Further keys are allowed: a newer server may send more.

_Text: TypeAlias = str | None
_Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)] | None


class _Function(TypedDict):
    name: NotRequired[_Text]
    arguments: NotRequired[_Text]


class _WholeFunction(TypedDict):
    name: str
    arguments: str


class _Call(TypedDict):
    index: Annotated[int, Field(ge=0, lt=10_000)]
    id: NotRequired[_Text]
    type: NotRequired[Literal["function"] | None]
    function: NotRequired[_Function | None]


class _WholeCall(TypedDict):
    id: str
    type: Literal["function"]
    function: _WholeFunction


class _Written(TypedDict):
    content: NotRequired[_Text]
    reasoning_content: NotRequired[_Text]
    refusal: NotRequired[_Text]
    function_call: NotRequired[None]
    audio: NotRequired[None]
    cocoa_risk: NotRequired[Annotated[RiskReport, AfterValidator(_complete_report)] | None]


class _Delta(_Written):
    role: NotRequired[Literal["assistant"] | None]
    tool_calls: NotRequired[list[_Call] | None]
    cocoa_spans: NotRequired[Annotated[list[SpanReport], AfterValidator(_complete)] | None]


class _Message(_Written):
    role: Literal["assistant"]
    tool_calls: NotRequired[list[_WholeCall] | None]


class _LikelyToken(TypedDict):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, lt=256)]] | None


class _Token(_LikelyToken):
    top_logprobs: list[_LikelyToken]


class _LogProbs(TypedDict):
    content: NotRequired[list[_Token] | None]
    refusal: NotRequired[None]


class _PromptDetails(TypedDict):
    cached_tokens: NotRequired[_Count]
    audio_tokens: NotRequired[_Count]


class _CompletionDetails(TypedDict):
    reasoning_tokens: NotRequired[_Count]
    audio_tokens: NotRequired[_Count]


class _Usage(TypedDict):
    prompt_tokens: NotRequired[_Count]
    completion_tokens: NotRequired[_Count]
    total_tokens: NotRequired[_Count]
    prompt_tokens_details: NotRequired[_PromptDetails | None]
    completion_tokens_details: NotRequired[_CompletionDetails | None]


class _Choice(TypedDict):
    logprobs: NotRequired[_LogProbs | None]


class _WholeChoice(_Choice):
    message: _Message
    finish_reason: str


class _PartChoice(_Choice):
    delta: NotRequired[_Delta | None]
    finish_reason: NotRequired[_Text]


class _Envelope(TypedDict):
    id: NotRequired[_Text]
    model: NotRequired[_Text]
    service_tier: NotRequired[_Text]
    system_fingerprint: NotRequired[_Text]
    error: NotRequired[None]
    usage: NotRequired[_Usage | None]


class _Response(_Envelope):
    choices: Annotated[list[_WholeChoice], Field(min_length=1)]


class _Chunk(_Envelope):
    choices: list[_PartChoice]


class _Model(TypedDict):
    id: str
    max_model_len: NotRequired[Annotated[int, Field(gt=0, lt=2**63)] | None]


class _Models(TypedDict):
    data: Annotated[list[_Model], Field(min_length=1)]


RESPONSE: TypeAdapter[Any] = TypeAdapter(_Response)
CHUNK: TypeAdapter[Any] = TypeAdapter(_Chunk)
MODELS: TypeAdapter[Any] = TypeAdapter(_Models)


def received(sent: Any, kind: TypeAdapter[Any]) -> dict[str, Any]:
    """What a server sent, as a dictionary of whose values the types are checked.

    Args:
        sent: the parsed JSON, or the object that OpenAI's client made of it.
        kind: `RESPONSE`, `CHUNK` or `MODELS`.

    Raises:
        DataError: a field has a wrong type or is missing.
    """
    wire = sent.model_dump(warnings=False) if hasattr(sent, "model_dump") else sent
    try:
        kind.validate_python(wire, strict=True)
    except ValidationError as error:
        raise _unreadable(error) from None
    found: dict[str, Any] = wire
    return found


@contextmanager
def clear_errors() -> Iterator[None]:
    """Convert the errors of OpenAI's clients about an answer that is no JSON, or an event that is no JSON object."""
    try:
        yield
    except (JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise DataError("the server's answer is no JSON") from None
    except AttributeError as error:
        if error.name != "model_dump":
            raise
        raise DataError(f"{_FOREIGN}: an event is no JSON object") from None


_FOREIGN = "the server's answer is not one of `cocoa serve`, or of another version"


def _unreadable(error: ValidationError) -> DataError:
    return DataError(f"{_FOREIGN}: {explain(error)}")


def entries_of(wire: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``cocoa_spans``, without the ``index`` that clients need to join streams."""
    return [{key: value for key, value in entry.items() if key != "index"} for entry in wire]


def report_of(wire: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """``cocoa_risk`` and the engine's finish reason, from the report of a server, which has both."""
    report = {key: value for key, value in wire.items() if key not in ("finish_reason", "verdict")}
    return {**report, "spans": entries_of(wire["spans"])}, wire.get("finish_reason")


def generation_of(
    report: Mapping[str, Any],
    finish_reason: str | None,
    usage: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Generation:
    """The answer that a report describes. What a report lacks is missing: tokens, and settings of the server.

    Args:
        report: the ``cocoa_risk`` report.
        finish_reason: the engine's finish reason.
        usage: OpenAI's token counts.
        settings: the settings that the request gave.

    Raises:
        DataError: a value is out of range.
    """
    try:
        return _generation_of(report, finish_reason, usage or {}, settings or {})
    except ValidationError as error:
        raise _unreadable(error) from None


def _generation_of(
    report: Mapping[str, Any], finish_reason: str | None, counts: Mapping[str, Any], settings: Mapping[str, Any]
) -> Generation:
    spans = [span_of(entry, report["risk_source"]) for entry in report["spans"]]
    return Generation.model_validate(
        {
            "text": "".join(span.text for span in spans),
            "token_ids": [],
            "spans": spans,
            "finish_reason": finish_reason,
            "usage": Usage(
                prompt_tokens=counts.get("prompt_tokens") or 0,
                completion_tokens=counts.get("completion_tokens") or 0,
                risk_points=sum(span.kind == "risk_point" for span in spans),
                cached_tokens=(counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            ),
            "config": CocoaConfig(**{**settings, "method": report["method"]}),
            "model_name": report.get("model_name"),
            "answer_risk": report["answer_risk"],
            "threshold": report["threshold"],
            "answer_threshold": report["answer_threshold"],
            "out_of_domain": report.get("out_of_domain", False),
            "source_heads": report.get("source_heads"),
        }
    )


def span_of(entry: Mapping[str, Any], risk_source: str | None = None) -> Span:
    """The span of an entry of ``cocoa_spans``, without its tokens."""
    risk, attention, rivals = entry["risk"], entry["source_attention"], entry.get("rivals", ())
    return Span.model_validate(
        {
            **_statistics(entry),
            "token_source_attention": [] if attention is None else [attention],  # whose mean it is
            "passage_attention": entry.get("passage_attention", []),
            "start": entry["start"],
            "end": entry["end"],
            "kind": entry["kind"],
            "candidates": [Candidate(**_statistics(rival), is_greedy=rival["is_greedy"]) for rival in rivals],
            "chosen": entry["chosen"] if rivals else None,
            "risk": math.nan if risk is None and entry["flagged"] else risk,
            "risk_source": risk_source,
            "flagged": entry["flagged"],
            "out_of_domain": entry.get("out_of_domain", False),
            "reaches_max_risk": entry["reaches_max_risk"],
            "repeats": entry.get("repeats", False),
        }
    )


def split_of(generation: Generation, report: Mapping[str, Any], reasoning: str) -> Split:
    """The reasoning and the answer.

    Args:
        generation: the answer, from :func:`generation_of`.
        report: its report, which says to which part each span belongs.
        reasoning: the text of the reasoning.
    """
    entries = report["spans"]
    if not any("part" in entry for entry in entries):
        return Split("", 0, None, generation)
    parts: tuple[Part, ...] = tuple("reasoning" if is_reasoning(entry) else "answer" for entry in entries)
    spans = [span for span, part in zip(generation.spans, parts, strict=True) if part == "answer"]
    text = "".join(span.text for span in spans)
    answered = generation.model_copy(update={"spans": spans, "text": text})
    return Split(reasoning, begin_of(report), parts, answered)


def _statistics(entry: Mapping[str, Any]) -> dict[str, Any]:
    names = ("log_prob", "con_mlds", "f_mlds", "score")
    values = {name: math.nan if entry[name] is None else entry[name] for name in names}
    tokens = dict.fromkeys(("token_ids", "token_log_probs", "token_entropies", "token_margins"), ())
    return {"text": entry["text"], **{name: list(value) for name, value in tokens.items()}, **values}
