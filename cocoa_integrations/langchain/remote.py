"""A chat model that asks ``cocoa serve``. Messages and chunks have the risk where those of ``ChatCocoa`` have it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from cocoa_engine.optional import need

need("langchain_openai", extra="remote", what="ChatCocoaRemote")

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig
from pydantic import Field, SecretStr, ValidationError, model_validator
from typing_extensions import Self

from cocoa_engine import __version__
from cocoa_engine.errors import ConfigError, UnsupportedFeatureError
from cocoa_engine.messages import explain
from cocoa_integrations._shared.chat_template import template_options
from cocoa_integrations._shared.detail import Detail, require_detail
from cocoa_integrations._shared.load_options import one_model_name
from cocoa_integrations._shared.remote_answers import CHUNK, RESPONSE, clear_errors, received
from cocoa_integrations._shared.remote_settings import (
    DEFAULT_MODEL,
    DEFAULT_URL,
    NO_KEY,
    refuse_unknown,
    require_addresses,
)
from cocoa_integrations._shared.settings import SYNONYMS
from cocoa_integrations.langchain.cocoa_chat import CocoaChat
from cocoa_integrations.langchain.detail import ReducedStream, reduced_result
from cocoa_integrations.langchain.messages import to_chat
from cocoa_integrations.langchain.remote_answers import DELTA, StreamedAnswer, complete_message, recorded
from cocoa_integrations.langchain.remote_request import OPENAI_SETTINGS, RemoteRequests
from cocoa_integrations.langchain.tools import tool_request
from cocoa_integrations.tracing import RiskTrace

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile


class ChatCocoaRemote(CocoaChat, RemoteRequests):
    """The chat model of a server (``cocoa serve``), with the risk of every span of its answers.

    Messages, chunks and callbacks have ``cocoa_risk`` and ``cocoa_spans`` where those of :class:`ChatCocoa` have them,
    so gates, retries, middleware, collectors and structured output work alike. Every setting of
    :class:`~cocoa_engine.CocoaConfig` is an option, of the constructor and of each call, except ``decore_heads``. A
    setting that is not given is that of the server. All options of ``ChatOpenAI`` are accepted. ``model_name`` matters
    only if the server was given names, and ``api_key`` if it was given keys. The key of OpenAI in the environment is
    never sent.

    An error of the server is raised as the exception of the package ``openai`` for its status, with the server's
    message: ``BadRequestError``, ``AuthenticationError``, ``RateLimitError`` and others. Requests that a busy server
    refuses are sent again, up to ``max_retries`` times, after the time that it asks for. An answer with a missing field
    or one of a wrong type, such as that of a server of another kind, is a ``DataError``.

    Example:
        >>> chat = ChatCocoaRemote(base_url="http://127.0.0.1:8000/v1", alpha=2.5, max_tokens=256)
        >>> answer = chat.invoke("What is the capital of France?")
        >>> answer.response_metadata["cocoa_risk"]["max_risk"]

    Raises:
        ConfigError: an option is unknown or out of range.
        MissingExtraError: the package langchain-openai is not installed.
    """

    model_name: str = Field(default=DEFAULT_MODEL, alias="model")
    openai_api_base: str | None = Field(default=DEFAULT_URL, alias="base_url")
    openai_api_key: SecretStr | Callable[[], Any] | None = Field(default=SecretStr(NO_KEY), alias="api_key")
    stream_usage: bool | None = True
    use_responses_api: bool | None = False

    risk_metadata: Detail | None = None
    """How much of the risk returned answers carry, as for :class:`ChatCocoa`."""

    if TYPE_CHECKING:
        alpha: Any

    def __init__(self, **options: Any) -> None:
        what, fields = type(self).__name__, type(self).model_fields
        aliases = {field.alias for field in fields.values() if field.alias}
        known = {*fields, *aliases, *SYNONYMS, *OPENAI_SETTINGS}
        refuse_unknown(options, known, what=what, base="ChatOpenAI")
        one_model_name(options, field="model")
        require_addresses(options)
        limit = options.pop("max_new_tokens", None)
        if limit is not None and options.setdefault("max_tokens", limit) != limit:
            raise ConfigError(f"max_new_tokens is given twice: {limit!r} and, as max_tokens, {options['max_tokens']!r}")
        defaults = ("api_key", "openai_api_key", "base_url", "openai_api_base", "model", "model_name")
        options = {name: value for name, value in options.items() if value is not None or name not in defaults}
        require_detail(options.get("risk_metadata"))
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(f"{what}: {explain(error)}") from None
        self.given_settings()

    @model_validator(mode="after")
    def _set_cocoa_remote_version(self) -> Self:
        self._add_version("cocoa-integrations", __version__)
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether LangChain can load it by its own names."""
        return False

    @property
    def _llm_type(self) -> str:
        return "cocoa-chat-remote"

    def _resolve_model_profile(self) -> ModelProfile:
        return {
            "text_inputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "text_outputs": True,
            "tool_calling": True,
            "tool_choice": True,
            "structured_output": True,
            "temperature": True,
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, from ``custom_get_token_ids``.

        Raises:
            UnsupportedFeatureError: it was not given. The tokenizer is at the server.
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        raise UnsupportedFeatureError(
            f"{type(self).__name__} has no tokenizer, because the model is at the server; give custom_get_token_ids"
        )

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], *args: Any, **kwargs: Any) -> int:
        """The number of tokens of the texts of messages; see :meth:`get_token_ids`."""
        return sum(len(self.get_token_ids(message.text)) for message in messages)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As in LangChain. Returned messages have the detail that ``risk_metadata`` says; callbacks receive all."""
        called, kwargs = self._called(kwargs)
        result = super(ChatCocoaRemote, called).generate(messages, stop, callbacks, **kwargs)
        return called._returned(result)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See :meth:`generate`."""
        called, kwargs = self._called(kwargs)
        result = await super(ChatCocoaRemote, called).agenerate(messages, stop, callbacks, **kwargs)
        return called._returned(result)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """As in LangChain. The chunks have full metadata unless ``risk_metadata`` says otherwise."""
        reduced = self._reduced_stream(kwargs)
        kwargs["risk_metadata"] = "full"  # reduced below; LangChain may call invoke instead
        with closing(super().stream(input, config, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                yield reduced.next(chunk) if reduced else chunk

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """See :meth:`stream`."""
        reduced = self._reduced_stream(kwargs)
        kwargs["risk_metadata"] = "full"
        async with aclosing(super().astream(input, config, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield reduced.next(chunk) if reduced else chunk

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """The model with the settings of one call applied.

        Raises:
            ConfigError: an option is unknown or out of range.
        """
        self._payload_options(options)
        tool_request({**options, "tools": options.get("tools")})  # raises
        fields = {SYNONYMS.get(name, name): value for name, value in options.items()}
        fields = {OPENAI_SETTINGS.get(name, name): value for name, value in fields.items()}
        return self.model_copy(update={name: fields[name] for name in fields.keys() & type(self).model_fields.keys()})

    def calls_like(self, other: ChatCocoaRemote) -> bool:
        """Whether calls of both models have the same options."""
        return self.given_settings() == other.given_settings() and template_options(self) == template_options(other)

    def prompt_text(self, given: LanguageModelInput) -> str:
        """The texts of the messages of a prompt. The chat template is at the server."""
        return "\n".join(entry["content"] for entry in to_chat(self._convert_input(given).to_messages()))

    async def aprompt_text(self, given: LanguageModelInput) -> str:
        """See :meth:`prompt_text`."""
        return self.prompt_text(given)

    def _called(self, options: dict[str, Any]) -> tuple[Self, dict[str, Any]]:
        """The model with the detail of one call, and the other options."""
        detail = options.pop("risk_metadata", None)
        if detail is None:
            return self, options
        require_detail(detail)
        return self.model_copy(update={"risk_metadata": detail}), options

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        raw = received(response, RESPONSE)
        result = super()._create_chat_result(response, generation_info)
        for made, choice in zip(result.generations, raw["choices"], strict=True):
            complete_message(made.message, choice, raw)
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        received(chunk, CHUNK)
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if made is not None and chunk.get("choices"):
            made.message.additional_kwargs[DELTA] = chunk["choices"][0].get("delta") or {}
        return made

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop, **kwargs)
        params["ls_provider"] = "cocoa"
        return params

    def _returned(self, result: LLMResult) -> LLMResult:
        """The result with the detail that the messages of a call have."""
        return reduced_result(result, self.risk_metadata or "compact", logprobs=True)

    def _reduced_stream(self, options: Mapping[str, Any]) -> ReducedStream | None:
        """Reduces the chunks of a stream with these options; ``None`` if they have full metadata."""
        detail = options.get("risk_metadata") or self.risk_metadata
        require_detail(detail)
        return None if detail in (None, "full") else ReducedStream(detail, logprobs=True)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        trace = RiskTrace()
        with clear_errors():
            return recorded(super()._generate(messages, stop, run_manager, **kwargs), trace)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        trace = RiskTrace()
        with clear_errors():
            return recorded(await super()._agenerate(messages, stop, run_manager, **kwargs), trace)

    # OpenAI's class tells the callbacks of a chunk before it is complete here, so it is not given the run

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        answer = StreamedAnswer(RiskTrace(), blocks=self.output_version == "v1")
        chunks: Any = super()._stream(messages, stop, None, **kwargs)
        with closing(chunks):
            for chunk in answer.of(chunks):
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        answer = StreamedAnswer(RiskTrace(), blocks=self.output_version == "v1")
        chunks: Any = super()._astream(messages, stop, None, **kwargs)
        async with aclosing(chunks):
            async for chunk in answer.aof(chunks):
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
