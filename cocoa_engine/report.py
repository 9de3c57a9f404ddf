"""The risk of an answer as adapters, servers and clients write and read it: one type for all of them.

Every report is valid JSON. A number that is not finite (NaN or infinite) is ``None``; a threshold, a retry or a judge
counts it as above every threshold. A key that is left out of the JSON is a field that was never set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field

from cocoa_engine.arguments import ResultModel
from cocoa_engine.errors import ConfigError, unknown
from cocoa_engine.rendering.wording import SOURCES
from cocoa_engine.results import Generation
from cocoa_engine.risk.units import MeasuredText
from cocoa_engine.spans import AnswerRiskSource, FinishReason, RiskSource, Span

if TYPE_CHECKING:
    from typing_extensions import Self

Detail = Literal["full", "compact", "none"]
"""How much of the risk of an answer its metadata has. ``full``: everything that is measured. ``compact``: one report,
in which nothing is written twice. ``none``: no report."""

Part = Literal["reasoning", "answer"]  # what a span of a model that reasons belongs to

Metric = Literal["risk", "con_mlds", "f_mlds", "self_information"]
"""The values of a span that a threshold can be compared with; higher is riskier."""

RISK_KEY = "cocoa_risk"  # the key of a report in the metadata of an answer

SPANS_KEY = "cocoa_spans"  # the key of the spans of a chunk, or of an answer with full metadata

CLOSING = "</think>"


def require_detail(detail: Any) -> None:
    """Refuse an unknown level of detail; the message names the closest one."""
    if detail is not None and detail not in get_args(Detail):
        raise ConfigError(f"risk_metadata: {unknown([str(detail)], get_args(Detail), what='value')}")


def finite(value: float | None) -> float | None:
    """The value as a report can have it: JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None


Finite = Annotated[float | None, AfterValidator(finite)]
"""A number as a report has it."""


def severity(value: float | None) -> float:
    """The value as it is compared: one that is unknown, NaN or infinite counts as infinitely risky."""
    return value if value is not None and math.isfinite(value) else math.inf


class ReportEntry(ResultModel):
    """Base of what is attached to an answer: plain data with a JSON form."""

    model_config = ConfigDict(frozen=True, protected_namespaces=(), populate_by_name=True)

    @classmethod
    def from_wire(cls, data: Any) -> Self:
        """Read the JSON form, as a dictionary. Unknown keys, such as those of a newer version, are left out.

        Raises:
            DataError: a key is missing, or a value has another type.
        """
        return cls.model_validate(data, strict=True)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, of plain Python values. Fields that were never set are left out."""
        return self.model_dump(by_alias=True, exclude_unset=True)

    def with_values(self, **values: Any) -> Self:
        """A copy with other values of some fields."""
        return self.model_copy(update=values)

    def without(self, *names: str) -> Self:
        """A copy in which some fields are not set."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set.difference(names)})


class RangeReport(ReportEntry):
    """A stretch of the text that is shown."""

    start: int = Field(description="Offset of its first character, as for spans.")
    end: int = Field(description="Offset after its last character.")


class RivalReport(ReportEntry):
    """One entry of ``rivals`` of a span: a candidate that competed in it."""

    text: str = Field(description="Text of the candidate.")
    log_prob: Finite = Field(description="Log-probability of the candidate in nats.")
    con_mlds: Finite = Field(description="ConMLDS of the candidate.")
    f_mlds: Finite = Field(description="fMLDS of the candidate.")
    score: Finite = Field(description="Score by which the method ranks candidates. Higher is better.")
    is_greedy: bool = Field(description="Whether greedy decoding would have taken its first token.")


class SpanReport(RangeReport):
    """One entry of ``cocoa_spans``, and of ``spans`` in ``cocoa_risk``."""

    span: int = Field(0, description="Number of the span in the answer, from 0. Not in a compact report.")
    start: int
    """Offset of the span's first character in the text that is shown: the generated text with the changes in `edits`.
    White space at the ends of a marked span is left out."""
    end: int = Field(description="Offset after the span's last character.")
    text: str | None = None
    """Text of the span as it was generated. The texts of all spans concatenate to the generated text. Left out in a
    compact report if the text of the answer has it at these offsets."""
    kind: Literal["greedy", "risk_point", "given"]
    """`risk_point`: several candidates competed and this one was kept. `greedy`: no token competed. `given`: the text
    was scored, not generated."""
    con_mlds: Finite = None
    """ConMLDS: disagreement of consecutive middle layers, between 0 and 2. Left out in a compact report if it is the
    risk."""
    f_mlds: Finite = None
    """fMLDS: disagreement of the middle layers with the final layer, between 0 and 2. Left out in a compact report if
    it is the risk."""
    log_prob: Finite
    """Log-probability of the span in nats, by default the sum over its tokens (`span_log_prob`)."""
    score: Finite = None
    """Score by which the method ranks candidates. Higher is better. Not in a compact report."""
    risk: float | None  # as it was read: one that is no number and not flagged is no harmless one
    """Risk of the span, in [0, 1] unless a raw MLDS was asked for. `risk_source` of the report says what it is. `None`
    if it was not measured or is not a finite number; the latter is `flagged`."""
    flagged: bool = False
    """Whether the risk reaches `threshold` of the report, or is not a finite number. Left out in a compact report if it
    is false."""
    source_attention: Finite = None
    """Mean attention mass of the model's retrieval heads on the prompt, its first token left out, in [0, 1]; `None` if
    it was not measured. Left out in a compact report if it is `None`."""
    passage_attention: list[Finite] = Field(default_factory=list)
    """Only where the passages of the prompt were given: the same for each passage, in their order. In a response of
    LlamaIndex for each of its `source_nodes`, in that of a judge for each of its contexts, and `None` for one that was
    not in the prompt of the answer."""
    reaches_max_risk: bool = False
    """Whether decoding stopped after this span because its risk reached `max_risk`. Left out in a compact report if it
    is false."""
    out_of_domain: bool = False
    """Only if true: the span is unlike those that the calibrator was fitted on, and its risk may be meaningless."""
    repeats: bool = False
    """Only if true: the answer runs in a loop where the span ends: its last 24 tokens are one sequence of at most 8
    tokens, over and over. Such tokens are probable, so that the risk is low."""
    candidates: int = 0
    """Number of candidates that competed; 0 where none did. Left out in a compact report if it is 0."""
    chosen: int | None = None
    """Index of the kept candidate at a risk point, otherwise `None`. Not in a compact report."""
    index: int = 0
    """Only from `cocoa serve`: the same as `span`. Clients of OpenAI join the lists of a stream by it."""
    rivals: list[RivalReport] = Field(default_factory=list)
    """Only from `cocoa serve`, where `cocoa` has `candidates`: all candidates of the span, the kept one included."""
    part: Part | None = None
    """Only where the model reasoned: the part of the text that the span belongs to. A span with the tag `</think>`
    belongs to the answer if it has visible text after the tag."""
    source: int | None = None
    """Only with citations: number of the cited source, from 1; `None` if none is cited."""
    source_attentions: list[Finite] = Field(default_factory=list)
    """Only with citations: for each source, the span's attention on it; `None` if the source was not in
    the prompt."""

    @classmethod
    def of(cls, span: Span, number: int, part: Part | None = None, *, rivals: bool = False) -> SpanReport:
        """The report of a span, by its number in the answer, from 0, with the candidates that competed as ``rivals``.

        ``part`` is ``None`` if the model did not reason.
        """
        names = ("start", "end", "text", "kind", "con_mlds", "f_mlds", "log_prob", "score", "risk", "source_attention")
        values = {name: getattr(span, name) for name in (*names, "reaches_max_risk", "chosen")}
        values |= {"span": number, "candidates": len(span.candidates), "risk": finite(span.risk)}
        # it reaches every threshold; a risk of None that is not flagged was not measured
        values["flagged"] = span.flagged or (values["risk"] is None and span.risk is not None)
        optional = ("passage_attention", "out_of_domain", "repeats")
        values |= {name: value for name in optional if (value := getattr(span, name))}
        if part is not None:
            values["part"] = part
        if rivals:
            values["rivals"] = [RivalReport(**candidate.__dict__) for candidate in span.candidates]
        return cls(**values)

    @property
    def is_reasoning(self) -> bool:
        """Whether it belongs to the reasoning."""
        return self.part == "reasoning"

    @property
    def is_unmeasured(self) -> bool:
        """Whether the risk was not measured. One that was measured and is not finite is flagged."""
        return self.risk is None and not self.flagged

    @property
    def is_visible(self) -> bool:
        """Whether it belongs to the answer and has visible text, which a compact report may leave out."""
        return not self.is_reasoning and (self.text is None or bool(self.text.strip()))

    def value(self, metric: Metric) -> float:
        """As :meth:`ValueReport.value`. A risk that was not measured is 0.0."""
        return 0.0 if metric == "risk" and self.is_unmeasured else _value(self, metric)

    @property
    def _derived(self) -> dict[str, Any]:
        """The values that a compact report leaves out, besides the number."""
        absent = {"flagged": False, "reaches_max_risk": False, "candidates": 0, "source_attention": None}
        return {**absent, "con_mlds": self.risk, "f_mlds": self.risk}


class CheckReport(RangeReport):
    """One entry of ``check`` in ``cocoa_risk``: a claim that is worth checking first."""

    text: str = Field(description="Text of the claim: a name, number, date, short quotation or content word.")
    kind: Literal["word", "name", "number", "date", "quote"] | None = None
    """What it is. Not in a compact report."""
    risk: Finite = Field(description="Highest risk of its spans.")
    reasons: list[str] = Field(default_factory=list)
    """Why it may be wrong: `not in the source`, `little attention to the source`, `the model was unsure`, `competing:
    ...`. Left out in a compact report if there is none."""
    competing: list[str] = Field(default_factory=list)
    """What other candidates of its spans say in its place, likeliest first. Left out in a compact report if there is
    nothing."""
    spans: list[int] = Field(default_factory=list, description="Numbers of its spans. Not in a compact report.")


class ClaimReport(RangeReport):
    """One entry of ``claims`` in ``cocoa_risk``."""

    risk: Finite = Field(description="Highest risk of its spans.")


class SentenceReport(ClaimReport):
    """One entry of ``sentences`` in ``cocoa_risk``."""

    risk: Finite
    """Mean risk of its three riskiest claims; without a claim, the highest of its spans."""


class ValueReport(RangeReport):
    """One value of ``fields`` in ``cocoa_risk``, or of ``arguments`` in an entry of ``tool_calls``."""

    risk: Finite = Field(description="Highest risk of any span that shares a character with the value.")
    con_mlds: Finite = Field(description="Mean ConMLDS of these spans.")
    f_mlds: Finite = Field(description="Mean fMLDS of these spans.")
    log_prob: Finite
    """Sum of the log-probabilities of the value's own tokens. Forced tokens count 0."""
    start: int = Field(description="Offset of its first character, as for spans, without quotes.")
    spans: list[int] = Field(description="Numbers of these spans.")

    def value(self, metric: Metric) -> float:
        """The value of a metric; ``self_information`` is -log p, in nats.

        One that is not a finite number is infinite: it reaches every threshold.
        """
        return _value(self, metric)


class CallReport(ReportEntry):
    """One entry of ``tool_calls`` in ``cocoa_risk``."""

    name: str | None = Field(description="Name of the tool; `None` if the call ends before it is complete.")
    id: str = Field(description="Id of the call, as in the framework's own list of tool calls.")
    risk: Finite = Field(description="Highest risk of any span of the call, its name included.")
    arguments: dict[str, ValueReport]
    """Risk of each argument, by name, and of every value inside an argument, by its path (`$.people[0].age`)."""
    error: str | None = Field(description="Why the call cannot be made; `None` if it can.")


class ReasoningReport(ReportEntry):
    """``reasoning`` in ``cocoa_risk``: the risk of the reasoning, which does not count in the other values."""

    max_risk: Finite = Field(description="Highest risk of any span of the reasoning; 0.0 without spans.")
    mean_risk: Finite = Field(description="Mean risk of these spans; 0.0 without spans.")
    risk_points: int = Field(description="Number of these spans of kind `risk_point`.")
    spans: list[int] = Field(default_factory=list)
    """Numbers of these spans. Not in a compact report, where `part` of the spans tells."""
    reasoning_start: int = 0
    """Only in a compact report: offset in the generated text of the reasoning that the message has, from which the
    texts of spans are left out."""
    answer_start: int = 0
    """Offset in the generated text of the answer, which is the text of the message. Missing in a report of a LlamaIndex
    response, whose offsets count from the beginning of its text."""


class EditReport(ReportEntry):
    """One entry of ``edits`` in ``cocoa_risk``: a change that a mark, a marker or a gate made."""

    start: int = Field(description="Offset in the generated text of the first character that it concerns.")
    end: int = Field(description="Offset after the last one; `start` for a marker of a citation.")
    before: str | None = Field(None, description="What was inserted before them.")
    after: str | None = Field(None, description="What was inserted after them.")
    text: str | None = Field(None, description="What replaced them.")
    was: str | None = Field(None, description="What was replaced. Missing if it is the whole answer.")


class PartReport(RangeReport):
    """One entry of ``parts`` in ``cocoa_risk``: a stretch of the response that one answer wrote."""

    start: int = Field(description="Offset of its first character in the text of the response.")
    end: int = Field(description="Offset after its last character.")
    report: int = Field(description="Index of the answer's own report in `cocoa_reports`.")


class GateReport(ReportEntry):
    """``gate`` in ``cocoa_risk``: what a gate or a retry did with an answer that was too risky."""

    action: str = Field(description="`raise`, `mark`, `abstain`, or what a person decided.")
    metric: str | None = Field(description="The value that was compared; `None` without a report of the answer.")
    unit: Literal["claim", "sentence"] | None = Field(None, description="What was compared, if not spans.")
    threshold: Finite = Field(description="The threshold; `None` without a report of the answer.")
    value: Finite = Field(description="The value that reached it.")


class RiskSummary(ReportEntry):
    """What a ``cocoa_risk`` report says about the answer as a whole."""

    schema_version: Literal[1] = Field(alias="schema")
    """Version of this schema. It changes when a key changes its meaning or is removed."""
    method: str | None = Field(description="Decoding method, such as `cocoa-sig`; `None` in a partial report.")
    model_name: str | None = Field(None, description="Name of the model; missing in a partial report.")
    run_id: str | None = None
    """Only in the reports of callbacks, collectors and events: the id of the LangChain run, or of LlamaIndex's span of
    the LLM call."""
    max_risk: Finite
    """Highest risk of any span of the answer, without reasoning; 0.0 without spans."""
    mean_risk: Finite = Field(description="Mean risk of the spans of the answer, without reasoning; 0.0 without spans.")
    risk_source: RiskSource | None
    """Where the risks of spans come from: `calibrator`, an estimated probability; `source_attention`, the rank of the
    span's source attention among spans of the model; `token_probability`, 1 - p of its least probable token; `f_mlds`
    or `con_mlds`, a raw MLDS, which the setting `risk` asks for. `None` without spans, in a partial report, and where
    answers with different sources are joined."""
    calibrated: bool = Field(description="Whether the risks of spans are calibrated probabilities.")
    threshold: Finite
    """Risk from which spans are flagged: the calibrator's threshold, or the default of `risk_source`. `None` for a raw
    MLDS, and where answers with different sources are joined."""
    answer_threshold: Finite = Field(description="Threshold of `answer_risk`; `None` without one.")
    answer_risk: Finite
    """Risk of the answer as a whole, from its spans after the reasoning, in [0, 1]; `None` in a partial report."""
    answer_risk_source: AnswerRiskSource | None = None
    """Where `answer_risk` comes from: `calibrator`, an estimated probability that the answer is wrong; `rank`, the
    share of right answers that were less surprising to the model."""
    out_of_domain: bool = False
    """Only if true: the answer is unlike those that the calibrator was fitted on, as a whole or in more than a tenth of
    its spans (at least two), and its risks may be meaningless."""
    answer_out_of_domain: bool = False
    """Only if true: the answer as a whole is unlike those that `answer_risk` was fitted on or is ranked among: of a
    rank, it has more than 24 tokens. `answer_risk` may mean little."""
    source_heads: Literal["spread"] | None = None
    """Only where the model's retrieval heads are not known: `source_attention` of the spans is that of heads spread
    over the layers. `cocoa heads` finds the model's own."""
    risk_points: int = Field(description="Number of spans of kind `risk_point` of the answer, without reasoning.")
    reasoning: ReasoningReport | None = None
    """Only where the model reasoned: the risk of its reasoning."""
    is_compact: bool = Field(False, alias="compact")
    """Only in a compact report, and then true: nothing is written twice. See `risk_metadata`."""


class RiskReport(RiskSummary):
    """The ``cocoa_risk`` report of one answer."""

    spans: list[SpanReport] = Field(description="Every span of the generated text, in order, reasoning included.")
    check: list[CheckReport] = Field(default_factory=list)
    """The riskiest claims of the answer, riskiest first, at most three, of those with a risk of at least 0.25 or one
    that reaches the threshold. Empty for a raw MLDS. Claims as low as the lowest are left out. Missing in a partial
    report."""
    claims: list[ClaimReport] = Field(default_factory=list)
    """All names, numbers, dates, short quotations and content words of the answer, in order. Not in a compact or a
    partial report."""
    sentences: list[SentenceReport] = Field(default_factory=list)
    """The sentences of the answer, in order. Missing in a partial report."""
    tool_calls: list[CallReport] = Field(default_factory=list, description="Only where the answer holds tool calls.")
    fields: dict[str, ValueReport] = Field(default_factory=dict)
    """Only where JSON was asked for: the risk of every object, list and value in it, by its path (`$.person.age`,
    `$.items[0].name`, `$['other name']`). A value that was cut off has no entry."""
    finish_reason: FinishReason | None = None
    """Only from `cocoa serve`: the engine's reason for the end of the answer."""
    verdict: str | None = None
    """Only from `cocoa serve`: one or two sentences for a person, on the risk of the answer as a whole."""
    edits: list[EditReport] = Field(default_factory=list)
    """Only where a mark, a marker of a citation or a gate changed the text: the changes. All other offsets refer to the
    changed text."""
    gate: GateReport | None = Field(None, description="Only where a gate or a retry acted on the answer.")
    text_length: int = 0
    """Only in a compact report of a text that was changed at its end: the number of its characters."""
    parts: list[PartReport] = Field(default_factory=list)
    """Only where a LlamaIndex response shows something else than one complete answer, such as several answers: the
    answers in it. Offsets of spans then refer to the text of the response."""
    partial: bool = False
    """Only in the reports of callbacks, and then true: the answer was interrupted, and `spans` holds the spans decided
    before that."""

    @classmethod
    def of(
        cls,
        generation: Generation,
        *,
        parts: Sequence[Part] | None = None,
        answer_start: int = 0,
        answered: Generation | None = None,
        rivals: bool = False,
    ) -> RiskReport:
        """The report of a complete answer.

        Args:
            parts: the part of each span; ``None`` if the model did not reason.
            answer_start: the offset at which the answer begins, after any reasoning.
            answered: the generation without its reasoning.
            rivals: whether spans list the candidates that competed.
        """
        answered = answered or generation
        has_source = not generation.closed_book
        units = MeasuredText(generation.text, generation.spans, begin=answer_start, has_source=has_source)
        claims, sentences = (
            [kind(start=unit.start, end=unit.end, risk=unit.risk) for unit in of_kind]
            for kind, of_kind in ((ClaimReport, units.claims), (SentenceReport, units.sentences))
        )
        report = cls.of_spans(
            [
                SpanReport.of(span, number, None if parts is None else parts[number], rivals=rivals)
                for number, span in enumerate(generation.spans)
            ],
            method=generation.config.method,
            risk_source=generation.risk_source,
            threshold=generation.threshold,
            answer_risk=answered.answer_risk,
            answer_risk_source=answered.answer_risk_source,
            answer_threshold=generation.answer_threshold,
            model_name=generation.model_name,
            out_of_domain=answered.out_of_domain or None,
            answer_out_of_domain=answered.answer_out_of_domain or None,
            source_heads=generation.source_heads,
            check=[CheckReport(**check.__dict__) for check in units.check_these()],
            claims=claims,
            sentences=sentences,
        )
        if report.reasoning is None:
            return report
        return report.with_values(reasoning=report.reasoning.with_values(answer_start=answer_start))

    @classmethod
    def of_spans(cls, spans: Sequence[SpanReport], **values: Any) -> RiskReport:
        """The report of some spans, those of reasoning included, with further fields that are not ``None``."""
        names = ("method", "risk_source", "threshold", "answer_risk", "answer_risk_source", "answer_threshold")
        absent = dict.fromkeys(names)
        values = {**absent, **{name: value for name, value in values.items() if value is not None}}
        if any(span.part is not None for span in spans):
            thoughts = [span for span in spans if span.is_reasoning]
            values["reasoning"] = ReasoningReport(**_risk_of(thoughts), spans=[span.span for span in thoughts])
        return cls(
            **_risk_of([span for span in spans if not span.is_reasoning]),
            schema_version=1,
            calibrated=values["risk_source"] == "calibrator",
            spans=list(spans),
            **values,
        )

    @property
    def begin(self) -> int:
        """The offset, among those of the spans, of the first character of the answer, after any reasoning."""
        return 0 if self.reasoning is None else self.reasoning.answer_start

    @property
    def answer_spans(self) -> list[SpanReport]:
        """The spans of the answer, without those of its reasoning."""
        return [span for span in self.spans if not span.is_reasoning]

    @property
    def risk_meaning(self) -> str | None:
        """What the risks are, for a reader without statistics; ``None`` if it is not known."""
        return SOURCES.get(self.risk_source or "")

    @property
    def has_answer_risk(self) -> bool:
        """Whether a calibrator measured the answer as a whole. A risk that is not a finite number is ``None`` here."""
        return self.answer_risk is not None or (self.answer_threshold is not None and bool(self.answer_spans))

    def compact(self, text: str | None = None, reasoning: str = "") -> RiskReport:
        """The report without what can be derived from the rest of the answer, and without its ``claims``.

        A span has no ``flagged`` or ``reaches_max_risk`` if it is false, no ``candidates`` if there were none, no
        ``source_attention`` if it was not measured, and no ``con_mlds`` or ``f_mlds`` if it is the risk. Spans have no
        texts if the stored texts have them. Spans without visible text keep theirs, so that thresholds can still leave
        them out if the text of the answer is changed later.

        Args:
            text, reasoning: the texts of the answer and of its reasoning, which are stored with the report, if any is.
        """
        values: dict[str, Any] = {"is_compact": True}
        texts = {} if text is None else {"answer": (text, self.begin)}
        if reasoning:
            texts["reasoning"] = reasoning, "".join(span.text or "" for span in self.spans).find(reasoning)
        if self.reasoning is not None:  # the part of each span says which spans it has
            start = texts.get("reasoning", ("", -1))[1]
            values["reasoning"] = self.reasoning.without("spans").with_values(
                **({"reasoning_start": start} if start >= 0 else {})
            )
        if self.check:
            empty = [[name for name in ("reasons", "competing") if not getattr(check, name)] for check in self.check]
            checks = zip(self.check, empty, strict=True)
            values["check"] = [check.without("kind", "spans", *names) for check, names in checks]
        if text is not None and self._length != len(text):
            values["text_length"] = len(text)
        values["spans"] = []
        for span in self.spans:
            dropped = [name for name, value in span._derived.items() if getattr(span, name) == value]
            if span.text is not None and span.text.strip() and span.text == _stored(span, texts):
                dropped.append("text")
            values["spans"].append(span.without("span", "score", "chosen", *dropped))
        return self.without("claims").with_values(**values)

    def expanded(self, text: str, reasoning: str = "") -> RiskReport:
        """The report with what can be derived for its spans: all but ``score`` and ``chosen``.

        A full report is returned as it is. If a text is no longer the one that was stored with the report, its spans
        get no texts.

        Args:
            text, reasoning: the texts of the answer and of its reasoning, which are stored with the report.
        """
        if not self.is_compact:
            return self
        values: dict[str, Any] = {"spans": []}
        texts: dict[str, tuple[str, int]] = {}
        if len(text) == (self.text_length if "text_length" in self.model_fields_set else self._length):
            texts["answer"] = text, self.begin
        if self.reasoning is not None:
            if "reasoning_start" in self.reasoning.model_fields_set:
                texts["reasoning"] = reasoning, self.reasoning.reasoning_start
            numbers = [number for number, span in enumerate(self.spans) if span.is_reasoning]
            values["reasoning"] = self.reasoning.without("reasoning_start").with_values(spans=numbers)
        for number, span in enumerate(self.spans):
            derived = {**span._derived, "span": number}
            if (stored := _stored(span, texts)) is not None:
                derived["text"] = stored
            missing = {name: value for name, value in derived.items() if name not in span.model_fields_set}
            values["spans"].append(span.with_values(**missing))
        return self.without("text_length").with_values(**values)

    @property
    def summary(self) -> RiskSummary:
        """What the report says about the answer as a whole."""
        names = self.model_fields_set.intersection(RiskSummary.model_fields)
        return RiskSummary(**{name: getattr(self, name) for name in names})

    @property
    def _length(self) -> int:
        """The number of characters of the text that is shown, unless it was changed at its end."""
        return max(self.spans[-1].end - self.begin, 0) if self.spans else 0


def _stored(span: SpanReport, texts: dict[str, tuple[str, int]]) -> str | None:
    """The text at the offsets of a span, from the stored text of each part, and its begin; ``None`` if outside."""
    text, begin = texts.get(span.part or "answer", ("", -1))
    start, end = span.start - begin, span.end - begin
    return text[start:end] if begin >= 0 <= start and end <= len(text) else None


def measured_text(spans: Sequence[SpanReport], value: Callable[[SpanReport], float | None]) -> MeasuredText | None:
    """An answer whose claims and sentences have a value of its spans as their risk; ``None`` if a span has no text.

    The spans are consecutive, and belong to the answer, not to its reasoning.
    """
    texts = [span.text for span in spans if span.text is not None]
    if len(texts) < len(spans):
        return None
    text = "".join(texts)
    offset = spans[0].end - len(texts[0]) if spans else 0
    # not their own offsets: in the text that is shown, marks may stand between them
    ends = list(accumulate(map(len, texts), initial=offset))
    without_tokens: dict[str, Any] = {"token_log_probs": []}  # they are not in a report
    empty = Span.model_construct(**without_tokens)
    parts = [
        empty.model_copy(update={"start": start, "end": end, "risk": value(span)})
        for span, (start, end) in zip(spans, pairwise(ends), strict=True)
    ]
    tag = text.find(CLOSING) if any(span.part is not None for span in spans) else -1
    begin = offset + tag + len(CLOSING) if tag >= 0 else 0
    return MeasuredText(text, parts, begin=begin, offset=offset)


def _value(entry: SpanReport | ValueReport, metric: Metric) -> float:
    if metric == "self_information":
        return severity(None if entry.log_prob is None else -entry.log_prob)
    return severity(getattr(entry, metric))


def _risk_of(spans: Sequence[SpanReport]) -> dict[str, Any]:
    risks = [finite(span.risk) for span in spans if not span.is_unmeasured]
    measured = [risk for risk in risks if risk is not None]
    unknown = len(measured) < len(risks)  # neither the highest nor the mean is known then
    return {
        "max_risk": None if unknown else max(measured, default=0.0),
        "mean_risk": None if unknown else sum(measured) / len(measured) if measured else 0.0,
        "risk_points": sum(span.kind == "risk_point" for span in spans),
    }
