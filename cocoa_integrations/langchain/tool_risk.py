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
from cocoa_integrations._shared.limits import Limit, Metric, metric_of
from cocoa_integrations.langchain.runnables import argument_risks, find_risk
from cocoa_integrations.tool_calling import ROOT


class RiskyToolCalls:
    """Whether a tool call has a risky argument: the condition of LangChain's ``HumanInTheLoopMiddleware``.

    With it the agent stops only at these calls, and a person approves, edits or rejects them. Calls without a report,
    such as those of another model, are not risky.

    Args:
        threshold: the value from which an argument is too risky, as in :class:`ToolRiskMiddleware`.
        metric: the value to compare, as in ``ToolRiskMiddleware``.
        arguments: the names of the arguments to check, or paths, as in ``ToolRiskMiddleware``. Default: all arguments.

    Example:
        >>> risky = RiskyToolCalls(0.3)
        >>> review = {
        ...     "allowed_decisions": ["approve", "edit", "reject"],
        ...     "when": risky,
        ...     "description": risky.description,
        ... }
        >>> HumanInTheLoopMiddleware(interrupt_on={"send_money": review})

    Raises:
        ConfigError: ``threshold`` is not a finite number, or ``metric`` is unknown.
    """

    def __init__(self, threshold: float, *, metric: Metric = "risk", arguments: Collection[str] | None = None) -> None:
        if isinstance(arguments, str):
            raise ConfigError("tools and arguments take lists of names")
        self.limit = Limit(threshold, metric)
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
        values = {
            name: metric_of(measured, self.limit.metric)
            for name, measured in _arguments_of(state, call["id"]).items()
            # the paths of values inside arguments count only if they are asked for
            if (not name.startswith(ROOT) if self.arguments is None else name in self.arguments)
        }
        return {name: value for name, value in values.items() if value >= self.limit.threshold}

    def description(self, tool_call: Mapping[str, Any] | ToolCall, state: Any, runtime: Any = None) -> str:
        """Which arguments of a call are risky, for the ``description`` of ``HumanInTheLoopMiddleware``."""
        values = self.values(tool_call, state)
        listed = ", ".join(
            f"{name}{'' if name.startswith(ROOT) else '=' + repr(tool_call['args'].get(name))} ({value:.2f})"
            for name, value in values.items()
        )
        metric = self.limit.metric.replace("_", " ")
        return f"the {metric} of these arguments reaches {self.limit.threshold:.3g}: {listed}"


class ToolRiskMiddleware(AgentMiddleware[Any, Any]):
    """Refuses to run a tool if the risk of one of its arguments reaches the threshold.

    ``create_agent(ChatCocoa(calibrator="risk.json"), tools, middleware=[ToolRiskMiddleware(0.5)])``. Instead of the
    result of the tool, the model receives a ``ToolMessage`` with status ``"error"`` that names the arguments, so that
    it can ask the user or call again. Calls without a report, such as those of another model, are run.

    Args:
        threshold: the value from which an argument is too risky: a probability with a calibrator, otherwise a raw MLDS.
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
        threshold: float,
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
        parts = [f"{self.limit.metric} {self.limit.threshold}"]
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


def _arguments_of(state: Any, call_id: str | None) -> dict[str, dict[str, Any]]:
    """The risk of the arguments of a call, from the newest message with this call."""
    messages = state["messages"] if isinstance(state, dict) else getattr(state, "messages", state)
    for message in reversed(list(messages)):
        if isinstance(message, AIMessage) and any(call["id"] == call_id for call in message.tool_calls):
            return argument_risks(message).get(call_id or "", {}) if find_risk(message) is not None else {}
    return {}
