"""A chat model that knows its run in every kind of call, and whose answers are cached by their prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableConfig

from cocoa_integrations.langchain.run_spans import KnowsRuns, new_run


class ChatRuns(KnowsRuns, BaseChatModel):
    """Base of the chat models. LangChain does not tell ``_stream`` of a chat model its run.

    Its caches would know an answer by all of the messages before it, with metadata that never reaches the prompt.
    """

    @abstractmethod
    def prompt_key(self, messages: Sequence[BaseMessage]) -> str:
        """What an answer to the messages depends on, besides the settings."""

    async def aprompt_key(self, messages: Sequence[BaseMessage]) -> str:
        """See :meth:`prompt_key`."""
        return self.prompt_key(messages)

    @property
    def _answer_cache(self) -> BaseCache | None:
        if isinstance(self.cache, BaseCache):
            return self.cache
        return None if self.cache is False else get_llm_cache()

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
        if (cache := model._answer_cache) is not None:
            model = model.model_copy(update={"cache": _PromptCache(cache, model.prompt_key(messages))})
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
        if (cache := model._answer_cache) is not None:
            model = model.model_copy(update={"cache": _PromptCache(cache, await model.aprompt_key(messages))})
        return await super(ChatRuns, model)._agenerate_with_cache(messages, stop, run_manager, **kwargs)


class _PromptCache(BaseCache):
    """A cache with one key in the place of the messages of a call."""

    def __init__(self, cache: BaseCache, key: str) -> None:
        self._cache, self._key = cache, key

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        return self._cache.lookup(self._key, llm_string)

    async def alookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        return await self._cache.alookup(self._key, llm_string)

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        self._cache.update(self._key, llm_string, return_val)

    async def aupdate(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        await self._cache.aupdate(self._key, llm_string, return_val)

    def clear(self, **kwargs: Any) -> None:
        self._cache.clear(**kwargs)
