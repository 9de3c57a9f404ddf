"""Query and chat engines whose responses have the risk of their answers, and the sources of their parts."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.chat_engine.types import (
    AGENT_CHAT_RESPONSE_TYPE,
    BaseChatEngine,
    StreamingAgentChatResponse,
)
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.response_synthesizers import Accumulate, BaseSynthesizer, ResponseMode
from llama_index.core.response_synthesizers.compact_and_accumulate import CompactAndAccumulate
from llama_index.core.response_synthesizers.context_only import ContextOnly
from llama_index.core.response_synthesizers.no_text import NoText
from llama_index.core.schema import NodeWithScore, QueryBundle

from cocoa_engine import ConfigError
from cocoa_engine.report import RISK_KEY, RiskReport
from cocoa_integrations._shared.citations import CITATIONS_KEY, MIN_ATTENTION, Citation, with_markers
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.limits import require_finite
from cocoa_integrations.llama_index.answers import Answers
from cocoa_integrations.llama_index.retrieved import add_nodes
from cocoa_integrations.reports import REPORTS_KEY

_MODES: dict[type[BaseSynthesizer], str] = {
    NoText: "no_text",
    ContextOnly: "context_only",
    CompactAndAccumulate: "compact_accumulate",
    Accumulate: "accumulate",
}


class RiskQueryEngine(BaseQueryEngine):
    """Wraps a query engine whose LLM is a :class:`CocoaLLM` and adds the risk of the answer to the response::

        engine = RiskQueryEngine(index.as_query_engine(llm=llm))
        response = engine.query("Who built the lighthouse?")
        response.metadata["cocoa_risk"]["max_risk"]

    ``metadata["cocoa_risk"]`` is the report of the answers that the response shows, with offsets in its text. A
    response that joins several answers (``response_mode="accumulate"``) has the spans of all of them, and ``parts``
    names the stretch of the text that each answer of ``cocoa_reports`` wrote. ``metadata["cocoa_reports"]`` has the
    report of every LLM call of the query in order of completion, also of those whose answer is not shown (refine,
    tree_summarize, a rewritten question). Sources and other metadata do not change.
    The report of a streamed response is available when the stream has been read to its end. Until then ``cocoa_risk``
    is ``None``, or the report of a :class:`RiskRetryQueryEngine` inside. It stays ``None``, with a
    :class:`MissingRiskWarning`, if no CocoaLLM answered, or if LlamaIndex does not tell which answer wrote the text,
    because an output parser or an engine changed it. The reports are in ``cocoa_reports`` then.

    The nodes whose text is in the prompt as it is are the sources of the answer: each of its spans has
    ``passage_attention``, the attention on each of ``source_nodes`` (``None`` for those that were not in the prompt).

    Make it the outermost engine: a response that is used as a node adds its metadata to the next prompt.

    Args:
        inner: the query engine.

    Raises:
        ConfigError: ``inner`` is not a query engine; its ``response_mode`` calls no LLM (``no_text``,
            ``context_only``); or it accumulates answers with streaming or an ``output_cls``.
    """

    def __init__(self, inner: BaseQueryEngine) -> None:
        if not isinstance(inner, BaseQueryEngine):
            raise ConfigError(
                f"RiskQueryEngine wraps a query engine, not a {type(inner).__name__}; for a chat engine use "
                "RiskChatEngine, for an index its as_query_engine(llm=...)."
            )
        _require_reportable(inner)
        super().__init__(inner.callback_manager)
        self._inner = inner
        self._min_attention: float | None = None  # of citations

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
        with (answers := Answers(self._min_attention)):
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
        with (answers := Answers(self._min_attention)):
            add_nodes(nodes)
            response = await self._inner.asynthesize(query_bundle, nodes, additional_source_nodes)
        return await asyncio.to_thread(self._reported, response, answers)  # citations may feed the answer again

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with (answers := Answers(self._min_attention)):
            response = self._inner.query(query_bundle)
        return self._reported(response, answers)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with (answers := Answers(self._min_attention)):
            response = await self._inner.aquery(query_bundle)
        return await asyncio.to_thread(self._reported, response, answers)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"inner": self._inner}

    def _reported(self, response: RESPONSE_TYPE, answers: Answers) -> RESPONSE_TYPE:
        """A copy of the response with its report; a stream gets it at its end."""
        metadata, nodes = dict(response.metadata or {}), response.source_nodes
        if isinstance(response, (StreamingResponse, AsyncStreamingResponse)):
            metadata = {RISK_KEY: None, **metadata, REPORTS_KEY: []}
            read: Any = answers.read if isinstance(response, StreamingResponse) else answers.aread
            return replace(response, response_gen=read(response.response_gen, metadata, nodes), metadata=metadata)
        answers.write(metadata, str(response), nodes, is_object=isinstance(response, PydanticResponse))
        return replace(response, metadata=metadata)


class RiskCitationQueryEngine(RiskQueryEngine):
    """A :class:`RiskQueryEngine` that also cites the source of each part of the answer, by measurement::

        engine = RiskCitationQueryEngine(index.as_query_engine(llm=llm))
        response = engine.query("Who built the lighthouse?")
        print(response)  # It was built by Marta Lindqvist [1].
        response.source_nodes[0]  # source 1

    ``[n]`` is the n-th of ``source_nodes``, as in LlamaIndex's ``CitationQueryEngine``, where the model writes the
    markers, and may cite what it did not use. The source of a part is the node that the model's retrieval heads attend
    to most while it is written. A node is cited only if its text is in the prompt as it is, and none if the
    model's attention cannot be measured. A warning is logged then.

    ``metadata["cocoa_citations"]`` has an entry for each citation with ``source`` (from 1), ``id`` (of the node),
    ``start``, ``end``, ``text``, ``attention`` and ``spans``. Each entry of ``cocoa_risk["spans"]`` has ``source``, and
    ``source_attentions`` by node. All offsets refer to the text with markers. A streamed response has no markers; its
    citations are in the metadata when the stream has been read to its end.

    The attention is measured while the answer is written, and costs no forward pass, unless an engine made the source
    nodes of others, as ``CitationQueryEngine`` does: then the answer is fed again.

    Args:
        inner: the query engine.
        min_attention: the lowest attention of a part on the node it cites, in [0, 1].
        markers: whether the text of the response gets the markers, at the end of its sentences and clauses.

    Raises:
        ConfigError: as for :class:`RiskQueryEngine`, or ``min_attention`` is not a finite number.
    """

    def __init__(self, inner: BaseQueryEngine, *, min_attention: float = MIN_ATTENTION, markers: bool = True) -> None:
        super().__init__(inner)
        require_finite("min_attention", min_attention)
        self._min_attention, self._markers = min_attention, markers

    def _reported(self, response: RESPONSE_TYPE, answers: Answers) -> RESPONSE_TYPE:
        response = super()._reported(response, answers)
        metadata = response.metadata or {}
        if not self._markers or CITATIONS_KEY not in metadata or not isinstance(response, Response):
            return response
        report = RiskReport.from_wire(metadata[RISK_KEY])
        text = EditedText.of(str(response), report)
        entries = [Citation.from_wire(citation) for citation in metadata[CITATIONS_KEY]]
        change = with_markers(text, text.originals(entries, text.begin), report)
        moved = [citation.to_dict() for citation in change.moved(entries, text.begin)]
        changed = {RISK_KEY: change.of_report(report).to_dict(), CITATIONS_KEY: moved}
        return replace(response, response=change.text, metadata={**metadata, **changed})


class RiskStreamingChatResponse(StreamingAgentChatResponse):
    """A streamed chat response with ``metadata``, which is filled when the stream has been read to its end."""

    metadata: dict[str, Any]
    _answers: Answers

    @classmethod
    def of(cls, response: StreamingAgentChatResponse, answers: Answers) -> "RiskStreamingChatResponse":
        """The response as this class. Both objects share their state, because the engine already writes to it."""
        same = object.__new__(cls)
        same.__dict__ = response.__dict__
        same.metadata, same._answers = {RISK_KEY: None, REPORTS_KEY: []}, answers
        return same

    @property
    def response_gen(self) -> Generator[str, None, None]:
        """The text of the answer, in chunks."""
        return self._answers.read(super().response_gen, self.metadata, self.source_nodes, self.sources)

    def async_response_gen(self) -> AsyncGenerator[str, None]:
        """The text of the answer, in chunks."""
        return self._answers.aread(super().async_response_gen(), self.metadata, self.source_nodes, self.sources)


class RiskChatEngine(BaseChatEngine):
    """Wraps a chat engine whose LLM is a :class:`CocoaLLM` and adds the risk of the answer to the response::

        engine = RiskChatEngine(index.as_chat_engine(llm=llm))
        response = engine.chat("Who built the lighthouse?")
        response.metadata["cocoa_risk"]["max_risk"]

    ``metadata`` has the same keys as for :class:`RiskQueryEngine`; the report of a condensed question is in
    ``cocoa_reports``. The chat history contains no metadata. For a streamed response, ``metadata`` is filled when its
    ``response_gen`` (or ``async_response_gen``) has been read to its end.

    Args:
        inner: the chat engine.

    Raises:
        ConfigError: ``inner`` is not a chat engine.
    """

    def __init__(self, inner: BaseChatEngine) -> None:
        if not isinstance(inner, BaseChatEngine):
            raise ConfigError(
                f"RiskChatEngine wraps a chat engine, not a {type(inner).__name__}; for a query engine use "
                "RiskQueryEngine."
            )
        self._inner = inner

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The chat history of the inner engine."""
        return self._inner.chat_history

    def reset(self) -> None:
        """Start a new conversation."""
        self._inner.reset()

    def chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> AGENT_CHAT_RESPONSE_TYPE:
        """Answer a message; ``options`` are passed to the inner engine."""
        with (answers := Answers()):
            response = self._inner.chat(message, chat_history, **options)
        return _chat_reported(response, answers)

    async def achat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> AGENT_CHAT_RESPONSE_TYPE:
        """Like :meth:`chat`, asynchronously."""
        with (answers := Answers()):
            response = await self._inner.achat(message, chat_history, **options)
        return await asyncio.to_thread(_chat_reported, response, answers)

    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> RiskStreamingChatResponse:
        """Like :meth:`chat`, streamed."""
        with (answers := Answers()):
            response = self._inner.stream_chat(message, chat_history, **options)
        return RiskStreamingChatResponse.of(response, answers)

    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **options: Any
    ) -> RiskStreamingChatResponse:
        """Like :meth:`chat`, streamed."""
        with (answers := Answers()):
            response = await self._inner.astream_chat(message, chat_history, **options)
        return RiskStreamingChatResponse.of(response, answers)


def _chat_reported(response: AGENT_CHAT_RESPONSE_TYPE, answers: Answers) -> AGENT_CHAT_RESPONSE_TYPE:
    if isinstance(response, StreamingAgentChatResponse):
        return RiskStreamingChatResponse.of(response, answers)
    response.metadata = dict(response.metadata or {})
    answers.write(response.metadata, response.response, response.source_nodes, response.sources)
    return response


def _require_reportable(engine: BaseQueryEngine) -> None:
    """Refuse a query engine whose response has no risk, or one whose spans cannot be found in its text."""
    # private: LlamaIndex has no public names for what a synthesizer was made with, nor for the modules of an engine
    modules = engine._get_prompt_modules()
    while not isinstance(synthesizer := modules.get("response_synthesizer"), BaseSynthesizer):
        inner = modules.get("query_engine", modules.get("inner"))  # the engine whose response it returns
        if inner is None:
            return
        modules = inner._get_prompt_modules()
    mode = next((mode for kind, mode in _MODES.items() if isinstance(synthesizer, kind)), None)
    require_llm(mode)
    if isinstance(synthesizer, Accumulate) and synthesizer._streaming:
        raise ConfigError(f"response_mode={mode!r} cannot stream: LlamaIndex joins its answers when all are complete.")
    if isinstance(synthesizer, Accumulate) and synthesizer._output_cls is not None:
        raise ConfigError(
            f"response_mode={mode!r} with an output_cls shows the parsed objects, in which the spans of the answers "
            "cannot be found. Leave output_cls out, or use response_mode='tree_summarize'."
        )


def require_llm(mode: str | None) -> None:
    if mode in ("no_text", "context_only"):
        raise ConfigError(
            f"response_mode={ResponseMode(mode).value!r} calls no LLM, so its response has no risk. Use the query "
            "engine by itself, or another response_mode."
        )
