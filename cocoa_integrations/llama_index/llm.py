"""CoCoA decoding behind LlamaIndex's LLM interface; the option names are those of HuggingFaceLLM."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, ValidationError
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, Generation, SpanStream
from cocoa_engine.faults import explain
from cocoa_integrations.async_stream import AsyncSpanStream
from cocoa_integrations.llama_index.callbacks import Watchers
from cocoa_integrations.llama_index.generate_kwargs import DecodeOptions
from cocoa_integrations.llama_index.loading import DEVICE_MAP, engine_for
from cocoa_integrations.llama_index.messages import ChatTemplatePrompt, template_messages
from cocoa_integrations.llama_index.responses import Answer, Chunks, whole_answer
from cocoa_integrations.settings import refuse_unknown, split_settings

logger = logging.getLogger(__name__)

Response = TypeVar("Response", CompletionResponse, ChatResponse)
Start = Callable[[], SpanStream]
"""Starts one answer."""


class CocoaLLM(CustomLLM):
    """A local Hugging Face model, decoded with CoCoA, that says how risky each span of its answers is.

    Every field of :class:`CocoaConfig` is an option too, of the constructor and of each call::

        llm = CocoaLLM(model_name="Qwen/Qwen2.5-7B-Instruct", alpha=2.0, max_new_tokens=128)
        response = llm.complete("The capital of France is", alpha=0.5)
        response.additional_kwargs["cocoa_risk"]["max_risk"]

    Without a model it loads the embedded default one. Calls also take transformers' generate keywords, as far as
    CoCoA can honour them; anything else raises. Chat goes through the tokenizer's chat template unless
    ``messages_to_prompt`` is given. A streamed answer ends with a chunk that adds no text and holds the report of
    the whole answer, its usage and its finish reason.

    LlamaIndex fits contexts into the window by counting with its own tokenizer; ``Settings.tokenizer =
    llm.engine.encode`` makes it count the model's tokens.

    Args:
        engine: an engine to use, instead of the options that load one.
        config: decode settings to start from; single settings given beside it go before it.
        model: a loaded model, instead of ``model_name``; needs ``tokenizer`` (or ``tokenizer_name``).
        tokenizer: a loaded tokenizer, instead of ``tokenizer_name``.
        messages_to_prompt: writes chat messages as a prompt, instead of the chat template.
        completion_to_prompt: wraps each prompt of a completion.
        **options: the fields below, the settings in :class:`CocoaConfig`, and LlamaIndex's own LLM options
            (``callback_manager``, ``output_parser``, ``pydantic_program_mode``, ``rate_limiter``).

    Raises:
        ConfigError: an option is unknown, out of range, contradicts another or cannot be honoured.
        ModelLoadError: the model cannot be loaded.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=("pydantic_model_",))

    model_name: str | None = Field(None, description="Hub id or folder of the model. Default: the embedded model.")
    tokenizer_name: str | None = Field(None, description="Hub id or folder of the tokenizer, if not the model's.")
    context_window: int = Field(description="Tokens that prompt and answer may have together.", gt=0)
    query_wrapper_prompt: BasePromptTemplate | None = Field(
        None, exclude=True, description="Put around the prompt of a completion; has a {query_str} placeholder."
    )
    system_prompt: str | None = Field(
        None, description="Put before the prompt of a completion, and before messages that do not open with one."
    )
    device_map: str | dict[str, Any] | None = Field(DEVICE_MAP, description="Where the model's layers go.")
    stopping_ids: list[int] = Field(default_factory=list, description="Token ids that end an answer.")
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict, description="For loading the tokenizer.")
    model_kwargs: dict[str, Any] = Field(default_factory=dict, description="For loading the model.")
    generate_kwargs: dict[str, Any] = Field(default_factory=dict, description="Decode options of every call.")
    is_chat_model: bool = Field(
        description="Whether LlamaIndex should send chat messages rather than text. Default: if there is a chat "
        "template or messages_to_prompt, and completions are not wrapped."
    )
    config: CocoaConfig = Field(description="The decode settings of every call.")

    _engine: CocoaEngine = PrivateAttr()
    _options: DecodeOptions = PrivateAttr()

    def __init__(
        self,
        *,
        engine: CocoaEngine | None = None,
        config: CocoaConfig | Mapping[str, Any] | None = None,
        model: Any = None,
        tokenizer: Any = None,
        model_name: str | None = None,
        tokenizer_name: str | None = None,
        context_window: int | None = None,
        query_wrapper_prompt: BasePromptTemplate | str | None = None,
        device_map: str | dict[str, Any] | None = DEVICE_MAP,
        stopping_ids: Sequence[int] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        generate_kwargs: dict[str, Any] | None = None,
        is_chat_model: bool | None = None,
        messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None = None,
        completion_to_prompt: Callable[[str], str] | None = None,
        **options: Any,
    ) -> None:
        settings, rest = split_settings(options)
        refuse_unknown(rest, (*type(self).model_fields, "engine", "model", "tokenizer"), what="CocoaLLM")
        generate_kwargs = generate_kwargs or {}
        twice = settings.keys() & split_settings(generate_kwargs)[0].keys()
        if twice:
            raise ConfigError(f"given both by itself and in generate_kwargs: {', '.join(sorted(twice))}.")
        start = engine.config if engine is not None else CocoaConfig()
        if config is not None:
            start = config if isinstance(config, CocoaConfig) else CocoaConfig(**config)
        asked = {"stopping_ids": stopping_ids or None, **generate_kwargs}
        decode = DecodeOptions(start.replace(**settings)).updated(asked)
        wrapper = _query_wrapper(query_wrapper_prompt)
        loaded_by_name = engine is None and model is None
        engine = engine_for(
            engine,
            model_name=model_name,
            tokenizer_name=tokenizer_name,
            model=model,
            tokenizer=tokenizer,
            device_map=device_map,
            model_kwargs=model_kwargs or {},
            tokenizer_kwargs=tokenizer_kwargs or {},
        )
        if is_chat_model is None:
            chats = messages_to_prompt is not None or engine.has_chat_template
            is_chat_model = chats and wrapper is None and completion_to_prompt is None
        try:
            super().__init__(
                model_name=model_name if loaded_by_name else engine.model_name,
                tokenizer_name=tokenizer_name,
                context_window=_window(context_window, engine),
                query_wrapper_prompt=wrapper,
                device_map=device_map,
                stopping_ids=list(stopping_ids or ()),
                tokenizer_kwargs=tokenizer_kwargs or {},
                model_kwargs=model_kwargs or {},
                generate_kwargs=generate_kwargs,
                is_chat_model=is_chat_model,
                messages_to_prompt=messages_to_prompt or ChatTemplatePrompt(engine),
                completion_to_prompt=completion_to_prompt,
                config=decode.config,
                **rest,
            )
        except ValidationError as error:
            raise ConfigError(f"CocoaLLM: {explain(error)}") from None
        self._engine = engine
        self._options = decode

    @classmethod
    def class_name(cls) -> str:
        """The name under which LlamaIndex serialises it."""
        return "CocoaLLM"

    @property
    def engine(self) -> CocoaEngine:
        """The engine that decodes."""
        return self._engine

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex needs to know to fit prompts to the model."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.config.max_new_tokens,
            is_chat_model=self.is_chat_model,
            model_name=self._engine.model_name,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The answer to a prompt.

        Args:
            prompt: the text to go on from.
            formatted: whether the system prompt and the wrappers have been applied already.
            **kwargs: settings of :class:`CocoaConfig` and generate keywords for this call only.

        Raises:
            PromptError: the prompt is empty or does not fit the context window.
            ConfigError: an option is unknown, out of range or cannot be honoured.
        """
        return self._answer(self._completion(prompt, formatted, kwargs)).to_completion()

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As :meth:`complete`, a chunk for each span as soon as it is decided."""
        return self._stream(self._completion(prompt, formatted, kwargs), Answer.to_completion)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As :meth:`complete`, off the event loop; cancelling it stops the work."""
        return (await self._aanswer(self._completion(prompt, formatted, kwargs))).to_completion()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As :meth:`stream_complete`, off the event loop; cancelling or leaving it stops the work."""
        return await self._astream(self._completion(prompt, formatted, kwargs), Answer.to_completion)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The assistant's answer to chat messages.

        Args:
            messages: text only.
            **kwargs: as for :meth:`complete`.

        Raises:
            ChatTemplateError: the tokenizer has no chat template and ``messages_to_prompt`` was not given, or the
                template refuses the messages.
            PromptError: the messages hold more than text, or do not fit the context window.
            ConfigError: an option is unknown, out of range or cannot be honoured.
        """
        return self._answer(self._conversation(messages, kwargs)).to_chat()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As :meth:`chat`, a chunk for each span as soon as it is decided."""
        return self._stream(self._conversation(messages, kwargs), Answer.to_chat)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As :meth:`chat`, off the event loop; cancelling it stops the work."""
        return (await self._aanswer(self._conversation(messages, kwargs))).to_chat()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As :meth:`stream_chat`, off the event loop; cancelling or leaving it stops the work."""
        return await self._astream(self._conversation(messages, kwargs), Answer.to_chat)

    def _completion(self, prompt: str, formatted: bool, options: Mapping[str, Any]) -> Start:
        def start() -> SpanStream:
            asked = self._asked(options)
            assert self.completion_to_prompt is not None  # LLM's validator sees to it
            wrapped = prompt if formatted else self._extend_prompt(self.completion_to_prompt(prompt))
            return self._engine.stream(self._with_one_bos(wrapped), **asked)

        return start

    def _conversation(self, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> Start:
        def start() -> SpanStream:
            asked = self._asked(options)
            opened = list(messages)
            if not (opened and opened[0].role in (MessageRole.SYSTEM, MessageRole.DEVELOPER)):
                opened = self._extend_messages(opened)
            assert self.messages_to_prompt is not None  # LLM's validator sees to it
            if isinstance(self.messages_to_prompt, ChatTemplatePrompt):
                return self._engine.stream_chat(template_messages(opened), **asked)
            return self._engine.stream(self._with_one_bos(self.messages_to_prompt(opened)), **asked)

        return start

    def _asked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        decode = replace(self._options, config=self.config).updated(options)
        return {
            "config": decode.config,
            "logits_processor": decode.logits_processors(self._engine.model),
            "stopping_criteria": decode.stopping_criteria(),
        }

    def _with_one_bos(self, prompt: str) -> str | list[int]:
        """Prompt formats often write the begin-of-sequence token out; the tokenizer must not add a second one."""
        bos = self._engine.tokenizer.bos_token
        return self._engine.encode(prompt, add_special_tokens=False) if bos and prompt.startswith(bos) else prompt

    def _answer(self, start: Start) -> Answer:
        watchers = Watchers()
        with start() as stream:
            for span in stream:
                watchers.span_decided(span)
        return self._complete_answer(stream.generation, watchers)

    async def _aanswer(self, start: Start) -> Answer:
        watchers = Watchers()
        async with await AsyncSpanStream.open(start) as stream:
            async for span in stream:
                watchers.span_decided(span)
        return self._complete_answer(stream.generation, watchers)

    def _stream(self, start: Start, to_response: Callable[[Answer], Response]) -> Generator[Response, None, None]:
        watchers, stream = Watchers(), start()

        def responses() -> Generator[Response, None, None]:
            chunks = Chunks(self._engine)
            with stream:
                for span in stream:
                    watchers.span_decided(span)
                    yield to_response(chunks.next(span))
            yield to_response(self._complete_answer(stream.generation, watchers, streamed=True))

        return responses()

    async def _astream(self, start: Start, to_response: Callable[[Answer], Response]) -> AsyncGenerator[Response, None]:
        watchers, stream = Watchers(), await AsyncSpanStream.open(start)

        async def responses() -> AsyncGenerator[Response, None]:
            chunks = Chunks(self._engine)
            async with stream:
                async for span in stream:
                    watchers.span_decided(span)
                    yield to_response(chunks.next(span))
            yield to_response(self._complete_answer(stream.generation, watchers, streamed=True))

        return responses()

    def _complete_answer(self, generation: Generation | None, watchers: Watchers, *, streamed: bool = False) -> Answer:
        assert generation is not None  # its stream has been read to its end
        watchers.answer_complete(generation)
        return whole_answer(generation, self._engine, streamed=streamed)


def _query_wrapper(given: BasePromptTemplate | str | None) -> BasePromptTemplate | None:
    template = PromptTemplate(given) if isinstance(given, str) else given
    if template is not None and "query_str" not in template.template_vars:
        raise ConfigError("query_wrapper_prompt has no {query_str} placeholder, so it would drop the prompt.")
    return template


def _window(asked: int | None, engine: CocoaEngine) -> int:
    limit = engine.context_window
    if asked is not None and limit is not None and asked > limit:
        logger.warning("context_window=%d is more than the model's %d tokens; using %d.", asked, limit, limit)
        return limit
    return asked if asked is not None else limit or DEFAULT_CONTEXT_WINDOW
