"""A query engine that retries risky answers with more nodes and other settings."""

import inspect
from collections.abc import AsyncGenerator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle

from cocoa_engine import CocoaConfig, ConfigError
from cocoa_engine.errors import unknown
from cocoa_engine.report import RISK_KEY, RiskReport
from cocoa_integrations._shared.limits import ABSTENTION, MARK, Mark
from cocoa_integrations._shared.options import refuse_unknown, split_settings
from cocoa_integrations._shared.tries import TRIES_KEY, Measure, OnRisk, RetryPlan, Tries, run_blocking
from cocoa_integrations.llama_index.llm import CocoaLLM
from cocoa_integrations.llama_index.query_engines import RiskQueryEngine, require_llm


class RiskRetryQueryEngine(BaseQueryEngine):
    """Answers from retrieved nodes. While the answer is too risky, retrieves more and answers again::

        engine = RiskRetryQueryEngine(retriever, llm)
        response = engine.query("Who built the lighthouse?")
        response.metadata["cocoa_tries"]  # the attempts, and the risk of each answer

    The first answer whose risk is below ``threshold`` is returned, or else the least risky one of those whose risk has
    the same ``risk_source`` as the first: others have no order. The response is that of a :class:`RiskQueryEngine`.
    ``metadata["cocoa_tries"]`` has an entry for each attempt, in order, with ``settings``, ``alpha``, ``top_k``
    (``None`` if the retriever has none), ``source_nodes`` (their number), ``answer``, ``cocoa_risk``, ``risk``
    (``None`` if nothing was retrieved) and ``chosen``, which is true for the returned answer.

    Alpha has an effect with the methods ``cocoa`` and ``cocoa-sig``. Each attempt works on copies of the retrievers and
    the LLM, and threads can share the engine. With ``streaming=True`` the answer is streamed in one piece, and
    ``metadata`` is complete from the beginning. To cite the nodes, wrap it in a :class:`RiskCitationQueryEngine`.

    Args:
        retriever: the retriever of the first attempt.
        llm: the LLM, a :class:`CocoaLLM`. Its alpha is that of the first attempt.
        threshold: the value, in [0, 1], from which a risk is too high. Default: the threshold in the answer's report.
        max_tries: maximum number of attempts.
        settings: settings of :class:`CocoaConfig` for each further attempt, such as ``[{"alpha": 5.0}]``; the last ones
            are used for all remaining attempts. Default: alpha is doubled each time.
        alphas: short for settings that change alpha only: ``alphas=[5.0]`` is ``settings=[{"alpha": 5.0}]``.
        top_k_growth: the factor by which ``similarity_top_k`` of the retriever grows with each further attempt.
            Default: 2, or 1 with a second retriever.
        second_retriever: its nodes are added to those of ``retriever`` from the second attempt on.
        measure: the risk to compare, ``"max_risk"``, ``"mean_risk"`` or ``"answer_risk"`` of the report. Default:
            ``"answer_risk"`` where the report has one, and otherwise ``"max_risk"``; always ``"max_risk"`` with a
            threshold.
        on_risk: what happens if every attempt is too risky. ``keep``: the least risky answer is returned. ``raise`` a
            ``HallucinationRiskError``. ``mark`` the spans of that answer that reach the threshold, or with a threshold
            for another ``measure`` than ``"max_risk"`` those that are flagged. ``abstain``: the text is ``answer``. The
            report then has ``gate``, with the action, the metric, the threshold and the value.
        mark: how to mark a span: a template of ``{text}`` and ``{value}``, or a function of the text and the entry of
            ``cocoa_risk["spans"]``. The offsets in the report refer to the shown text.
        answer: the text that replaces the answer with ``abstain``.
        **options: options of ``RetrieverQueryEngine.from_args``, such as ``response_mode``, ``text_qa_template`` and
            ``node_postprocessors``.

    Raises:
        ConfigError: an argument is unknown, has a wrong type or is out of range; every attempt would be the same; the
            options ask for a ``response_mode`` that :class:`RiskQueryEngine` refuses.
        HallucinationRiskError: a query raises it if every attempt is too risky, with ``on_risk="raise"``.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: CocoaLLM,
        *,
        threshold: float | None = None,
        max_tries: int = 3,
        settings: Sequence[Mapping[str, Any]] | None = None,
        alphas: Sequence[float] | None = None,
        top_k_growth: float | None = None,
        second_retriever: BaseRetriever | None = None,
        measure: Measure | None = None,
        on_risk: OnRisk = "keep",
        mark: Mark = MARK,
        answer: str = ABSTENTION,
        **options: Any,
    ) -> None:
        second = retriever if second_retriever is None else second_retriever
        for name, value in (("retriever", retriever), ("llm", llm), ("second_retriever", second)):
            kind = CocoaLLM if name == "llm" else BaseRetriever
            if not isinstance(value, kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, not a {type(value).__name__}.")
        if options.get("response_synthesizer") is not None:
            raise ConfigError(
                "a response_synthesizer has its own LLM, whose alpha this engine must not change; give llm and the "
                "options of the synthesizer (response_mode, text_qa_template, ...) instead."
            )
        theirs = inspect.signature(RetrieverQueryEngine.from_args).parameters.keys() - {"kwargs"}
        if not_known := [name for name in options if name not in theirs]:  # `from_args` would drop them
            own = inspect.signature(RiskRetryQueryEngine.__init__).parameters
            names = {*theirs, *own} - {"self", "options", "response_synthesizer"}
            raise ConfigError(f"RiskRetryQueryEngine: {unknown(not_known, sorted(names), what='option')}")
        require_llm(options.get("response_mode"))  # LlamaIndex would ask for an LLM of its own first
        alpha: float | None = getattr(llm, "alpha")  # noqa: B009  # a setting; a remote LLM may leave it to the server
        alpha = CocoaConfig().alpha if alpha is None else alpha
        self._llm = llm.model_copy(update={"alpha": alpha})
        self._plan = RetryPlan(
            alpha=alpha,
            retriever=retriever,
            top_k=top_k_of(retriever),
            has_second=second_retriever is not None,
            is_same=partial(_changes_nothing, self._llm),  # unlike a lambda, it can be pickled
            threshold=threshold,
            max_tries=max_tries,
            settings=settings,
            alphas=alphas,
            top_k_growth=top_k_growth,
            measure=measure,
            on_risk=on_risk,
            mark=mark,
            answer=answer,
        )
        super().__init__(options.get("callback_manager"))
        self._retriever, self._second = retriever, second_retriever
        self._streaming = bool(options.pop("streaming", False))
        self._options = options
        self._engine(0)  # refuses a response mode without risk

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The nodes that the first attempt retrieves."""
        return self._engine(0)[0].retrieve(query_bundle)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}  # the prompts are among the options

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        response = run_blocking(self._answer(query_bundle, blocks=True))
        if not self._streaming or not isinstance(response, Response):
            return response
        return StreamingResponse((text for text in [str(response)]), response.source_nodes, response.metadata)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        response = await self._answer(query_bundle, blocks=False)
        if not self._streaming or not isinstance(response, Response):
            return response

        async def text() -> AsyncGenerator[str, None]:
            yield str(response)

        return AsyncStreamingResponse(text(), response.source_nodes, response.metadata)

    async def _answer(self, query_bundle: QueryBundle, *, blocks: bool) -> RESPONSE_TYPE:
        tries = Tries[RESPONSE_TYPE](self._plan)
        for number in range(len(self._plan.steps)):
            engine, entry = self._engine(number)
            response = engine.query(query_bundle) if blocks else await engine.aquery(query_bundle)
            entry |= {"source_nodes": len(response.source_nodes), "answer": str(response)}
            if tries.add(response, _report_of(response), **entry):
                break
        response, history = tries.best()
        metadata = {**(response.metadata or {}), TRIES_KEY: history}
        if (gate := tries.gate()) is not None:
            report = _report_of(response)
            if gate.action == "abstain":
                response = Response(self._plan.answer, response.source_nodes)
            if report is not None and isinstance(response, Response):  # the JSON of an output_cls is not marked
                change = self._plan.change(gate, str(response), report)
                response, report = replace(response, response=change.text), change.of_report(report)
            if report is not None:
                metadata[RISK_KEY] = report.with_values(gate=gate).to_dict()
        return replace(response, metadata=metadata)

    def _engine(self, number: int) -> tuple[RiskQueryEngine, dict[str, Any]]:
        """The engine of an attempt, made of copies, and the parameters of the attempt."""
        llm = self._llm.model_copy(update=_settings(self._plan.steps[number]))
        retriever = with_top_k(self._retriever, self._plan.growth**number)
        top_k = top_k_of(retriever)
        if number and self._second is not None:
            retriever = BothRetrievers(retriever, self._second)
        inner = RetrieverQueryEngine.from_args(retriever, llm=llm, **self._options)
        parameters = {"settings": dict(self._plan.steps[number]), "alpha": getattr(llm, "alpha"), "top_k": top_k}  # noqa: B009
        return RiskQueryEngine(inner), parameters


def _changes_nothing(llm: CocoaLLM, settings: Mapping[str, Any]) -> bool:
    return all(getattr(llm, name) == value for name, value in _settings(settings).items())


def _report_of(response: RESPONSE_TYPE) -> RiskReport | None:
    wire = (response.metadata or {}).get(RISK_KEY)
    return None if wire is None else RiskReport.from_wire(wire)


class BothRetrievers(BaseRetriever):
    def __init__(self, first: BaseRetriever, second: BaseRetriever) -> None:
        super().__init__(first.callback_manager)
        self._first, self._second = first, second

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _without_duplicates([*self._first.retrieve(query_bundle), *self._second.retrieve(query_bundle)])

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        first, second = await self._first.aretrieve(query_bundle), await self._second.aretrieve(query_bundle)
        return _without_duplicates([*first, *second])


def _without_duplicates(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    first: dict[str, NodeWithScore] = {}
    for node in nodes:
        first.setdefault(node.node.node_id, node)
    return list(first.values())


def top_k_of(retriever: BaseRetriever) -> int | None:
    top_k = getattr(retriever, "similarity_top_k", None)
    return top_k if isinstance(top_k, int) else None


def with_top_k(retriever: BaseRetriever, factor: float) -> BaseRetriever:
    """A copy of a retriever that retrieves ``factor`` times as many nodes, or all nodes of a smaller BM25 corpus."""
    top_k = top_k_of(retriever)
    if factor == 1 or top_k is None:
        return retriever
    more = copy(retriever)
    wanted = round(top_k * factor)
    corpus = getattr(retriever, "corpus", None)  # of BM25, which refuses a top_k above the number of nodes
    more.similarity_top_k = min(wanted, max(len(corpus), top_k)) if isinstance(corpus, Sequence) else wanted  # type: ignore[attr-defined]
    return more


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    settings, rest = split_settings(settings)
    refuse_unknown(rest, (), what="settings")
    checked = CocoaConfig(**settings)
    return {name: getattr(checked, name) for name in settings}
