"""A query engine that retrieves more and answers again, more strictly, where an answer is too risky."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle

from cocoa_engine import ConfigError
from cocoa_engine.messages import unknown
from cocoa_integrations.limits import Limit
from cocoa_integrations.llama_index.llm import CocoaLLM
from cocoa_integrations.llama_index.query_engine import RiskQueryEngine
from cocoa_integrations.metadata import RISK_KEY
from cocoa_integrations.settings import config_of

TRIES_KEY = "cocoa_tries"


class RiskRetryQueryEngine(BaseQueryEngine):
    """Answers from what a retriever finds; while the answer is too risky, retrieves more and answers more strictly::

        engine = RiskRetryQueryEngine(retriever, llm, threshold=0.5)
        response = engine.query("Who built the lighthouse?")
        response.metadata["cocoa_tries"]  # what was tried, and how risky each answer was

    The first answer whose risk stays below ``threshold`` is returned, or else the least risky one. It is a
    :class:`RiskQueryEngine`'s response; ``metadata["cocoa_tries"]`` has an entry for each try, in order: ``alpha``,
    ``top_k`` (None if the retriever has none), ``source_nodes`` (how many), ``answer``, ``cocoa_risk``, ``risk`` (None
    where nothing was retrieved to answer from) and ``chosen``, which is true for the one that was returned.

    "More strictly" is a larger alpha, which matters to the methods ``cocoa`` and ``cocoa-sig``. MLDS does not depend on
    it, so the risks of the tries can be compared; without a calibrator they are raw MLDS, whose level differs from
    model to model: look at some before you choose a threshold. The retrievers and the LLM are never changed: each try
    works on copies, and threads may share the engine.

    It must see the whole of an answer before it can give it away, so it does not stream.

    Args:
        retriever: what the first try retrieves with.
        llm: answers; its alpha is the first try's.
        threshold: from where on a risk is too high.
        max_tries: at most this many answers.
        alphas: of each further try, the last one for all after it. By default each try's is twice the one before.
        top_k_growth: each further try retrieves this many times as many nodes, by the retriever's ``similarity_top_k``.
            Default: 2, or 1 with a second retriever.
        second_retriever: its nodes are added to those of ``retriever`` from the second try on.
        measure: the risk that counts, ``"max_risk"`` or ``"mean_risk"`` of an answer's report.
        context_lift: as for :class:`RiskQueryEngine`.
        **options: of ``RetrieverQueryEngine.from_args``: ``response_mode``, ``text_qa_template``,
            ``node_postprocessors``, ...

    Raises:
        ConfigError: an argument is unknown, of a wrong kind or out of range, nothing would change from one try to the
            next, or the options ask for streaming.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: CocoaLLM,
        *,
        threshold: float,
        max_tries: int = 3,
        alphas: Sequence[float] | None = None,
        top_k_growth: float | None = None,
        second_retriever: BaseRetriever | None = None,
        measure: Literal["max_risk", "mean_risk"] = "max_risk",
        context_lift: bool = False,
        **options: Any,
    ) -> None:
        _require("retriever", retriever, BaseRetriever)
        _require("llm", llm, CocoaLLM)
        if second_retriever is not None:
            _require("second_retriever", second_retriever, BaseRetriever)
        limit = Limit(threshold)
        if isinstance(max_tries, bool) or not isinstance(max_tries, int) or max_tries < 1:
            raise ConfigError(f"max_tries must be a whole number, at least 1 (got {max_tries!r}).")
        if measure not in ("max_risk", "mean_risk"):
            raise ConfigError(f"measure must be 'max_risk' or 'mean_risk' (got {measure!r}).")
        if options.get("streaming"):
            raise ConfigError(
                "RiskRetryQueryEngine does not stream: it must see the whole of an answer to know whether it is good "
                "enough. Leave streaming out, or stream from RiskQueryEngine."
            )
        if options.get("response_synthesizer") is not None:
            raise ConfigError(
                "a response_synthesizer answers with an LLM of its own, whose alpha this engine must not change; give "
                "llm and the synthesizer's options (response_mode, text_qa_template, ...) instead."
            )
        _refuse_unknown(options)
        growth = top_k_growth if top_k_growth is not None else 2.0 if second_retriever is None else 1.0
        number = isinstance(growth, (int, float)) and not isinstance(growth, bool)
        if not number or not math.isfinite(growth) or growth < 1:
            raise ConfigError(f"top_k_growth must be a finite number, at least 1 (got {top_k_growth!r}).")
        if growth > 1 and top_k_of(retriever) is None:
            raise ConfigError(
                f"a {type(retriever).__name__} has no similarity_top_k that could grow; give a second_retriever, or "
                "top_k_growth=1 to change only alpha."
            )
        self._alphas = _alphas(llm, alphas, max_tries)
        if max_tries > 1 and growth == 1 and second_retriever is None and len(set(self._alphas)) == 1:
            raise ConfigError(
                f"every try would be the same: alpha stays {self._alphas[0]:g} and nothing more is retrieved. Give "
                "alphas, a top_k_growth above 1 or a second_retriever."
            )
        super().__init__(options.get("callback_manager"))
        self._retriever, self._second = retriever, second_retriever
        self._llm = llm
        self._threshold, self._measure = limit.threshold, measure
        self._growth = growth
        self._context_lift = context_lift
        self._options = options

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """What the first try retrieves."""
        return self._engine(0)[0].retrieve(query_bundle)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}  # the prompts are among the options

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        tries = _Tries(self._threshold, self._measure)
        for number in range(len(self._alphas)):
            engine, about = self._engine(number)
            if tries.settled_by(engine.query(query_bundle), about):
                break
        return tries.best()

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        tries = _Tries(self._threshold, self._measure)
        for number in range(len(self._alphas)):
            engine, about = self._engine(number)
            if tries.settled_by(await engine.aquery(query_bundle), about):
                break
        return tries.best()

    def _engine(self, number: int) -> tuple[RiskQueryEngine, dict[str, Any]]:
        """The engine of a try, made of copies, and what is special about it."""
        alpha = self._alphas[number]
        retriever = with_top_k(self._retriever, self._growth**number)
        top_k = top_k_of(retriever)
        if number and self._second is not None:
            retriever = BothRetrievers(retriever, self._second)
        llm = self._llm.model_copy(update={"alpha": alpha})
        inner = RetrieverQueryEngine.from_args(retriever, llm=llm, **self._options)
        return RiskQueryEngine(inner, context_lift=self._context_lift), {"alpha": alpha, "top_k": top_k}


class _Tries:
    """The responses of the tries so far."""

    def __init__(self, threshold: float, measure: str) -> None:
        self._threshold, self._measure = threshold, measure
        self._responses: list[RESPONSE_TYPE] = []
        self._history: list[dict[str, Any]] = []

    def settled_by(self, response: RESPONSE_TYPE, about: dict[str, Any]) -> bool:
        """Add a try; whether its answer is good enough."""
        report = (response.metadata or {}).get(RISK_KEY)
        risk = None if report is None else report[self._measure]
        self._responses.append(response)
        self._history.append(
            {
                **about,
                "source_nodes": len(response.source_nodes),
                "answer": str(response),
                RISK_KEY: report,
                "risk": risk,
                "chosen": False,
            }
        )
        return risk is not None and risk < self._threshold

    def best(self) -> RESPONSE_TYPE:
        """The least risky response, of equal ones the first, with the history of all."""
        risks = [float("inf") if one["risk"] is None else one["risk"] for one in self._history]
        number = min(range(len(risks)), key=risks.__getitem__)
        self._history[number]["chosen"] = True
        response = self._responses[number]
        return replace(response, metadata={**(response.metadata or {}), TRIES_KEY: self._history})


class BothRetrievers(BaseRetriever):
    """The nodes of two retrievers, the first one's before the second one's, each node once."""

    def __init__(self, first: BaseRetriever, second: BaseRetriever) -> None:
        super().__init__(first.callback_manager)
        self._first, self._second = first, second

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _each_once(self._first.retrieve(query_bundle), self._second.retrieve(query_bundle))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _each_once(await self._first.aretrieve(query_bundle), await self._second.aretrieve(query_bundle))


def _each_once(*found: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    nodes: dict[str, NodeWithScore] = {}
    for one in found:
        for node in one:
            nodes.setdefault(node.node.node_id, node)
    return list(nodes.values())


def top_k_of(retriever: BaseRetriever) -> int | None:
    """How many nodes a retriever looks for; None if it does not say in LlamaIndex's usual way."""
    top_k = getattr(retriever, "similarity_top_k", None)
    return top_k if isinstance(top_k, int) else None


def with_top_k(retriever: BaseRetriever, factor: float) -> BaseRetriever:
    """A retriever that looks for ``factor`` times as many nodes; the given one stays as it is."""
    top_k = top_k_of(retriever)
    if factor == 1 or top_k is None:
        return retriever
    more = copy(retriever)
    wanted = round(top_k * factor)
    corpus = getattr(retriever, "corpus", None)  # of BM25, which refuses to look for more nodes than there are
    more.similarity_top_k = min(wanted, max(len(corpus), top_k)) if isinstance(corpus, Sequence) else wanted  # type: ignore[attr-defined]
    return more


def _require(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, not a {type(value).__name__}.")


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """``from_args`` takes any name and drops those it does not know.

    Raises:
        ConfigError: there is such a one.
    """
    theirs, own = (_named(function) for function in (RetrieverQueryEngine.from_args, RiskRetryQueryEngine.__init__))
    if strangers := [name for name in options if name not in theirs]:
        known = sorted({*theirs, *own} - {"self", "response_synthesizer", "streaming"})
        raise ConfigError(f"RiskRetryQueryEngine: {unknown(strangers, known, what='option')}")


def _named(function: Callable[..., Any]) -> set[str]:
    """The parameters that a function names."""
    parameters = inspect.signature(function).parameters
    return {name for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}


def _alphas(llm: CocoaLLM, given: Sequence[float] | None, max_tries: int) -> list[float]:
    """Alpha of each try.

    Raises:
        ConfigError: there is none given, or one is out of range.
    """
    config = config_of(llm)
    if given is None:
        return [config.replace(alpha=config.alpha * 2**number).alpha for number in range(max_tries)]
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or not given:
        raise ConfigError(f"alphas takes a list of numbers, one for each further try (got {given!r}).")
    further = [config.replace(alpha=alpha).alpha for alpha in given]  # checked as every alpha is
    return [config.alpha, *further, *[further[-1]] * max_tries][:max_tries]
