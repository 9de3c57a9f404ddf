"""Structured output whose responses have the risk of every field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ChatResponseAsyncGen, ChatResponseGen
from llama_index.core.llms.structured_llm import StructuredLLM

from cocoa_engine.report import RISK_KEY, Detail, compact_report
from cocoa_integrations.llama_index.callbacks import RiskCollector

_END: Any = object()


class RiskStructuredLLM(StructuredLLM):
    """What :meth:`CocoaLLM.as_structured_llm` returns: LlamaIndex's structured LLM, with the risk in its responses.

    ``additional_kwargs["cocoa_risk"]`` of a response is the report of the answer; see
    :func:`~cocoa_integrations.llama_index.field_risks`. A streamed answer has it in a further response at the end,
    which repeats the last object.
    """

    @classmethod
    def class_name(cls) -> str:
        """The class name in LlamaIndex's serialisation."""
        return "RiskStructuredLLM"

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The object, as JSON and in ``raw``, with its risk."""
        with (collector := RiskCollector()):
            response = super().chat(messages, **kwargs)
        return self._reported(response, collector, kwargs, streamed=False)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like :meth:`chat`, without blocking the event loop."""
        with (collector := RiskCollector()):
            response = await super().achat(messages, **kwargs)
        return self._reported(response, collector, kwargs, streamed=False)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """The object as it grows, then once more with its risk."""
        collector = RiskCollector()
        with collector:
            partial = super().stream_chat(messages, **kwargs)

        def responses() -> ChatResponseGen:
            last = None
            try:
                while True:
                    with collector:  # not across the yield, which would add it to the context of the reader
                        response = next(partial, _END)
                    if response is _END:
                        break
                    last = response
                    yield response
            finally:
                partial.close()
            if last is not None:
                yield self._reported(last.model_copy(), collector, kwargs, streamed=True)

        return responses()

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Like :meth:`stream_chat`, without blocking the event loop."""
        collector = RiskCollector()
        with collector:
            partial = await super().astream_chat(messages, **kwargs)

        async def responses() -> ChatResponseAsyncGen:
            last = None
            try:
                while True:
                    with collector:
                        response = await anext(partial, _END)
                    if response is _END:
                        break
                    last = response
                    yield response
            finally:
                await partial.aclose()
            if last is not None:
                yield self._reported(last.model_copy(), collector, kwargs, streamed=True)

        return responses()

    def _reported(
        self, response: ChatResponse, collector: RiskCollector, options: Mapping[str, Any], *, streamed: bool
    ) -> ChatResponse:
        """The response with the report of the last answer, in the detail that the LLM or the call asks for."""
        default: Detail = "full" if streamed else "compact"
        detail = options.get("risk_metadata") or getattr(self.llm, "risk_metadata", None) or default
        if collector.reports and detail != "none":
            report = collector.reports[-1]
            kept = report if detail == "full" else compact_report(report, None)  # the text is that of the object
            response.additional_kwargs = {**response.additional_kwargs, RISK_KEY: kept}
        return response
