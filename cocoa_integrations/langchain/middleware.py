"""Agent middleware that acts on the risk of answers. Needs the package ``langchain`` (extra ``agents``)."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from operator import add
from typing import Annotated, Any, Literal, get_args

from cocoa_engine.optional import need

need("langchain.agents", extra="agents", what="RiskMiddleware")

from langchain.agents.middleware import AgentMiddleware, AgentState, ExtendedModelResponse, ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langgraph.constants import TAG_NOSTREAM
from langgraph.func import task
from pydantic import Field
from typing_extensions import NotRequired

from cocoa_engine import UnitLevel
from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_engine.report import ReportEntry, RiskReport, RiskSummary
from cocoa_integrations._shared.finite import finite
from cocoa_integrations._shared.limits import ABSTENTION, MARK, GateMetric, Limit, Mark
from cocoa_integrations._shared.settings import refuse_unknown
from cocoa_integrations.langchain.composed import Composed
from cocoa_integrations.langchain.edits import replaced
from cocoa_integrations.langchain.gates import OnRisk as GateAction
from cocoa_integrations.langchain.gates import RiskGate, limit_of
from cocoa_integrations.langchain.options import FRAMEWORK, PER_CALL, TOOL_DETAILS, TOOLS
from cocoa_integrations.langchain.review import Chosen, review
from cocoa_integrations.langchain.runnables import find_risk, get_risk

OnRisk = Literal["keep", "raise", "mark", "abstain", "interrupt"]
Retry = BaseChatModel | Mapping[str, Any]


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
    :class:`~cocoa_integrations.langchain.review.ReviewRequest`. Until the decision, the answer is neither in the state
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
        if on_risk not in get_args(OnRisk):
            raise ConfigError(unknown([on_risk], get_args(OnRisk), what="on_risk"))
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
        if not chosen.risky(self.limit):
            return chosen.response("none")
        decision = review(chosen, self.limit)
        assert self.gate is not None
        if decision["type"] == "accept":
            return chosen.response("accept")
        if decision["type"] == "abstain":
            return chosen.response("abstain", replaced=self.gate.passed(chosen.message))
        edited = replaced(chosen.message, decision["text"])
        return chosen.response("edit", replaced=self.gate.with_gate_entry(edited, "edit"))


class _Trial:
    """The attempts at one answer."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._values: list[float | None] = []
        self._kind: tuple[str, str | None] | None = None  # of the values that are ranked
        self._lowest = math.inf
        self._best: tuple[ModelResponse[Any], dict[str, Any] | None] | None = None

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
        attempts = [finite(one) for one in self._values]
        return Chosen(response, {"report": report, "value": value, "attempts": attempts})
