"""A person's decision on a risky answer of an agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cocoa_engine.optional import need

need("langchain.agents", extra="agents", what="RiskMiddleware")

from langchain.agents.middleware import ExtendedModelResponse, ModelResponse
from langchain_core.messages import AIMessage, message_to_dict, messages_from_dict
from langgraph.types import Command, interrupt
from typing_extensions import NotRequired, TypedDict

from cocoa_integrations._shared.detail import summary
from cocoa_integrations._shared.limits import Limit

DecisionType = Literal["accept", "edit", "abstain"]


class ReviewRequest(TypedDict):
    """The value of the interrupt of :class:`~cocoa_integrations.langchain.RiskMiddleware`. All values are plain."""

    type: Literal["risky_answer"]
    answer: str
    """The text of the answer."""
    tool_calls: list[dict[str, Any]]
    """The name, the arguments and the id of each tool call of the answer."""
    spans: list[dict[str, Any]]
    """The spans that reach the threshold. Where the risk of the answer was compared by default, those that reach the
    default threshold of spans; none with ``metric="answer_risk"``."""
    report: dict[str, Any]
    """The ``cocoa_risk`` report."""
    metric: str
    threshold: float
    value: float | None
    """The highest value of the spans, or the risk of the answer; ``None`` if it is not a finite number."""
    decisions: list[DecisionType]
    """The decisions that are possible. A structured answer cannot be edited."""
    error: NotRequired[str]
    """Why the agent has stopped again: what is wrong with the last decision."""


@dataclass(frozen=True)
class Chosen:
    """The answer that is left after all attempts, and its entry in ``cocoa_risks`` without the action."""

    model_response: ModelResponse[Any]
    entry: dict[str, Any]

    @property
    def message(self) -> AIMessage:
        """The message of the model; further results belong to structured output."""
        return next(message for message in self.model_response.result if isinstance(message, AIMessage))

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The spans of the answer; empty if its model measures no risk."""
        return [] if self.entry["report"] is None else list(self.entry["report"]["spans"])

    def risky(self, limit: Limit) -> bool:
        """Whether the answer is too risky. An answer without a report is not."""
        return self.entry["report"] is not None and limit.reached(self.entry["report"])

    @property
    def structured(self) -> bool:
        """Whether the answer was parsed into an object."""
        return self.model_response.structured_response is not None

    def required_report(self) -> dict[str, Any]:
        """The report of a risky answer."""
        report: dict[str, Any] = self.entry["report"]
        return report

    def to_plain(self) -> dict[str, Any]:
        """A form for checkpoints: plain values, besides the object of a structured answer."""
        return {
            "messages": [message_to_dict(message) for message in self.model_response.result],
            "structured_response": self.model_response.structured_response,
            "entry": self.entry,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Chosen:
        """The answer of :meth:`to_plain`."""
        messages: list[Any] = messages_from_dict(plain["messages"])
        return cls(ModelResponse(messages, plain["structured_response"]), plain["entry"])

    def response(self, action: str, replaced: AIMessage | None = None) -> ExtendedModelResponse[Any]:
        """The answer, and the update of the state.

        Args:
            action: what was done about the risk.
            replaced: a message that takes the place of the answer. It gets a new id.
        """
        report = summary(self.entry["report"])  # the message, which is in the state too, has its spans
        update: dict[str, Any] = {"cocoa_risks": [{**self.entry, "report": report, "action": action}]}
        response = self.model_response
        if replaced is not None:
            # a new id, because a different message was streamed under the old one
            replaced = replaced.model_copy(update={"id": None})
            if action == "abstain":
                response = ModelResponse(result=[replaced])  # without results of the dropped tool calls
                update["jump_to"] = "end"  # an agent with a response format would retry until it gets one
            else:
                result = [replaced if one is self.message else one for one in response.result]
                response = ModelResponse(result=result, structured_response=response.structured_response)
        return ExtendedModelResponse(model_response=response, command=Command(update=update))


def review(chosen: Chosen, limit: Limit) -> Mapping[str, Any]:
    """Stop the run until a person has decided what becomes of a risky answer.

    Returns:
        The decision: ``type``, and the ``text`` of an edit.
    """
    decisions: list[DecisionType] = ["accept", "abstain"] if chosen.structured else ["accept", "edit", "abstain"]
    request = ReviewRequest(
        type="risky_answer",
        answer=chosen.message.text,
        tool_calls=[{key: call[key] for key in ("name", "args", "id")} for call in chosen.message.tool_calls],
        spans=limit.risky(chosen.spans, chosen.entry["report"]),
        report=chosen.required_report(),
        metric=limit.metric_for(chosen.required_report()),
        threshold=limit.threshold_for(chosen.required_report()),
        value=chosen.entry["value"],
        decisions=decisions,
    )
    decision = interrupt(request)
    while (error := _error(decision, decisions)) is not None:
        decision = interrupt({**request, "error": error})
    checked: Mapping[str, Any] = decision
    return checked


def _error(decision: Any, decisions: list[DecisionType]) -> str | None:
    kind = decision.get("type") if isinstance(decision, Mapping) else None
    if kind not in decisions:
        forms = {
            "accept": '{"type": "accept"}',
            "edit": '{"type": "edit", "text": ...}',
            "abstain": '{"type": "abstain"}',
        }
        return f"resume with {' or '.join(forms[known] for known in decisions)}, not {decision!r}"
    if kind == "edit" and not isinstance(decision.get("text"), str):
        return f'an edit needs the new answer: {{"type": "edit", "text": ...}}, not {decision!r}'
    return None
