"""Agents that act on the risk of their model's answers; needs the package ``langchain`` (extra ``agents``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from operator import add
from typing import Annotated, Any, Literal, get_args

from cocoa_engine.extras import need

need("langchain.agents", extra="agents", what="RiskMiddleware")

from langchain.agents.middleware import AgentMiddleware, AgentState, ExtendedModelResponse, ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langgraph.constants import TAG_NOSTREAM
from langgraph.types import Command
from typing_extensions import NotRequired

from cocoa_engine.errors import ConfigError
from cocoa_engine.faults import unknown
from cocoa_integrations.langchain.base import FRAMEWORK, TOOL_DETAILS, TOOLS, CallOptions
from cocoa_integrations.langchain.gates import ABSTENTION, MARK, RiskGate
from cocoa_integrations.langchain.runnables import find_risk, get_risk
from cocoa_integrations.limits import Limit, Mark, Metric, highest
from cocoa_integrations.settings import refuse_unknown

OnRisk = Literal["keep", "raise", "mark", "abstain"]
Retry = BaseChatModel | Mapping[str, Any]


class RiskState(AgentState[Any]):
    """An agent's state with the risk of its model's answers.

    ``cocoa_risks`` has one entry for each model call of the agent, in order:

    - ``report``: the ``cocoa_risk`` report of the answer that was kept; None if its model does not measure risk;
    - ``value``: the highest figure of its spans; None without a report;
    - ``action``: ``none`` if the answer passed, else what was done (``keep``, ``mark``, ``abstain``);
    - ``attempts``: the value of each answer that was tried for, the first included, in order.
    """

    cocoa_risks: NotRequired[Annotated[list[dict[str, Any]], add]]


class RiskMiddleware(AgentMiddleware[RiskState, Any, Any]):
    """Judges every answer of an agent's model by its risk: tries again otherwise, then acts on what is still too risky.

    An answer is too risky if a span of it reaches the threshold. The models and settings of ``retry_with`` are then
    tried in turn, up to the first answer that is not. If all are, the least risky one is taken and ``on_risk`` says
    what becomes of it. The agent's state tells of every call, see :class:`RiskState`.

    **Streams.** With ``on_risk="keep"`` and no ``retry_with`` the model's chunks stream as ever. Otherwise
    ``stream_mode="messages"`` yields an answer whole, once it may pass, and nothing of the rejected ones;
    ``astream_events`` and callbacks see every attempt as it runs.

    Args:
        threshold: as in :func:`~cocoa_integrations.langchain.risk_gate`: without a calibrator it is for the raw MLDS.
        metric: the figure the threshold is for, as in ``risk_gate``.
        retry_with: what to try, in turn: another chat model, or settings for a call of the agent's own
            (``{"alpha": 6.0, "max_candidates": 16}``), or a list of such. The same greedy decoding again would give the
            same answer. A model that does not measure risk may stand here too: its answer is accepted.
        on_risk: ``keep`` the answer, the state saying how risky it is; ``raise`` a ``HallucinationRiskError``; ``mark``
            the risky spans in the text; or ``abstain``: ``answer`` instead, without tool calls and structured response,
            so that the agent ends there.
        mark: how to mark, as in ``risk_gate``.
        answer: what is said instead.

    Example:
        >>> middleware = RiskMiddleware(0.5, retry_with={"alpha": 6.0}, on_risk="abstain")
        >>> agent = create_agent(ChatCocoa(calibrator="risk.json"), tools=[], middleware=[middleware])
        >>> state = agent.invoke({"messages": [("user", "Who wrote Dune?")]})
        >>> state["cocoa_risks"][-1]["value"]

    Raises:
        ConfigError: an option makes no sense; and from the agent, that its model's answer has no report.
    """

    state_schema = RiskState

    def __init__(
        self,
        threshold: float,
        *,
        metric: Metric = "risk",
        retry_with: Retry | Sequence[Retry] = (),
        on_risk: OnRisk = "keep",
        mark: Mark = MARK,
        answer: str = ABSTENTION,
    ) -> None:
        super().__init__()
        self.tools = []
        if on_risk not in get_args(OnRisk):
            raise ConfigError(unknown([on_risk], get_args(OnRisk), what="on_risk"))
        self.limit = Limit(threshold, metric)
        gate = RiskGate(
            threshold, metric=metric, on_risk="raise" if on_risk == "keep" else on_risk, mark=mark, answer=answer
        )
        self.on_risk = on_risk
        self.gate = None if on_risk == "keep" else gate
        self.retries = list(retry_with) if isinstance(retry_with, Sequence) else [retry_with]
        for retry in self.retries:
            if not isinstance(retry, (BaseChatModel, Mapping)):
                raise ConfigError(
                    f"retry_with takes chat models and dicts of settings, not a {type(retry).__name__}; "
                    "a model with options bound to it is a model of its own: make it with them"
                )
            if isinstance(retry, Mapping):
                refuse_unknown(retry, {*CallOptions.model_fields, *TOOLS, *TOOL_DETAILS, *FRAMEWORK}, what="retry_with")

    @property
    def name(self) -> str:
        """By what it does: LangChain lets an agent have several only under different names."""
        return f"{type(self).__name__}[{self.limit.metric} {self.limit.threshold}, {self.on_risk}]"

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ExtendedModelResponse[Any]:
        """Judge one model call."""
        trial = _Trial(self)
        for attempt in self._requests(request):
            if trial.accepts(handler(attempt)):
                break
        return trial.response()

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ExtendedModelResponse[Any]:
        """See :meth:`wrap_model_call`."""
        trial = _Trial(self)
        for attempt in self._requests(request):
            if trial.accepts(await handler(attempt)):
                break
        return trial.response()

    def _requests(self, request: ModelRequest[Any]) -> Iterator[ModelRequest[Any]]:
        """The request as it is, then as it is tried again."""
        yield self._held_back(request)
        for retry in self.retries:
            if isinstance(retry, BaseChatModel):
                yield self._held_back(request.override(model=retry))
            else:
                settings = {**request.model_settings, **retry}
                yield self._held_back(request.override(model_settings=settings))

    def _held_back(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """The request so that none of its chunks reaches a reader before the answer was judged."""
        if self.gate is None and not self.retries:
            return request
        model = request.model
        return request.override(model=model.model_copy(update={"tags": [*(model.tags or ()), TAG_NOSTREAM]}))


class _Trial:
    """The attempts at one answer."""

    def __init__(self, middleware: RiskMiddleware) -> None:
        self._middleware = middleware
        self._limit = middleware.limit
        self._values: list[float | None] = []
        self._best: tuple[ModelResponse[Any], AIMessage, dict[str, Any] | None] | None = None

    def accepts(self, response: ModelResponse[Any]) -> bool:
        """Take the next attempt; whether it may pass."""
        message = next(message for message in response.result if isinstance(message, AIMessage))
        # The agent's own model must measure risk; one it falls back to need not.
        report = find_risk(message) if self._values else get_risk(message)
        value = None if report is None else highest(report["spans"], self._limit.metric)
        passes = report is None or not self._limit.risky(report["spans"])
        lowest = min((known for known in self._values if known is not None), default=None)
        self._values.append(value)
        if passes or lowest is None or (value is not None and value < lowest):
            self._best = (response, message, report)
        return passes

    def response(self) -> ExtendedModelResponse[Any]:
        """The answer that is kept, and what the state is told of it."""
        assert self._best is not None
        response, message, report = self._best
        risky = report is not None and bool(self._limit.risky(report["spans"]))
        entry = {
            "report": report,
            "value": None if report is None else highest(report["spans"], self._limit.metric),
            "action": self._middleware.on_risk if risky else "none",
            "attempts": self._values,
        }
        update: dict[str, Any] = {"cocoa_risks": [entry]}
        if risky and (gate := self._middleware.gate) is not None:
            # An id of its own: what was streamed under the old one is another message.
            acted_on = gate.passed(message).model_copy(update={"id": None})
            if gate.on_risk == "abstain":
                response = ModelResponse(result=[acted_on])  # nor results of tool calls that are no more
                update["jump_to"] = "end"  # an agent with a response format would ask again until it gets one
            else:
                result = [acted_on if one is message else one for one in response.result]
                response = ModelResponse(result=result, structured_response=response.structured_response)
        return ExtendedModelResponse(model_response=response, command=Command(update=update))
