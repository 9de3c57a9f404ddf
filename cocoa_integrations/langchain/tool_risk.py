"""Agents that do not run a tool whose arguments may be hallucinated, or ask a person first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from cocoa_engine.optional import need

need("langchain.agents", extra="agents", what="ToolRiskMiddleware")

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, ToolCall, ToolMessage
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command

from cocoa_engine.errors import ConfigError
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_integrations._shared.limits import Limit, Metric, reaches, require_metric, value_of
from cocoa_integrations.langchain.runnables import find_risk
from cocoa_integrations.tool_calling import ROOT

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
        require_metric(metric)
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
            name: value_of(measured, self._metric)
            for name, measured in _arguments_in(report, call["id"]).items()
            # the paths of values inside arguments count only if they are asked for
            if (not name.startswith(ROOT) if self.arguments is None else name in self.arguments)
        }
        return {name: value for name, value in values.items() if reaches(value, threshold)}

    def threshold_for(self, report: dict[str, Any]) -> float:
        """The threshold that applies to the arguments of a report's tool calls.

        Raises:
            ConfigError: there is no default, or the risks of the answer are on another scale.
        """
        threshold = self.limit.threshold_for(report)
        measured = report.get("risk_source") == "calibrator" and report.get("model_name") == MODEL_NAME
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


def _report_of(state: Any, call_id: str | None) -> dict[str, Any] | None:
    """The report of the newest message with a call; ``None`` if its model measures no risk."""
    messages = state["messages"] if isinstance(state, dict) else getattr(state, "messages", state)
    for message in reversed(list(messages)):
        if isinstance(message, AIMessage) and any(call["id"] == call_id for call in message.tool_calls):
            return find_risk(message)
    return None


def _arguments_in(report: dict[str, Any], call_id: str | None) -> dict[str, dict[str, Any]]:
    """The risk of each argument of a call."""
    calls = {call["id"]: call["arguments"] for call in report.get("tool_calls", ())}
    return calls.get(call_id or "", {})
