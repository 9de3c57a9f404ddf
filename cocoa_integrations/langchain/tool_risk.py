"""Agent middleware that does not run a tool whose arguments may be hallucinated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from cocoa_engine.optional import need

need("langchain.agents", extra="agents", what="ToolRiskMiddleware")

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command

from cocoa_engine.errors import ConfigError
from cocoa_integrations._shared.limits import Limit, Metric, metric_of
from cocoa_integrations.langchain.runnables import argument_risks, find_risk
from cocoa_integrations.tool_calling import ROOT


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
        if isinstance(tools, str) or isinstance(arguments, str):
            raise ConfigError("tools and arguments take lists of names")
        self.limit = Limit(threshold, metric)
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
        values = {
            name: metric_of(measured, self.limit.metric)
            for name, measured in _arguments_of(request.state, call["id"]).items()
            # the paths of values inside arguments count only if they are asked for
            if (not name.startswith(ROOT) if self.watched_arguments is None else name in self.watched_arguments)
        }
        risky = {name: value for name, value in values.items() if value >= self.limit.threshold}
        if not risky:
            return None
        listed = ", ".join(
            f"{name}{'' if name.startswith(ROOT) else '=' + repr(call['args'].get(name))} ({value:.2f})"
            for name, value in risky.items()
        )
        return ToolMessage(
            f"{call['name']} was not run: the {self.limit.metric.replace('_', ' ')} of these arguments reaches "
            f"{self.limit.threshold:.3g}: {listed}",
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
