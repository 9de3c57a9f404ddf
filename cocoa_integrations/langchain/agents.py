"""Agents: middleware that acts on the risk of answers and of tool calls. Needs ``langchain`` (extra ``agents``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from operator import add
from typing import Annotated, Any, Literal

from cocoa_engine.integration import need

need("langchain.agents", extra="agents", what=__name__)

from langchain.agents.middleware import AgentMiddleware, AgentState, ExtendedModelResponse, ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolCall, ToolMessage
from langgraph.constants import TAG_NOSTREAM
from langgraph.func import task
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command, interrupt
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from cocoa_engine import UnitLevel
from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import MODEL_NAME
from cocoa_engine.report import Metric, ReportEntry, RiskReport, RiskSummary, SpanReport, finite
from cocoa_integrations._shared.limits import ABSTENTION, MARK, GateMetric, Limit, Mark, kind_of, reaches, require_known
from cocoa_integrations._shared.options import refuse_unknown
from cocoa_integrations._shared.tries import Attempts, run_blocking
from cocoa_integrations.langchain import answers
from cocoa_integrations.langchain.base import FRAMEWORK, PER_CALL, TOOL_DETAILS, TOOLS
from cocoa_integrations.langchain.composed import Composed
from cocoa_integrations.langchain.gates import OnRisk as GateAction
from cocoa_integrations.langchain.gates import risk_gate
from cocoa_integrations.reports import find_risk, get_risk
from cocoa_integrations.tool_calling import ROOT

OnRisk = Literal["keep", "raise", "mark", "abstain", "interrupt"]
Retry = BaseChatModel | Mapping[str, Any]
DecisionType = Literal["accept", "edit", "abstain"]


class ReviewRequest(TypedDict):
    """The value of the interrupt of :class:`~cocoa_integrations.langchain.RiskMiddleware`. All values are plain."""

    type: Literal["risky_answer"]
    answer: str
    tool_calls: list[dict[str, Any]]
    """The name, the arguments and the id of each tool call of the answer."""
    spans: list[dict[str, Any]]
    """The spans that reach the threshold. Where the risk of the answer was compared by default, those that reach the
    default threshold of spans; none with ``metric="answer_risk"``."""
    report: dict[str, Any]
    metric: str
    threshold: float
    value: float | None
    """The highest value of the spans, or the risk of the answer; ``None`` if it is not a finite number."""
    decisions: list[DecisionType]
    """The decisions that are possible. A structured answer cannot be edited."""
    error: NotRequired[str]
    """Why the agent has stopped again: what is wrong with the last decision."""


class RiskState(AgentState[Any]):
    """The state of an agent: ``cocoa_risks`` has one :class:`AgentRisk` for each call of its model, as a dict."""

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
    ``retry_with`` are then tried in turn until an answer is below the threshold. If none is, ``on_risk`` determines
    what happens to the least risky answer of those with the same metric, and for ``risk`` the same ``risk_source``, as
    the first that was measured: others have no order. A ``threshold`` applies to the answers of all models. Leave it
    out where the risk of their answers has different sources, and each is compared with its own default. The state of
    the agent has an :class:`AgentRisk` for every call of its model in ``cocoa_risks``.

    **Streams.** With ``on_risk="keep"`` and no ``retry_with``, the chunks of the model are streamed as usual. Otherwise
    ``stream_mode="messages"`` yields the chosen answer in one piece, and nothing of the rejected ones.
    ``astream_events`` and callbacks receive every attempt as it runs.

    **Review.** With ``on_risk="interrupt"`` the agent stops at a risky answer, and a person decides. This needs a
    checkpointer, and in an async agent Python 3.11. The value of the interrupt is a
    :class:`~cocoa_integrations.langchain.agents.ReviewRequest`. Until the decision, the answer is neither in the state
    nor in a stream of messages. Resume with ``Command(resume={"type": "accept"})``, with ``{"type": "edit", "text":
    ...}``, which replaces the text and keeps tool calls, or with ``{"type": "abstain"}``. After another value, the
    agent stops again, with an ``error``. The model is not called again.

    Args:
        threshold: as in :func:`~cocoa_integrations.langchain.risk_gate`.
        metric: the value to compare, as in ``risk_gate``.
        unit: what is compared: ``span``, ``claim`` or ``sentence``, as in ``risk_gate``.
        retry_with: what to try in turn: a chat model, or settings for a call of the agent's own model
            (``{"alpha": 6.0, "max_candidates": 16}``), or a list of these. The answer of a model that does not measure
            risk is accepted.
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
        action: GateAction = "abstain" if on_risk == "keep" or on_risk == "interrupt" else on_risk
        self.gate = risk_gate(threshold, metric=metric, unit=unit, on_risk=action, mark=mark, answer=answer)
        self.limit = self.gate.limit
        self.on_risk = on_risk
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

        async def ask(attempt: ModelRequest[Any]) -> ModelResponse[Any]:
            return handler(attempt)

        def risk_answer() -> Chosen:
            return run_blocking(self._chosen(request, ask))

        # the result of a task is in the checkpoint, so that the model is not called again after the decision
        return self._response(task(risk_answer)().result() if self.on_risk == "interrupt" else risk_answer())

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ExtendedModelResponse[Any]:
        async def risk_answer() -> Chosen:
            return await self._chosen(request, handler)

        return self._response(await (task(risk_answer)() if self.on_risk == "interrupt" else risk_answer()))

    async def _chosen(
        self, request: ModelRequest[Any], ask: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> Chosen:
        attempts = Attempts[ModelResponse[Any]]()
        for retry in ({}, *self.retries):
            if isinstance(retry, Mapping):
                attempt = request.override(model_settings={**request.model_settings, **retry})
            else:
                attempt = request.override(model=retry)
            model: Any = attempt.model
            if self.on_risk == "keep" and not self.retries:
                pass  # only answers that are all kept are streamed to the user
            elif isinstance(model, Composed):
                silent: Any = model.with_config(tags=[*model.config.get("tags", ()), TAG_NOSTREAM])
                attempt = attempt.override(model=silent)
            else:
                tags = {"tags": [*(model.tags or ()), TAG_NOSTREAM]}
                attempt = attempt.override(model=model.model_copy(update=tags))
            response = await ask(attempt)
            message = _answer_in(response.result)
            # the agent's own model must measure risk; a fallback model need not
            report = find_risk(message) if attempts.answers else get_risk(message)
            if report is None:
                attempts.append(response, None, None, passes=True)
            else:
                kind, passes = kind_of(self.limit.metric_for(report), report), not self.limit.reached(report)
                attempts.append(response, self.limit.value(report), kind, passes=passes)
            if attempts.has_passed:
                break
        best = attempts.answers[attempts.best_number]
        return best.result, best.structured_response, attempts.values

    def _response(self, chosen: Chosen) -> ExtendedModelResponse[Any]:
        messages, structured, attempts = chosen
        message = _answer_in(messages)
        report, action, replacement = find_risk(message), "none", None
        if report is not None and self.limit.reached(report):
            action = self.on_risk
            if action == "interrupt":  # only here does a run stop and go on
                decision = self._decision(message, report, is_structured=structured is not None)
                action = decision["type"]
            if action == "edit":
                edited = answers.replaced(message, decision["text"])
                replacement = self.gate.with_gate_entry(edited, "edit")
            elif action not in ("keep", "accept"):
                replacement = self.gate.passed(message)
        # the lists of a compact report are in the message, which is in the state too
        summary = report.summary if report is not None and report.is_compact else report
        value = None if report is None else finite(self.limit.value(report))
        entry = AgentRisk(report=summary, value=value, action=action, attempts=attempts)
        update: dict[str, Any] = {"cocoa_risks": [entry.to_dict()]}
        if replacement is not None:
            # a new id, because a different message was streamed under the old one
            replacement = replacement.model_copy(update={"id": None})
            messages = [replacement if earlier is message else earlier for earlier in messages]
        if action == "abstain":
            messages, structured = [replacement], None  # without results of the dropped tool calls
            update["jump_to"] = "end"  # an agent with a response format would retry until it gets one
        response = ModelResponse(result=messages, structured_response=structured)
        return ExtendedModelResponse(model_response=response, command=Command(update=update))

    def _decision(self, message: AIMessage, report: RiskReport, *, is_structured: bool) -> Mapping[str, Any]:
        """Stop the run until a person has decided what becomes of a risky answer: ``type``, and ``text`` of an edit."""
        decisions: list[DecisionType] = ["accept", "abstain"] if is_structured else ["accept", "edit", "abstain"]
        request = ReviewRequest(
            type="risky_answer",
            answer=message.text,
            tool_calls=[{key: call[key] for key in ("name", "args", "id")} for call in message.tool_calls],
            spans=[
                part.to_dict() if isinstance(part, SpanReport) else {**part.model_dump(), "value": value}
                for part, value in self.limit.risky(report.spans, report)
            ],
            report=report.to_dict(),
            metric=self.limit.metric_for(report),
            threshold=self.limit.threshold_for(report),
            value=finite(self.limit.value(report)),
            decisions=decisions,
        )
        text = {"edit": ', "text": ...'}
        forms = " or ".join(f'{{"type": "{option}"{text.get(option, "")}}}' for option in decisions)
        while True:
            decision = interrupt(request)
            kind = decision.get("type") if isinstance(decision, Mapping) else None
            if kind in decisions and (kind != "edit" or isinstance(decision.get("text"), str)):
                checked: Mapping[str, Any] = decision
                return checked
            request = {**request, "error": f"resume with {forms}, not {decision!r}"}


Chosen = tuple[list[Any], Any, list[float | None]]  # messages, structured response, and the value of each attempt


def _answer_in(messages: Sequence[BaseMessage]) -> AIMessage:
    """The message of the model; further results belong to structured output."""
    return next(message for message in messages if isinstance(message, AIMessage))


ARGUMENT_THRESHOLD = 0.2
"""The calibrated risk from which an argument of the embedded model is too risky by default: right arguments are mostly
copied from the request. Chosen on 22 requests (docs/how-to/trials)."""


class RiskyToolCalls:
    """Whether a tool call has a risky argument: the condition of LangChain's ``HumanInTheLoopMiddleware``.

    With it the agent stops only at these calls, and a person approves, edits or rejects them. Calls without a report,
    such as those of another model, are not risky.

    Args:
        threshold: as in :class:`ToolRiskMiddleware`.
        metric: as in ``ToolRiskMiddleware``.
        arguments: as in ``ToolRiskMiddleware``.

    Example:
        >>> risky, decisions = RiskyToolCalls(), ["approve", "edit", "reject"]
        >>> review = {"allowed_decisions": decisions, "when": risky, "description": risky.description}
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
        return bool(self.values(request.tool_call, request.state))

    def values(self, call: Mapping[str, Any] | ToolCall, state: Any) -> dict[str, float]:
        """The value of each argument of a call that reaches the threshold; the state may be messages alone."""
        report = _report_of(state, call["id"])
        if report is None:
            return {}
        threshold = self.threshold_for(report)
        arguments = next((entry.arguments for entry in report.tool_calls if entry.id == call["id"]), {})
        # the paths of values inside arguments count only if they are asked for
        watched = (
            [name for name in arguments if not name.startswith(ROOT)] if self.arguments is None else self.arguments
        )
        values = {name: measured.value(self._metric) for name, measured in arguments.items() if name in watched}
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
        listed = ", ".join(
            f"{name}{'' if name.startswith(ROOT) else '=' + repr(tool_call['args'].get(name))} ({value:.2f})"
            for name, value in self.values(tool_call, state).items()
        )
        report = _report_of(state, tool_call["id"])
        threshold = "" if report is None else f" {self.threshold_for(report):.3g}"
        return f"the {self._metric.replace('_', ' ')} of these arguments reaches{threshold}: {listed}"


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
        self.watched_tools, self.watched_arguments = tools, arguments

    @property
    def name(self) -> str:
        """A name that depends on the options: several middlewares of an agent need different names."""
        threshold = "default" if self.limit.threshold is None else self.limit.threshold
        watched = {"tools": self.watched_tools, "arguments": self.watched_arguments}
        parts = [" ".join([what, *names]) for what, names in watched.items() if names is not None]
        return f"{type(self).__name__}[{', '.join([f'{self.limit.metric} {threshold}', *parts])}]"

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Run the tool, or return an error message if an argument is too risky."""
        return self._refusal(request) or handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        return self._refusal(request) or await handler(request)

    def _refusal(self, request: ToolCallRequest) -> ToolMessage | None:
        call = request.tool_call
        is_watched = self.watched_tools is None or call["name"] in self.watched_tools
        if not is_watched or not self.risky(request):
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
