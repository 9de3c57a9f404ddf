"""The types of the metadata that the adapters attach to answers. Plain Python values only: every entry is valid JSON.

A number that is not finite (NaN or infinite) is ``None``. Gates, retries and judges treat it as above every threshold.

For type checkers: ``report = cast(RiskReport, get_risk(message))``; at run time the values are plain dictionaries. The
metadata page of the documentation is generated from the descriptions here, and the tests validate real answers of every
adapter against these types.
"""

from typing import Annotated, Any, Literal

from typing_extensions import NotRequired, TypedDict

__all__ = [
    "AgentRiskEntry",
    "ArgumentEntry",
    "CheckEntry",
    "CitationEntry",
    "ClaimEntry",
    "EditEntry",
    "PartEntry",
    "ReasoningEntry",
    "RiskReport",
    "RiskSummary",
    "RivalEntry",
    "SentenceEntry",
    "SpanEntry",
    "ToolCallEntry",
    "TryEntry",
]


class RivalEntry(TypedDict):
    """One entry of ``rivals`` of a span: a candidate that competed in it."""

    text: Annotated[str, "Text of the candidate."]
    log_prob: Annotated[float | None, "Log-probability of the candidate in nats."]
    con_mlds: Annotated[float | None, "ConMLDS of the candidate."]
    f_mlds: Annotated[float | None, "fMLDS of the candidate."]
    score: Annotated[float | None, "Score by which the method ranks candidates. Higher is better."]
    is_greedy: Annotated[bool, "Whether greedy decoding would have taken its first token."]


class SpanEntry(TypedDict):
    """One entry of ``cocoa_spans``, and of ``spans`` in ``cocoa_risk``."""

    span: Annotated[NotRequired[int], "Number of the span in the answer, from 0. Not in a compact report."]
    start: Annotated[
        int,
        "Offset of the span's first character in the text that is shown: the generated text with the changes in "
        "`edits`. White space at the ends of a marked span is left out.",
    ]
    end: Annotated[int, "Offset after the span's last character."]
    text: Annotated[
        NotRequired[str],
        "Text of the span as it was generated. The texts of all spans concatenate to the generated text. Left out in a "
        "compact report if the text of the answer has it at these offsets.",
    ]
    kind: Annotated[
        Literal["greedy", "risk_point", "given"],
        "`risk_point`: several candidates competed and this one was kept. `greedy`: no token competed. `given`: the "
        "text was scored, not generated.",
    ]
    con_mlds: Annotated[
        NotRequired[float | None],
        "ConMLDS: disagreement of consecutive middle layers, between 0 and 2. Left out in a compact report if it is "
        "the risk.",
    ]
    f_mlds: Annotated[
        NotRequired[float | None],
        "fMLDS: disagreement of the middle layers with the final layer, between 0 and 2. Left out in a compact report "
        "if it is the risk.",
    ]
    log_prob: Annotated[
        float | None, "Log-probability of the span in nats, by default the sum over its tokens (`span_log_prob`)."
    ]
    score: Annotated[
        NotRequired[float | None],
        "Score by which the method ranks candidates. Higher is better. Not in a compact report.",
    ]
    risk: Annotated[
        float | None,
        "Risk of the span, in [0, 1] unless a raw MLDS was asked for. `risk_source` of the report says what it is. "
        "`None` if it was not measured or is not a finite number; the latter is `flagged`.",
    ]
    flagged: Annotated[
        NotRequired[bool],
        "Whether the risk reaches `threshold` of the report, or is not a finite number. Left out in a compact report "
        "if it is false.",
    ]
    source_attention: Annotated[
        NotRequired[float | None],
        "Mean attention mass of the model's retrieval heads on the prompt, its first token left out, in [0, 1]; `None` "
        "if it was not measured. Left out in a compact report if it is `None`.",
    ]
    passage_attention: Annotated[
        NotRequired[list[float | None]],
        "Only where the passages of the prompt were given: the same for each passage, in their order. In a response of "
        "LlamaIndex for each of its `source_nodes`, in that of a judge for each of its contexts, and `None` for one "
        "that was not in the prompt of the answer.",
    ]
    reaches_max_risk: Annotated[
        NotRequired[bool],
        "Whether decoding stopped after this span because its risk reached `max_risk`. Left out in a compact report if "
        "it is false.",
    ]
    out_of_domain: Annotated[
        NotRequired[bool],
        "Only if true: the span is unlike those that the calibrator was fitted on, and its risk may be meaningless.",
    ]
    repeats: Annotated[
        NotRequired[bool],
        "Only if true: the answer runs in a loop where the span ends: its last 24 tokens are one sequence of at most 8 "
        "tokens, over and over. Such tokens are probable, so that the risk is low.",
    ]
    candidates: Annotated[
        NotRequired[int],
        "Number of candidates that competed; 0 where none did. Left out in a compact report if it is 0.",
    ]
    chosen: Annotated[
        NotRequired[int | None],
        "Index of the kept candidate at a risk point, otherwise `None`. Not in a compact report.",
    ]
    index: Annotated[
        NotRequired[int],
        "Only from `cocoa serve`: the same as `span`. Clients of OpenAI join the lists of a stream by it.",
    ]
    rivals: Annotated[
        NotRequired[list[RivalEntry]],
        "Only from `cocoa serve`, where `cocoa` has `candidates`: all candidates of the span, the kept one included.",
    ]
    part: Annotated[
        NotRequired[Literal["reasoning", "answer"]],
        "Only where the model reasoned: the part of the text that the span belongs to. A span with the tag `</think>` "
        "belongs to the answer if it has visible text after the tag.",
    ]
    context_lift: Annotated[
        NotRequired[float | None],
        "Only where context lift is measured: `log_prob` with the context minus `log_prob` without it, in nats. `None` "
        "for a span without a token of its own.",
    ]
    con_mlds_lift: Annotated[NotRequired[float | None], "Like `context_lift`, for `con_mlds`."]
    f_mlds_lift: Annotated[NotRequired[float | None], "Like `context_lift`, for `f_mlds`."]
    source: Annotated[
        NotRequired[int | None], "Only with citations: number of the cited source, from 1; `None` if none is cited."
    ]
    source_lifts: Annotated[
        NotRequired[list[float | None]],
        "Only with citations by lift: for each source, log p of the span with all sources minus log p without this "
        "one, in nats; `None` if the source was not in the prompt.",
    ]
    source_attentions: Annotated[
        NotRequired[list[float | None]],
        "Only with citations by attention: for each source, the span's attention on it; `None` if the source was not "
        "in the prompt.",
    ]


class CheckEntry(TypedDict):
    """One entry of ``check`` in ``cocoa_risk``: a claim that is worth checking first."""

    text: Annotated[str, "Text of the claim: a name, number, date, short quotation or content word."]
    start: Annotated[int, "Offset of its first character, as for spans."]
    end: Annotated[int, "Offset after its last character."]
    kind: Annotated[
        NotRequired[Literal["word", "name", "number", "date", "quote"]], "What it is. Not in a compact report."
    ]
    risk: Annotated[float | None, "Highest risk of its spans."]
    reasons: Annotated[
        NotRequired[list[str]],
        "Why it may be wrong: `not in the source`, `little attention to the source`, `the model was unsure`, "
        "`competing: ...`. Left out in a compact report if there is none.",
    ]
    competing: Annotated[
        NotRequired[list[str]],
        "What other candidates of its spans say in its place, likeliest first. Left out in a compact report if there "
        "is nothing.",
    ]
    spans: Annotated[NotRequired[list[int]], "Numbers of its spans. Not in a compact report."]


class ClaimEntry(TypedDict):
    """One entry of ``claims`` in ``cocoa_risk``."""

    start: Annotated[int, "Offset of its first character, as for spans."]
    end: Annotated[int, "Offset after its last character."]
    risk: Annotated[float | None, "Highest risk of its spans."]


class SentenceEntry(TypedDict):
    """One entry of ``sentences`` in ``cocoa_risk``."""

    start: Annotated[int, "Offset of its first character, as for spans."]
    end: Annotated[int, "Offset after its last character."]
    risk: Annotated[float | None, "Mean risk of its three riskiest claims; without a claim, the highest of its spans."]


class ArgumentEntry(TypedDict):
    """One value of ``fields`` in ``cocoa_risk``, or of ``arguments`` in an entry of ``tool_calls``."""

    risk: Annotated[float | None, "Highest risk of any span that shares a character with the value."]
    con_mlds: Annotated[float | None, "Mean ConMLDS of these spans."]
    f_mlds: Annotated[float | None, "Mean fMLDS of these spans."]
    log_prob: Annotated[float | None, "Sum of the log-probabilities of the value's own tokens. Forced tokens count 0."]
    start: Annotated[int, "Offset of the value's first character, as for spans, without quotes."]
    end: Annotated[int, "Offset after the value's last character."]
    spans: Annotated[list[int], "Numbers of these spans."]


class ToolCallEntry(TypedDict):
    """One entry of ``tool_calls`` in ``cocoa_risk``."""

    name: Annotated[str | None, "Name of the tool; `None` if the call ends before it is complete."]
    id: Annotated[str, "Id of the call, as in the framework's own list of tool calls."]
    risk: Annotated[float | None, "Highest risk of any span of the call, its name included."]
    arguments: Annotated[
        dict[str, ArgumentEntry],
        "Risk of each argument, by name, and of every value inside an argument, by its path (`$.people[0].age`).",
    ]
    error: Annotated[str | None, "Why the call cannot be made; `None` if it can."]


class ReasoningEntry(TypedDict):
    """``reasoning`` in ``cocoa_risk``: the risk of the reasoning, which does not count in the other values."""

    max_risk: Annotated[float | None, "Highest risk of any span of the reasoning; 0.0 without spans."]
    mean_risk: Annotated[float | None, "Mean risk of these spans; 0.0 without spans."]
    risk_points: Annotated[int, "Number of these spans of kind `risk_point`."]
    spans: Annotated[
        NotRequired[list[int]], "Numbers of these spans. Not in a compact report, where `part` of the spans tells."
    ]
    reasoning_start: Annotated[
        NotRequired[int],
        "Only in a compact report: offset in the generated text of the reasoning that the message has, from which the "
        "texts of spans are left out.",
    ]
    answer_start: Annotated[
        NotRequired[int],
        "Offset in the generated text of the answer, which is the text of the message. Missing in a report of a "
        "LlamaIndex response, whose offsets count from the beginning of its text.",
    ]


class EditEntry(TypedDict):
    """One entry of ``edits`` in ``cocoa_risk``: a change that a mark, a marker or a gate made."""

    start: Annotated[int, "Offset in the generated text of the first character that it concerns."]
    end: Annotated[int, "Offset after the last one; `start` for a marker of a citation."]
    before: Annotated[NotRequired[str], "What was inserted before them."]
    after: Annotated[NotRequired[str], "What was inserted after them."]
    text: Annotated[NotRequired[str], "What replaced them."]
    was: Annotated[NotRequired[str], "What was replaced. Missing if it is the whole answer."]


class PartEntry(TypedDict):
    """One entry of ``parts`` in ``cocoa_risk``: a stretch of the response that one answer wrote."""

    start: Annotated[int, "Offset of its first character in the text of the response."]
    end: Annotated[int, "Offset after its last character."]
    report: Annotated[int, "Index of the answer's own report in `cocoa_reports`."]


class RiskSummary(TypedDict):
    """What a ``cocoa_risk`` report says about the answer as a whole."""

    schema: Annotated[Literal[1], "Version of this schema. It changes when a key changes its meaning or is removed."]
    method: Annotated[str | None, "Decoding method, such as `cocoa-sig`; `None` in a partial report."]
    model_name: Annotated[NotRequired[str], "Name of the model; missing in a partial report."]
    run_id: Annotated[
        NotRequired[str],
        "Only in the reports of callbacks, collectors and events: the id of the LangChain run, or of LlamaIndex's span "
        "of the LLM call.",
    ]
    max_risk: Annotated[float | None, "Highest risk of any span of the answer, without reasoning; 0.0 without spans."]
    mean_risk: Annotated[float | None, "Mean risk of the spans of the answer, without reasoning; 0.0 without spans."]
    risk_source: Annotated[
        Literal["calibrator", "source_attention", "token_probability", "f_mlds", "con_mlds"] | None,
        "Where the risks of spans come from: `calibrator`, an estimated probability; `source_attention`, the rank of "
        "the span's source attention among spans of the model; `token_probability`, 1 - p of its least probable token; "
        "`f_mlds` or `con_mlds`, a raw MLDS, which the setting `risk` asks for. `None` without spans, in a partial "
        "report, and where answers with different sources are joined.",
    ]
    calibrated: Annotated[bool, "Whether the risks of spans are calibrated probabilities."]
    threshold: Annotated[
        float | None,
        "Risk from which spans are flagged: the calibrator's threshold, or the default of `risk_source`. `None` for a "
        "raw MLDS, and where answers with different sources are joined.",
    ]
    answer_threshold: Annotated[float | None, "Threshold of `answer_risk`; `None` without a calibrator for answers."]
    answer_risk: Annotated[
        float | None,
        "Probability that the answer is wrong as a whole, from its spans after the reasoning; `None` without a "
        "calibrator for answers.",
    ]
    out_of_domain: Annotated[
        NotRequired[bool],
        "Only if true: the answer is unlike those that the calibrator was fitted on, as a whole or in more than a "
        "tenth of its spans (at least two), and its risks may be meaningless.",
    ]
    source_heads: Annotated[
        NotRequired[Literal["spread"]],
        "Only where the model's retrieval heads are not known: `source_attention` of the spans is that of heads spread "
        "over the layers. `cocoa heads` finds the model's own.",
    ]
    risk_points: Annotated[int, "Number of spans of kind `risk_point` of the answer, without reasoning."]
    reasoning: Annotated[NotRequired[ReasoningEntry], "Only where the model reasoned: the risk of its reasoning."]
    compact: Annotated[
        NotRequired[bool], "Only in a compact report, and then true: nothing is written twice. See `risk_metadata`."
    ]


class RiskReport(RiskSummary):
    """The ``cocoa_risk`` report of one answer."""

    spans: Annotated[list[SpanEntry], "Every span of the generated text, in order, reasoning included."]
    check: Annotated[
        NotRequired[list[CheckEntry]],
        "The riskiest claims of the answer, riskiest first, at most three, of those with a risk of at least 0.25 or "
        "one that reaches the threshold. Empty for a raw MLDS. Claims as low as the lowest are left out. Missing in a "
        "partial report.",
    ]
    claims: Annotated[
        NotRequired[list[ClaimEntry]],
        "All names, numbers, dates, short quotations and content words of the answer, in order. Not in a compact or a "
        "partial report.",
    ]
    sentences: Annotated[
        NotRequired[list[SentenceEntry]], "The sentences of the answer, in order. Missing in a partial report."
    ]
    tool_calls: Annotated[NotRequired[list[ToolCallEntry]], "Only where the answer holds tool calls."]
    fields: Annotated[
        NotRequired[dict[str, ArgumentEntry]],
        "Only where JSON was asked for: the risk of every object, list and value in it, by its path (`$.person.age`, "
        "`$.items[0].name`, `$['other name']`). A value that was cut off has no entry.",
    ]
    finish_reason: Annotated[
        NotRequired[Literal["stop", "eos", "length", "risk"] | None],
        "Only from `cocoa serve`: the engine's reason for the end of the answer.",
    ]
    verdict: Annotated[
        NotRequired[str],
        "Only from `cocoa serve`: one or two sentences for a person, on the risk of the answer as a whole.",
    ]
    edits: Annotated[
        NotRequired[list[EditEntry]],
        "Only where a mark, a marker of a citation or a gate changed the text: the changes. All other offsets refer to "
        "the changed text.",
    ]
    text_length: Annotated[
        NotRequired[int],
        "Only in a compact report of a text that was changed at its end: the number of its characters.",
    ]
    parts: Annotated[
        NotRequired[list[PartEntry]],
        "Only where a LlamaIndex response shows something else than one complete answer, such as several answers: the "
        "answers in it. Offsets of spans then refer to the text of the response.",
    ]
    partial: Annotated[
        NotRequired[bool],
        "Only in the reports of callbacks, and then true: the answer was interrupted, and `spans` holds the spans "
        "decided before that.",
    ]


class CitationEntry(TypedDict):
    """One entry of ``cocoa_citations``: a part of the answer and the source that it was taken from."""

    source: Annotated[int, "Number of the node or document, from 1."]
    id: Annotated[str | None, "Id of the node or document."]
    metadata: Annotated[NotRequired[dict[str, Any]], "LangChain: metadata of the document."]
    start: Annotated[int, "Offset of the part's first character in the text."]
    end: Annotated[int, "Offset after its last character, before the marker."]
    text: Annotated[str, "Text of the part."]
    lift: Annotated[
        NotRequired[float],
        "Citations by lift: log p of the part with all sources minus log p without this one, in nats.",
    ]
    attention: Annotated[
        NotRequired[float], "Citations by attention: the part's mean attention on the source, in [0, 1]."
    ]
    spans: Annotated[list[int], "Numbers of its spans."]


class AgentRiskEntry(TypedDict):
    """One entry of ``cocoa_risks`` in the state of an agent with ``RiskMiddleware``: one for each model call."""

    report: Annotated[
        RiskReport | RiskSummary | None,
        "Report of the answer that was kept; `None` if its model measures no risk. Without its lists if it is compact, "
        "because the message in the same state has them.",
    ]
    value: Annotated[float | None, "Highest value of the middleware's metric in that answer; `None` without a report."]
    action: Annotated[
        Literal["none", "keep", "mark", "abstain", "accept", "edit"],
        "`none` if the answer passed, otherwise what the middleware did, or what a person decided.",
    ]
    attempts: Annotated[list[float | None], "Value of every answer that was tried, in order, the first included."]


class TryEntry(TypedDict):
    """One entry of ``cocoa_tries`` of ``RiskRetryQueryEngine`` (metadata) and ``with_risk_retry``: one for each try."""

    settings: Annotated[dict[str, Any], "The settings that this try changed."]
    alpha: Annotated[float, "The setting `alpha` of this try."]
    top_k: Annotated[
        int | None,
        "Number of nodes or documents requested from the retriever; `None` if the retriever has no such option.",
    ]
    source_nodes: Annotated[NotRequired[int], "LlamaIndex: number of nodes that were retrieved."]
    documents: Annotated[NotRequired[int], "LangChain: number of documents that were retrieved."]
    answer: Annotated[str, "Text of the answer."]
    cocoa_risk: Annotated[RiskReport | None, "Report of the answer; `None` where nothing was retrieved to answer from."]
    risk: Annotated[float | None, "The value that is compared with the threshold; `None` without a report."]
    chosen: Annotated[bool, "Whether this answer was returned."]


METADATA: dict[str, Any] = {
    "cocoa_spans": list[SpanEntry],
    "cocoa_risk": RiskReport,
    "cocoa_citations": list[CitationEntry],
    "cocoa_reports": list[RiskReport],
    "cocoa_risks": list[AgentRiskEntry],
    "cocoa_tries": list[TryEntry],
}
"""The type of each metadata key."""
