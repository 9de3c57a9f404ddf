"""A wrapper around a query engine that adds the risk of the answer to the response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, StreamingResponse
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from cocoa_engine import ConfigError
from cocoa_engine.report import REPORTS_KEY, RISK_KEY
from cocoa_integrations.llama_index.answers import Answers
from cocoa_integrations.llama_index.response_modes import require_reportable
from cocoa_integrations.llama_index.retrieved import add_nodes


class RiskQueryEngine(BaseQueryEngine):
    """Wraps a query engine whose LLM is a :class:`CocoaLLM` and adds the risk of the answer to the response::

        engine = RiskQueryEngine(index.as_query_engine(llm=llm))
        response = engine.query("Who built the lighthouse?")
        response.metadata["cocoa_risk"]["max_risk"]

    ``metadata["cocoa_risk"]`` is the report of the answers that the response shows. Its spans have offsets in the text
    of the response. A response that joins several answers (``response_mode="accumulate"``) has the spans of all of
    them, and ``parts`` in its report names the stretches of the text. ``metadata["cocoa_reports"]`` has the report of
    every LLM call of the query in order of completion, also of those whose answer is not shown (refine,
    tree_summarize, a rewritten question). Sources and other metadata do not change. The report of a streamed response
    is available when the stream has been read to its end. Until then ``cocoa_risk`` is ``None``, or the report of a
    :class:`RiskRetryQueryEngine` inside. It stays ``None``, with a :class:`MissingRiskWarning`, if no CocoaLLM
    answered, or if something changed the text after it was generated.

    The nodes whose text is in the prompt as it is are the sources of the answer: each of its spans has
    ``passage_attention``, the attention on each of ``source_nodes`` (``None`` for those that were not in the prompt).

    Make it the outermost engine: a response that is used as a node adds its metadata to the next prompt.

    Args:
        inner: the query engine.
        context_lift: also measure how much the retrieved nodes changed each span, by feeding the answer again after its
            prompt without their texts. The entries of ``cocoa_risk["spans"]`` then have ``context_lift`` (of log p, in
            nats; near 0: not taken from the nodes), ``con_mlds_lift`` and ``f_mlds_lift``. The prompt of a refined
            answer contains the last nodes only. Costs one forward pass, or two if logits processors were used.

    Raises:
        ConfigError: ``inner`` is not a query engine; its ``response_mode`` calls no LLM (``no_text``,
            ``context_only``); or it accumulates answers with streaming or an ``output_cls``.
    """

    def __init__(self, inner: BaseQueryEngine, *, context_lift: bool = False) -> None:
        if not isinstance(inner, BaseQueryEngine):
            raise ConfigError(
                f"RiskQueryEngine wraps a query engine, not a {type(inner).__name__}; for a chat engine use "
                "RiskChatEngine, for an index its as_query_engine(llm=...)."
            )
        require_reportable(inner)
        super().__init__(inner.callback_manager)
        self._inner = inner
        self._context_lift = context_lift

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The nodes that the inner engine retrieves."""
        return self._inner.retrieve(query_bundle)

    def synthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """The response of the inner engine to given nodes, with its risk."""
        answers = self._collector()
        with answers:
            add_nodes(nodes)
            response = self._inner.synthesize(query_bundle, nodes, additional_source_nodes)
        return self._reported(response, answers)

    async def asynthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Like :meth:`synthesize`, asynchronously."""
        answers = self._collector()
        with answers:
            add_nodes(nodes)
            response = await self._inner.asynthesize(query_bundle, nodes, additional_source_nodes)
        return await self._areported(response, answers)

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        answers = self._collector()
        with answers:
            response = self._inner.query(query_bundle)
        return self._reported(response, answers)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        answers = self._collector()
        with answers:
            response = await self._inner.aquery(query_bundle)
        return await self._areported(response, answers)

    def _collector(self) -> Answers:
        return Answers(lift=self._context_lift)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"inner": self._inner}

    def _reported(self, response: RESPONSE_TYPE, answers: Answers) -> RESPONSE_TYPE:
        streamed = _streamed(response, answers)
        if streamed is not None:
            return streamed
        metadata = dict(response.metadata or {})
        answers.write(metadata, str(response), response.source_nodes)
        return replace(response, metadata=metadata)

    async def _areported(self, response: RESPONSE_TYPE, answers: Answers) -> RESPONSE_TYPE:
        streamed = _streamed(response, answers)
        if streamed is not None:
            return streamed
        metadata = dict(response.metadata or {})
        await answers.awrite(metadata, str(response), response.source_nodes)
        return replace(response, metadata=metadata)


def _streamed(response: RESPONSE_TYPE, answers: Answers) -> RESPONSE_TYPE | None:
    """A copy of a streaming response that gets its report at its end; ``None`` for any other response."""
    metadata: dict[str, Any] = {RISK_KEY: None, **(response.metadata or {}), REPORTS_KEY: answers.reports}
    nodes = response.source_nodes
    if isinstance(response, StreamingResponse):
        return replace(response, response_gen=answers.read(response.response_gen, metadata, nodes), metadata=metadata)
    if isinstance(response, AsyncStreamingResponse):
        return replace(response, response_gen=answers.aread(response.response_gen, metadata, nodes), metadata=metadata)
    return None
