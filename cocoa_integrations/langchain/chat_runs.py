"""A chat model that knows its run in every kind of call, so that its risk is written to the spans of the run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableConfig

from cocoa_integrations.langchain.run_spans import KnowsRuns, new_run


class ChatRuns(KnowsRuns, BaseChatModel):
    """Base of the chat models. LangChain does not tell ``_stream`` of a chat model its run."""

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """As in LangChain."""
        runs, config = new_run(config, self.callbacks)
        model = self._with_runs(*runs)
        yield from super(ChatRuns, model).stream(input, config, stop=stop, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """See :meth:`stream`."""
        runs, config = new_run(config, self.callbacks)
        model = self._with_runs(*runs)
        async with aclosing(super(ChatRuns, model).astream(input, config, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        """As in LangChain, which does not tell :meth:`_stream` the run."""
        model = self._in_runs(run_manager)
        return super(ChatRuns, model)._generate_with_cache(messages, stop, run_manager, **kwargs)

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        """See :meth:`_generate_with_cache`."""
        model = self._in_runs(run_manager)
        return await super(ChatRuns, model)._agenerate_with_cache(messages, stop, run_manager, **kwargs)
