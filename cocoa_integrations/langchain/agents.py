"""Agents: middleware that acts on the risk of answers, and on that of the arguments of tool calls.

Needs the package ``langchain`` (extra ``agents``).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Annotated, Any, Literal

from cocoa_engine.optional import need

need("langchain.agents", extra="agents", what=__name__)

from langchain.agents.middleware import AgentMiddleware, AgentState, ExtendedModelResponse, ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolCall, ToolMessage, message_to_dict, messages_from_dict
from langgraph.constants import TAG_NOSTREAM
from langgraph.func import task
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command, interrupt
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from cocoa_engine import UnitLevel
from cocoa_engine.errors import ConfigError
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_engine.report import Metric, ReportEntry, RiskReport, RiskSummary, SpanReport, ValueReport, finite
from cocoa_integrations._shared.limits import ABSTENTION, MARK, GateMetric, Limit, Mark, reaches, require_known
from cocoa_integrations._shared.settings import refuse_unknown
from cocoa_integrations.langchain.answers import find_risk, get_risk, replaced
from cocoa_integrations.langchain.composed import Composed
from cocoa_integrations.langchain.gates import OnRisk as GateAction
from cocoa_integrations.langchain.gates import RiskGate, limit_of
from cocoa_integrations.langchain.options import FRAMEWORK, PER_CALL, TOOL_DETAILS, TOOLS
from cocoa_integrations.tool_calling import ROOT

OnRisk = Literal["keep", "raise", "mark", "abstain", "interrupt"]
Retry = BaseChatModel | Mapping[str, Any]


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


class RiskState(AgentState[Any]):
    """The state of an agent with the risk of the answers of its model.

    ``cocoa_risks`` has one entry for each model call of the agent, in order:

    - ``report``: the ``cocoa_risk`` report of the chosen answer; ``None`` if its model does not measure risk. If the
      report is compact, the lists that the message has (``spans``, ``tool_calls``, ``fields``) are left out;
    - ``value``: the value that was compared, by default ``answer_risk`` where the report has one, and otherwise the
      highest risk of its spans; ``None`` without a report, or if it is not a finite number;
    - ``action``: ``none`` if the answer is below the threshold, otherwise ``keep``, ``mark`` or ``abstain``, or what a
      person decided: ``accept``, ``edit`` or ``abstain``;
    - ``attempts``: the value of each attempt, including the first, in order.
    """

    cocoa_risks: NotRequired[Annotated[list[dict[str, Any]], add]]


class AgentRisk(ReportEntry):
    """One entry of ``cocoa_risks`` in the state of an agent with ``RiskMiddleware``: one for each model call."""

    report: RiskReport | RiskSummary | None = Field(
        description="Report of the answer that was kept; `None` if its model measures no risk. Without its lists "
        "if it is compact, because the message in the same state has them.",
    )
    value: float | None = Field(
        description="Highest value of the middleware's metric in that answer; `None` without a report.",
    )
    action: Literal["none", "keep", "mark", "abstain", "accept", "edit"] = Field(
        description="`none` if the answer passed, otherwise what the middleware did, or what a person decided.",
    )
    attempts: list[float | None] = Field(
        description="Value of every answer that was tried, in order, the first included.",
    )


class RiskMiddleware(AgentMiddleware[RiskState, Any, Any]):
    """Checks the risk of every answer of an agent's model, retries risky answers, and acts on the remaining risk.

    An answer is too risky if its risk, or that of one of its spans, reaches the threshold. The models and settings of
    ``retry_with`` are then tried in turn until an answer is below the threshold. If none is, the least risky answer is
    chosen among those whose value is of the same kind as that of the first one that was measured, and ``on_risk``
    determines what happens to it. Values are of one kind if the metric is the same and, for ``risk``, the
    ``risk_source`` of the reports too: the risks of a calibrator and of the source attention have no order. A
    ``threshold`` that is given applies to the answers of all models; leave it out where ``retry_with`` has models whose
    risk has another source, and each answer is compared with its own default. The state of the agent records every
    call; see :class:`RiskState`.

    **Streams.** With ``on_risk="keep"`` and no ``retry_with``, the chunks of the model are streamed as usual. Otherwise
    ``stream_mode="messages"`` yields the chosen answer in one piece, and nothing of the rejected ones.
    ``astream_events`` and callbacks receive every attempt as it runs.

    **Review.** With ``on_risk="interrupt"`` the agent stops at a risky answer, and a person decides. This needs a
    checkpointer. The value of the interrupt has the answer, its risky spans and its report, as plain values; see
    :class:`~cocoa_integrations.langchain.agents.ReviewRequest`. Until the decision, the answer is neither in the state
    nor in a stream of messages. Resume with ``Command(resume={"type": "accept"})``, with ``{"type": "edit", "text":
    ...}``, which replaces the text and keeps tool calls, or with ``{"type": "abstain"}``. After another value, the
    agent stops again, with an ``error``. The model is not called again: its answer is in the checkpoint. In an async
    agent this needs Python 3.11: only there does LangGraph set the context of async nodes.

    Args:
        threshold: as in :func:`~cocoa_integrations.langchain.risk_gate`.
        metric: the value to compare, as in ``risk_gate``.
        unit: what is compared: ``span``, ``claim`` or ``sentence``, as in ``risk_gate``.
        retry_with: what to try in turn: a chat model, or settings for a call of the agent's own model
            (``{"alpha": 6.0, "max_candidates": 16}``), or a list of these. Repeating the same greedy decoding would
            give the same answer. The answer of a model that does not measure risk is accepted.
        on_risk: ``keep`` the answer, with its risk in the state; ``raise`` a ``HallucinationRiskError``; ``mark`` the
            risky spans in the text; ``abstain``: reply with ``answer``, without tool calls and structured response,
            and end the agent; or ``interrupt``, and let a person decide.
        mark: how to mark a span, as in ``risk_gate``.
        answer: the text that replaces an answer with ``abstain``.

    Example:
        >>> middleware = RiskMiddleware(retry_with={"alpha": 6.0}, on_risk="abstain")
        >>> agent = create_agent(ChatCocoa(), tools=[], middleware=[middleware])
        >>> state = agent.invoke({"messages": [("user", "Who wrote Dune?")]})
        >>> state["cocoa_risks"][-1]["value"]

    Raises:
        ConfigError: an option is invalid. The agent raises it if the answer of its model has no report.
    """

    state_schema = RiskState

    def __init__(
        self,
        threshold: float | None = None,
        *,
        metric: GateMetric | None = None,
        unit: UnitLevel = "span",
        retry_with: Retry | Sequence[Retry] = (),
        on_risk: OnRisk = "keep",
        mark: Mark = MARK,
        answer: str = ABSTENTION,
    ) -> None:
        super().__init__()
        self.tools = []
        require_known("on_risk", on_risk, OnRisk)
        self.limit = limit_of(threshold, metric, unit, on_risk)
        action: GateAction = "raise" if on_risk == "keep" else "abstain" if on_risk == "interrupt" else on_risk
        gate = RiskGate(threshold, metric=metric, unit=unit, on_risk=action, mark=mark, answer=answer)
        self.on_risk = on_risk
        self.gate = None if on_risk == "keep" else gate
        self.retries = list(retry_with) if isinstance(retry_with, Sequence) else [retry_with]
        for retry in self.retries:
            if not isinstance(retry, (BaseChatModel, Composed, Mapping)):
                raise ConfigError(
                    f"retry_with takes chat models and dicts of settings, not a {type(retry).__name__}; "
                    "give options to the constructor of a model of another package instead of binding them"
                )
            if isinstance(retry, Mapping):
                refuse_unknown(retry, {*PER_CALL, *TOOLS, *TOOL_DETAILS, *FRAMEWORK}, what="retry_with")

    @property
    def name(self) -> str:
        """A name that depends on the options: several middlewares of an agent need different names."""
        threshold = "default" if self.limit.threshold is None else self.limit.threshold
        unit = "" if self.limit.unit == "span" else f" by {self.limit.unit}"
        return f"{type(self).__name__}[{self.limit.metric or 'default'}{unit} {threshold}, {self.on_risk}]"

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ExtendedModelResponse[Any]:
        """Check one model call, with retries."""

        def choose() -> Chosen:
            trial = _Trial(self.limit)
            for attempt in self._requests(request):
                if trial.accept(handler(attempt)):
                    break
            return trial.chosen()

        if self.on_risk != "interrupt":
            return self._response(choose())

        @task  # its result is in the checkpoint, so that the model is not called again after the decision
        def risk_answer() -> dict[str, Any]:
            return choose().to_plain()

        return self._reviewed(Chosen.from_plain(risk_answer().result()))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ExtendedModelResponse[Any]:
        """See :meth:`wrap_model_call`."""

        async def choose() -> Chosen:
            trial = _Trial(self.limit)
            for attempt in self._requests(request):
                if trial.accept(await handler(attempt)):
                    break
            return trial.chosen()

        if self.on_risk != "interrupt":
            return self._response(await choose())

        @task
        async def risk_answer() -> dict[str, Any]:
            return (await choose()).to_plain()

        return self._reviewed(Chosen.from_plain(await risk_answer()))

    def _requests(self, request: ModelRequest[Any]) -> Iterator[ModelRequest[Any]]:
        """The original request, then the retries."""
        yield self._without_streaming(request)
        for retry in self.retries:
            if not isinstance(retry, Mapping):
                yield self._without_streaming(request.override(model=retry))
            else:
                settings = {**request.model_settings, **retry}
                yield self._without_streaming(request.override(model_settings=settings))

    def _without_streaming(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """The request with a model that does not stream to the user, unless every answer is kept as it is."""
        if self.gate is None and not self.retries:
            return request
        model: Any = request.model
        if isinstance(model, Composed):
            silent: Any = model.with_config(tags=[*model.config.get("tags", ()), TAG_NOSTREAM])
            return request.override(model=silent)
        return request.override(model=model.model_copy(update={"tags": [*(model.tags or ()), TAG_NOSTREAM]}))

    def _response(self, chosen: Chosen) -> ExtendedModelResponse[Any]:
        """The chosen answer, after the action on its risk, and the update of the state."""
        if not chosen.risky(self.limit):
            return chosen.response("none")
        if self.gate is None:
            return chosen.response("keep")
        return chosen.response(self.on_risk, replaced=self.gate.passed(chosen.message))

    def _reviewed(self, chosen: Chosen) -> ExtendedModelResponse[Any]:
        """The chosen answer, after the decision of a person if it is risky. Only here does a run stop and go on."""
        if chosen.report is None or not chosen.risky(self.limit):
            return chosen.response("none")
        decision = review(chosen, chosen.report, self.limit)
        assert self.gate is not None
        if decision["type"] == "accept":
            return chosen.response("accept")
        if decision["type"] == "abstain":
            return chosen.response("abstain", replaced=self.gate.passed(chosen.message))
        edited = replaced(chosen.message, decision["text"])
        return chosen.response("edit", replaced=self.gate.with_gate_entry(edited, "edit"))


@dataclass(frozen=True)
class Chosen:
    """The answer that is left after all attempts, and the value of each attempt."""

    model_response: ModelResponse[Any]
    report: RiskReport | None
    value: float | None
    attempts: list[float | None]

    @property
    def message(self) -> AIMessage:
        """The message of the model; further results belong to structured output."""
        return next(message for message in self.model_response.result if isinstance(message, AIMessage))

    def risky(self, limit: Limit) -> bool:
        """Whether the answer is too risky. An answer without a report is not."""
        return self.report is not None and limit.reached(self.report)

    def to_plain(self) -> dict[str, Any]:
        """A form for checkpoints: plain values, besides the object of a structured answer."""
        return {
            "messages": [message_to_dict(message) for message in self.model_response.result],
            "structured_response": self.model_response.structured_response,
            "report": None if self.report is None else self.report.to_dict(),
            "value": self.value,
            "attempts": self.attempts,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Chosen:
        """The answer of :meth:`to_plain`."""
        messages: list[Any] = messages_from_dict(plain["messages"])
        report = None if plain["report"] is None else RiskReport.from_wire(plain["report"])
        return cls(ModelResponse(messages, plain["structured_response"]), report, plain["value"], plain["attempts"])

    def response(self, action: str, replaced: AIMessage | None = None) -> ExtendedModelResponse[Any]:
        """The answer, and the update of the state.

        Args:
            action: what was done about the risk.
            replaced: a message that takes the place of the answer. It gets a new id.
        """
        report: RiskSummary | None = self.report
        if self.report is not None and self.report.is_compact:  # the message, which is in the state too, has its lists
            report = self.report.summary
        entry = AgentRisk(report=report, value=self.value, action=action, attempts=self.attempts)
        update: dict[str, Any] = {"cocoa_risks": [entry.to_dict()]}
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


def review(chosen: Chosen, report: RiskReport, limit: Limit) -> Mapping[str, Any]:
    """Stop the run until a person has decided what becomes of a risky answer.

    Returns:
        The decision: ``type``, and the ``text`` of an edit.
    """
    is_structured = chosen.model_response.structured_response is not None
    decisions: list[DecisionType] = ["accept", "abstain"] if is_structured else ["accept", "edit", "abstain"]
    risky = [
        part.to_dict() if isinstance(part, SpanReport) else {**part.model_dump(), "value": value}
        for part, value in limit.risky(report.spans, report)
    ]
    request = ReviewRequest(
        type="risky_answer",
        answer=chosen.message.text,
        tool_calls=[{key: call[key] for key in ("name", "args", "id")} for call in chosen.message.tool_calls],
        spans=risky,
        report=report.to_dict(),
        metric=limit.metric_for(report),
        threshold=limit.threshold_for(report),
        value=chosen.value,
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


class _Trial:
    """The attempts at one answer."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._values: list[float | None] = []
        self._kind: tuple[str, str | None] | None = None  # of the values that are ranked
        self._lowest = math.inf
        self._best: tuple[ModelResponse[Any], RiskReport | None] | None = None

    def accept(self, response: ModelResponse[Any]) -> bool:
        """Add an attempt, and return whether it is below the threshold."""
        message = next(message for message in response.result if isinstance(message, AIMessage))
        # the agent's own model must measure risk; a fallback model need not
        report = find_risk(message) if self._values else get_risk(message)
        value = None if report is None else self._limit.value(report)
        passes = report is None or not self._limit.reached(report)
        self._values.append(value)
        kind = None if report is None or finite(value) is None else self._limit.kind_for(report)
        self._kind = self._kind or kind
        # neither of two values of different kinds is below the other
        is_lower = kind is not None and kind == self._kind and value is not None and value < self._lowest
        if passes or self._best is None or is_lower:
            self._best = (response, report)
        if is_lower and value is not None:
            self._lowest = value
        return passes

    def chosen(self) -> Chosen:
        """The answer that passes, or else the least risky one."""
        assert self._best is not None
        response, report = self._best
        value = None if report is None else finite(self._limit.value(report))
        return Chosen(response, report, value, [finite(value) for value in self._values])


ARGUMENT_THRESHOLD = 0.2
"""The calibrated risk from which an argument of the embedded model is too risky by default. Right arguments are mostly
copied from the request, so that their risk is far below that of the words of an answer. Chosen on 22 requests
(docs/how-to/trials)."""


class RiskyToolCalls:
    """Whether a tool call has a risky argument: the condition of LangChain's ``HumanInTheLoopMiddleware``.

    With it the agent stops only at these calls, and a person approves, edits or rejects them. Calls without a report,
    such as those of another model, are not risky.

    Args:
        threshold: the value from which an argument is too risky, as in :class:`ToolRiskMiddleware`.
        metric: the value to compare, as in ``ToolRiskMiddleware``.
        arguments: the names of the arguments to check, or paths, as in ``ToolRiskMiddleware``. Default: all arguments.

    Example:
        >>> risky = RiskyToolCalls()
        >>> review = {
        ...     "allowed_decisions": ["approve", "edit", "reject"],
        ...     "when": risky,
        ...     "description": risky.description,
        ... }
        >>> HumanInTheLoopMiddleware(interrupt_on={"send_money": review})

    Raises:
        ConfigError: ``threshold`` is not a finite number, or ``metric`` is unknown.
    """

    def __init__(
        self, threshold: float | None = None, *, metric: Metric = "risk", arguments: Collection[str] | None = None
    ) -> None:
        if isinstance(arguments, str):
            raise ConfigError("tools and arguments take lists of names")
        require_known("metric", metric, Metric)
        self.limit = Limit(threshold, metric)
        self._metric = metric
        self.arguments = arguments

    def __call__(self, request: ToolCallRequest) -> bool:
        """Whether an argument of the call reaches the threshold."""
        return bool(self.values(request.tool_call, request.state))

    def values(self, call: Mapping[str, Any] | ToolCall, state: Any) -> dict[str, float]:
        """The value of each argument of a call that reaches the threshold.

        Args:
            call: the tool call.
            state: the state of the agent, or its messages.
        """
        report = _report_of(state, call["id"])
        if report is None:
            return {}
        threshold = self.threshold_for(report)
        values = {
            name: measured.value(self._metric)
            for name, measured in _arguments_in(report, call["id"]).items()
            # the paths of values inside arguments count only if they are asked for
            if (not name.startswith(ROOT) if self.arguments is None else name in self.arguments)
        }
        return {name: value for name, value in values.items() if reaches(value, threshold)}

    def threshold_for(self, report: RiskReport) -> float:
        """The threshold that applies to the arguments of a report's tool calls.

        Raises:
            ConfigError: there is no default, or the risks of the answer are on another scale.
        """
        threshold = self.limit.threshold_for(report)
        measured = report.risk_source == "calibrator" and report.model_name == MODEL_NAME
        return min(threshold, ARGUMENT_THRESHOLD) if measured and self.limit.threshold is None else threshold

    def description(self, tool_call: Mapping[str, Any] | ToolCall, state: Any, runtime: Any = None) -> str:
        """Which arguments of a call are risky, for the ``description`` of ``HumanInTheLoopMiddleware``."""
        values = self.values(tool_call, state)
        listed = ", ".join(
            f"{name}{'' if name.startswith(ROOT) else '=' + repr(tool_call['args'].get(name))} ({value:.2f})"
            for name, value in values.items()
        )
        metric = self._metric.replace("_", " ")
        report = _report_of(state, tool_call["id"])
        threshold = "" if report is None else f" {self.threshold_for(report):.3g}"
        return f"the {metric} of these arguments reaches{threshold}: {listed}"


class ToolRiskMiddleware(AgentMiddleware[Any, Any]):
    """Refuses to run a tool if the risk of one of its arguments reaches the threshold.

    ``create_agent(ChatCocoa(), tools, middleware=[ToolRiskMiddleware()])``. Instead of the result of the tool, the
    model receives a ``ToolMessage`` with status ``"error"`` that names the arguments, so that it can ask the user or
    call again. Calls without a report, such as those of another model, are run.

    Args:
        threshold: the value from which an argument is too risky. Default: ``threshold`` of the report of the answer,
            the one chosen with a calibrator; for the embedded model's calibrated risk at most 0.2, as measured.
        metric: the value to compare, as in :func:`~cocoa_integrations.langchain.risk_gate`. Arguments in the same span
            have the same risk and MLDS; ``self_information`` (-log p, in nats) is computed from the tokens of the
            argument.
        tools: the names of the tools to check. Default: all.
        arguments: the names of the arguments to check, or the paths of values inside them (``$.guests[0].name``).
            Default: all arguments.

    Raises:
        ConfigError: ``threshold`` is not a finite number, or ``metric`` is unknown.
    """

    def __init__(
        self,
        threshold: float | None = None,
        *,
        metric: Metric = "risk",
        tools: Collection[str] | None = None,
        arguments: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(tools, str):
            raise ConfigError("tools and arguments take lists of names")
        self.risky = RiskyToolCalls(threshold, metric=metric, arguments=arguments)
        self.limit = self.risky.limit
        self.watched_tools = tools
        self.watched_arguments = arguments

    @property
    def name(self) -> str:
        """A name that depends on the options: several middlewares of an agent need different names."""
        threshold = "default" if self.limit.threshold is None else self.limit.threshold
        parts = [f"{self.limit.metric} {threshold}"]
        for what, names in (("tools", self.watched_tools), ("arguments", self.watched_arguments)):
            if names is not None:
                parts.append(" ".join([what, *names]))
        return f"{type(self).__name__}[{', '.join(parts)}]"

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Run the tool, or return an error message if an argument is too risky."""
        return self._refusal(request) or handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """See :meth:`wrap_tool_call`."""
        return self._refusal(request) or await handler(request)

    def _refusal(self, request: ToolCallRequest) -> ToolMessage | None:
        call = request.tool_call
        if self.watched_tools is not None and call["name"] not in self.watched_tools:
            return None
        if not self.risky(request):
            return None
        return ToolMessage(
            f"{call['name']} was not run: {self.risky.description(call, request.state)}",
            name=call["name"],
            tool_call_id=call["id"] or "",
            status="error",
        )


def _report_of(state: Any, call_id: str | None) -> RiskReport | None:
    """The report of the newest message with a call; ``None`` if its model measures no risk."""
    messages = state["messages"] if isinstance(state, dict) else getattr(state, "messages", state)
    for message in reversed(list(messages)):
        if isinstance(message, AIMessage) and any(call["id"] == call_id for call in message.tool_calls):
            return find_risk(message)
    return None


def _arguments_in(report: RiskReport, call_id: str | None) -> dict[str, ValueReport]:
    """The risk of each argument of a call."""
    return {call.id: call.arguments for call in report.tool_calls}.get(call_id or "", {})
