"""The types of the metadata that the adapters attach to answers. Plain Python values only: every entry is valid JSON.

For type checkers: ``report = cast(RiskReport, get_risk(message))``; at run time the values are plain dictionaries. The
metadata page of the documentation is generated from the descriptions here, and the tests validate real answers of every
adapter against these types.
"""

from typing import Annotated, Any, Literal

from typing_extensions import NotRequired, TypedDict

__all__ = ["AgentRiskEntry", "ArgumentEntry", "RiskReport", "RiskSummary", "SpanEntry", "ToolCallEntry", "TryEntry"]


class SpanEntry(TypedDict):
    """One entry of ``cocoa_spans``, and of ``spans`` in ``cocoa_risk``."""

    span: Annotated[NotRequired[int], "Number of the span in the answer, from 0. Not in a compact report."]
    start: Annotated[int, "Offset of the span's first character in the generated text."]
    end: Annotated[int, "Offset after the span's last character."]
    text: Annotated[
        NotRequired[str],
        "Text of the span. The texts of all spans concatenate to the generated text. Left out in a compact report if "
        "the text of the answer has it at these offsets.",
    ]
    kind: Annotated[
        Literal["greedy", "risk_point", "given"],
        "`risk_point`: several candidates competed and this one was kept. `greedy`: no token competed. `given`: the "
        "text was scored, not generated.",
    ]
    con_mlds: Annotated[
        NotRequired[float],
        "ConMLDS: disagreement of consecutive middle layers, between 0 and 2. Left out in a compact report if it is "
        "the risk.",
    ]
    f_mlds: Annotated[
        NotRequired[float],
        "fMLDS: disagreement of the middle layers with the final layer, between 0 and 2. Left out in a compact report "
        "if it is the risk.",
    ]
    log_prob: Annotated[float, "Log-probability of the span in nats: sum or mean over its tokens (`span_log_prob`)."]
    score: Annotated[
        NotRequired[float], "Score by which the method ranks candidates. Higher is better. Not in a compact report."
    ]
    risk: Annotated[
        float,
        "Risk of the span. A probability in [0, 1] if the report's `calibrated` is true, otherwise the raw MLDS that "
        "the setting `metric` selects.",
    ]
    reaches_max_risk: Annotated[
        NotRequired[bool],
        "Whether decoding stopped after this span because its risk reached `max_risk`. Left out in a compact report if "
        "it is false.",
    ]
    candidates: Annotated[
        NotRequired[int],
        "Number of candidates that competed; 0 where none did. Left out in a compact report if it is 0.",
    ]
    chosen: Annotated[
        NotRequired[int | None],
        "Index of the kept candidate at a risk point, otherwise `None`. Not in a compact report.",
    ]
    context_lift: Annotated[
        NotRequired[float | None],
        "Only where context lift is measured: `log_prob` with the context minus `log_prob` without it, in nats. `None` "
        "for a span without a token of its own.",
    ]
    con_mlds_lift: Annotated[NotRequired[float | None], "Like `context_lift`, for `con_mlds`."]
    f_mlds_lift: Annotated[NotRequired[float | None], "Like `context_lift`, for `f_mlds`."]


class ArgumentEntry(TypedDict):
    """One value of ``fields`` in ``cocoa_risk``, or of ``arguments`` in an entry of ``tool_calls``."""

    risk: Annotated[float, "Highest risk of any span that shares a character with the value."]
    con_mlds: Annotated[float, "Mean ConMLDS of these spans."]
    f_mlds: Annotated[float, "Mean fMLDS of these spans."]
    log_prob: Annotated[float, "Sum of the log-probabilities of the value's own tokens. Forced tokens count 0."]
    start: Annotated[int, "Offset of the value's first character in the generated text, without quotes."]
    end: Annotated[int, "Offset after the value's last character."]
    spans: Annotated[list[int], "Numbers of these spans."]


class ToolCallEntry(TypedDict):
    """One entry of ``tool_calls`` in ``cocoa_risk``."""

    name: Annotated[str | None, "Name of the tool; `None` if the call ends before it is complete."]
    id: Annotated[str, "Id of the call, as in the framework's own list of tool calls."]
    risk: Annotated[float, "Highest risk of any span of the call, its name included."]
    arguments: Annotated[
        dict[str, ArgumentEntry],
        "Risk of each argument, by name, and of every value inside an argument, by its path (`$.people[0].age`).",
    ]
    error: Annotated[str | None, "Why the call cannot be made; `None` if it can."]


class RiskSummary(TypedDict):
    """What a ``cocoa_risk`` report says about the answer as a whole."""

    schema: Annotated[Literal[1], "Version of this schema. It changes when a key changes its meaning or is removed."]
    method: Annotated[str | None, "Decoding method, such as `cocoa-sig`; `None` in a partial report."]
    max_risk: Annotated[float, "Highest risk of any span; 0.0 without spans."]
    mean_risk: Annotated[float, "Mean risk of the spans; 0.0 without spans."]
    calibrated: Annotated[bool, "Whether the risks of spans are calibrated probabilities."]
    answer_risk: Annotated[
        float | None, "Probability that the answer is wrong as a whole; `None` without a calibrator for answers."
    ]
    risk_points: Annotated[int, "Number of spans of kind `risk_point`."]
    compact: Annotated[
        NotRequired[bool], "Only in a compact report, and then true: nothing is written twice. See `risk_metadata`."
    ]


class RiskReport(RiskSummary):
    """The ``cocoa_risk`` report of one answer."""

    spans: Annotated[list[SpanEntry], "Every span of the answer, in order."]
    tool_calls: Annotated[NotRequired[list[ToolCallEntry]], "Only where the answer holds tool calls."]
    fields: Annotated[
        NotRequired[dict[str, ArgumentEntry]],
        "Only where JSON was asked for: the risk of every object, list and value in it, by its path (`$.person.age`, "
        "`$.items[0].name`, `$['other name']`). A value that was cut off has no entry.",
    ]
    partial: Annotated[
        NotRequired[bool],
        "Only in the reports of callbacks, and then true: the answer was interrupted, and `spans` holds the spans "
        "decided before that.",
    ]


class AgentRiskEntry(TypedDict):
    """One entry of ``cocoa_risks`` in the state of an agent with ``RiskMiddleware``: one for each model call."""

    report: Annotated[
        RiskReport | RiskSummary | None,
        "Report of the answer that was kept; `None` if its model measures no risk. Without its lists if it is compact, "
        "because the message in the same state has them.",
    ]
    value: Annotated[float | None, "Highest value of the middleware's metric in that answer; `None` without a report."]
    action: Annotated[
        Literal["none", "keep", "mark", "abstain"], "`none` if the answer passed, otherwise what the middleware did."
    ]
    attempts: Annotated[list[float | None], "Value of every answer that was tried, in order, the first included."]


class TryEntry(TypedDict):
    """One entry of ``cocoa_tries`` in the response metadata of ``RiskRetryQueryEngine``: one for each try."""

    alpha: Annotated[float, "The setting `alpha` of this try."]
    top_k: Annotated[
        int | None, "Number of nodes requested from the retriever; `None` if the retriever has no such option."
    ]
    source_nodes: Annotated[int, "Number of nodes that were retrieved."]
    answer: Annotated[str, "Text of the answer."]
    cocoa_risk: Annotated[RiskReport | None, "Report of the answer; `None` where nothing was retrieved to answer from."]
    risk: Annotated[float | None, "The value that is compared with the threshold; `None` without a report."]
    chosen: Annotated[bool, "Whether this answer was returned."]


METADATA: dict[str, Any] = {
    "cocoa_spans": list[SpanEntry],
    "cocoa_risk": RiskReport,
    "cocoa_reports": list[RiskReport],
    "cocoa_risks": list[AgentRiskEntry],
    "cocoa_tries": list[TryEntry],
}
"""The type of each metadata key."""
