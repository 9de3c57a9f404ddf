"""What the text model and the chat model share: construction, the options of a call, and the calls of their service."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, ClassVar, Literal
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import BaseLanguageModel, LangSmithParams, LanguageModelInput
from langchain_core.outputs import LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from cocoa_engine import CocoaEngine, __version__
from cocoa_engine.errors import ConfigError, UnsupportedFeatureError, explain
from cocoa_engine.integration import MODEL_NAME, changed_options
from cocoa_engine.report import Detail, require_detail
from cocoa_integrations._shared.engines import LazyEngine, settings_digest
from cocoa_integrations._shared.options import (
    ChatTemplateOptions,
    DecodeSettings,
    config_of,
    fields_of,
    refuse_unknown,
    refuse_unsupported,
    split_settings,
)
from cocoa_integrations.chat_service import ChatCall
from cocoa_integrations.chat_service.options import AnswerOptions, ModelOptions, one_model_name
from cocoa_integrations.chat_service.remote import DEFAULT_MODEL
from cocoa_integrations.langchain.answers import reduced_result
from cocoa_integrations.langchain.composed import Composable
from cocoa_integrations.langchain.messages import Writer
from cocoa_integrations.tracing import RiskTrace

FRAMEWORK = frozenset({"tags", "metadata", "run_name", "run_id", "stream", "ls_structured_output_format"})
"""Keyword arguments of a call that belong to LangChain."""

TOOLS = frozenset({"tools", "tool_choice", "response_format"})
"""Keyword arguments of a call that ask for tools or structured output."""

TOOL_DETAILS = frozenset({"strict", "parallel_tool_calls"})
"""Keyword arguments that control how tools are called. They have no effect without tools."""


class CallOptions(AnswerOptions, DecodeSettings):
    """The options that both the constructor and a single call take, besides those of ``AnswerOptions``."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    stream_usage: bool = True
    """Whether the last chunk of a stream has the token counts of the answer."""

    logits_processor: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Logits processors of transformers, one or a list. Answers are then not cached, because a processor cannot be part
    of a cache key."""

    stopping_criteria: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Stopping criteria of transformers, one or a list. Answers are then not cached."""

    @field_validator("logits_processor", "stopping_criteria", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> tuple[Any, ...]:
        # transformers' LogitsProcessorList is itself callable, so lists are checked first
        return tuple(value) if isinstance(value, Sequence) else (value,)


class ChatCallOptions(ChatTemplateOptions, CallOptions):
    """The options that both the constructor and a single call of a chat model take."""

    source: Sequence[str] | Sequence[tuple[int, int]] = Field(default=(), exclude=True, repr=False)
    """Passages of the prompt, as texts that it contains or as ranges of its characters after the chat template (texts
    only for a model at a server). Every span then has ``passage_attention``: its attention on each of them."""


PER_CALL = frozenset(ChatCallOptions.model_fields)
"""The names of the options of a call of a chat model."""


_engine_ids: WeakKeyDictionary[CocoaEngine, str] = WeakKeyDictionary()
"""Ids for cache keys. The name of a model is not unique, and an ``id()`` can be reused."""


class CocoaModel(CallOptions, ModelOptions, Composable, BaseLanguageModel[Any]):
    """Base of :class:`CocoaLLM` and :class:`ChatCocoa`: construction, options of a call, access to the engine.

    Its options are those of ``ModelOptions`` and ``CallOptions``, and the following.
    """

    streaming: bool | None = None
    """``True``: ``invoke`` also passes each span to the callbacks as soon as it is decided. ``False``: ``stream`` of a
    chat model yields the answer in one piece."""

    engine: CocoaEngine | None = Field(default=None, exclude=True, repr=False)
    """The engine to use. Without one, the model is loaded at the first call, or by :meth:`load`."""

    _ls_model_type: ClassVar[Literal["chat", "llm"]]
    _detail: ClassVar[Detail]
    """The default of ``risk_metadata`` for what is not a stream."""
    _batches_prompts: ClassVar[bool]
    _call_options: ClassVar[type[CallOptions]] = CallOptions
    _tool_options: ClassVar[frozenset[str]] = frozenset()
    """The names of the options that ask for tools, for error messages."""

    def __init__(self, **options: Any) -> None:
        require_detail(options.get("risk_metadata"))
        config, fields = self._read(options)
        super().__init__(**{**fields, **fields_of(config)})
        # created now, so that models rebuilt from this one share it, and that a wrong address is an error
        _ = self.service if self.is_remote else self._engine_or_lazy

    @model_validator(mode="after")
    def _set_cocoa_version(self) -> Self:
        self._add_version("cocoa-integrations", __version__)
        return self

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """The model with the options of one call applied."""
        return self._for_call(None, options)[0]

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text from the tokenizer of the model, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.load().encode(text, add_special_tokens=False)

    @property
    def _objects(self) -> dict[str, Any]:
        return {} if self.engine is None else {"engine": self.engine}

    @property
    def _name(self) -> str:
        if self.engine is not None:
            return self.engine.model_name
        return self.model_name or (DEFAULT_MODEL if self.is_remote else MODEL_NAME)

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that an answer depends on. LangChain's caches use it as their key."""
        if self.is_remote:
            model: dict[str, Any] = {"base_url": self.base_url}
        elif self.engine is None:
            model = {name: getattr(self, name) for name in changed_options(self)}
            for kwargs in model.keys() & {"model_kwargs", "tokenizer_kwargs"}:
                model[kwargs] = {name: value for name, value in model[kwargs].items() if name != "token"}
            lazy = self._engine_or_lazy
            if isinstance(lazy, LazyEngine) and (changed := lazy.changed_settings) is not None:
                model["settings"] = changed
        else:
            model = {
                "dtype": str(self.engine.held_model.dtype),
                "engine_id": _engine_ids.setdefault(self.engine, uuid4().hex),
                "settings": settings_digest(self.engine),
            }
        if not self.stream_usage:
            model["stream_usage"] = False
        config = config_of(self)
        settings = config.model_dump(mode="json", include=config.model_fields_set)
        rivals = {"candidates": True} if self.candidates else {}
        return {**model, "model_name": self._name, **settings, **rivals, "logprobs": self._lists_logprobs}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        settings, rest = split_settings({name: value for name, value in kwargs.items() if name not in FRAMEWORK})
        params = LangSmithParams(
            ls_provider="cocoa",
            ls_model_type=self._ls_model_type,
            ls_model_name=rest.get("model") or rest.get("model_name") or self._name,
            ls_temperature=settings.get("temperature", self.temperature),
            ls_max_tokens=settings.get("max_new_tokens", self.max_new_tokens),
        )
        if stop or self.stop:
            params["ls_stop"] = list(stop or self.stop or ())
        return params

    def _for_call(self, stop: list[str] | None, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """The model with the options of one call applied, and the options that belong to LangChain.

        LangChain's cache for text models uses only the model as its key, not the options of a call.
        """
        for detail in (self.risk_metadata, options.get("risk_metadata")):  # the former may be set after construction
            require_detail(detail)
        if not self.is_remote:
            _ = self._engine_or_lazy  # of the current options; the copy of this call shares it
        called, what = self._with_tools(options), f"a call of {type(self).__name__}"
        framework = {name: value for name, value in options.items() if name in FRAMEWORK}
        own = {name: value for name, value in options.items() if name not in FRAMEWORK | TOOLS | TOOL_DETAILS}
        before, kind, update = config_of(self), self._call_options, dict[str, Any]()
        settings, rest = split_settings(own, before.method)
        defaults = kind()  # None leaves an option at its default, unless it is a value of the option
        rest = {
            name: value for name, value in rest.items() if value is not None or getattr(defaults, name, None) is None
        }
        rest = refuse_unsupported(rest, what=what)
        one_model_name(rest)
        refuse_unknown(rest, {*kind.model_fields, "model_name", *self._tool_options}, what=what)
        if (name := rest.pop("model_name", None)) not in (None, self._name):
            if not self.is_remote:
                raise ConfigError(
                    f"{what} cannot change the model from {self._name!r} to {name!r}; make another "
                    f"{type(self).__name__}"
                )
            update["model_name"] = name
        if self.is_remote:
            settings = {name: value for name, value in settings.items() if value is not None}
        config = before.replace(**{**settings, **({} if stop is None else {"stop": stop})})
        try:
            checked = kind(**rest)
        except ValidationError as error:
            raise ConfigError(f"{what}: {explain(error)}") from None
        update |= {name: getattr(checked, name) for name in rest}
        if any(update.get(name, getattr(self, name)) for name in ("logits_processor", "stopping_criteria")):
            update["cache"] = False
        if not update and fields_of(config) == fields_of(before):
            return called, framework
        copy = called.model_copy(update={**fields_of(config), **update})
        copy.__dict__.pop("_serialized", None)  # LangChain's cached description of the original
        return copy, framework

    def _call(self, **prompt: Any) -> ChatCall:
        """What the service is asked for."""
        return ChatCall(
            config=config_of(self),
            logprobs=self._lists_logprobs,
            candidates=self.candidates,
            logits_processor=self.logits_processor,
            stopping_criteria=self.stopping_criteria,
            timeout=None if self.is_remote else self.timeout,
            **prompt,
        )

    def _with_tools(self, options: Mapping[str, Any]) -> Self:
        """The model with the tools and the response format that the options of a call ask for: none for text."""
        if asked := [name for name in sorted(TOOLS) if options.get(name)]:
            raise UnsupportedFeatureError(
                f"{type(self).__name__} does not call tools or enforce a schema ({', '.join(asked)}); use ChatCocoa"
            )
        return self

    @abstractmethod
    def _request(self, prompt: Any) -> ChatCall:
        """What the service is asked for by a prompt, or by messages."""

    def _writer(self) -> Writer:
        blocks = getattr(self, "output_version", None) == "v1"
        return Writer(is_chat=self._ls_model_type == "chat", blocks=blocks, usage=self.stream_usage)

    def _stream(
        self,
        prompt: Any,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Generator[Any, None, None]:
        model, _ = self._for_call(stop, kwargs)
        trace, writer = RiskTrace(), model._writer()

        def told(chunk: Any) -> Any:
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            return chunk

        with closing(model.service.stream(model._request(prompt))) as stream:
            for piece in chain.from_iterable(stream):
                yield told(writer.chunk(piece))
            trace.record(stream.answer)
            yield told(writer.last(stream.answer))

    async def _astream(
        self,
        prompt: Any,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[Any, None]:
        model, _ = self._for_call(stop, kwargs)
        trace, writer = RiskTrace(), model._writer()

        async def told(chunk: Any) -> Any:
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            return chunk

        async with model.service.stream(model._request(prompt)) as stream:
            async for pieces in stream:
                for piece in pieces:
                    yield await told(writer.chunk(piece))
            trace.record(stream.answer)
            yield await told(writer.last(stream.answer))

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """As in LangChain. ``max_concurrency`` defaults to the batch size of the engine.

        A text model decodes the prompts as one call, and with ``return_exceptions=True`` as calls of their own, so that
        one that fails does not affect the others.
        """
        if self._batches_prompts and not return_exceptions:
            return super().batch(inputs, config, **kwargs)
        configs = self._with_concurrency(config, len(inputs))
        return Runnable.batch(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """See :meth:`batch`."""
        if self._batches_prompts and not return_exceptions:
            return await super().abatch(inputs, config, **kwargs)
        configs = self._with_concurrency(config, len(inputs))
        return await Runnable.abatch(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def _with_concurrency(
        self, config: RunnableConfig | list[RunnableConfig] | None, count: int
    ) -> list[RunnableConfig]:
        """The configs of a batch, with ``max_concurrency`` where it is not set: by default the engine's batch size."""
        batch_size = 8 if self.is_remote else self._engine_or_lazy.runtime.max_batch_size
        batch_size = getattr(self, "batch_size", None) or batch_size
        return [
            {**own, "max_concurrency": own.get("max_concurrency") or batch_size}
            for own in get_config_list(config, count)
        ]

    def generate(
        self,
        prompts: Any = None,
        stop: list[str] | None = None,
        callbacks: Any = None,
        *,
        messages: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As in LangChain, where a chat model takes ``messages`` and a text model ``prompts``.

        The options of the call are applied to the model first, so caches and traces see them.
        """
        model, framework = self._for_call(stop, kwargs)
        inner: Any = super(CocoaModel, model)
        batch = messages if prompts is None else prompts
        return model._returned(inner.generate(batch, model._stops, callbacks, **framework))

    async def agenerate(
        self,
        prompts: Any = None,
        stop: list[str] | None = None,
        callbacks: Any = None,
        *,
        messages: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See :meth:`generate`."""
        model, framework = self._for_call(stop, kwargs)
        inner: Any = super(CocoaModel, model)
        batch = messages if prompts is None else prompts
        return model._returned(await inner.agenerate(batch, model._stops, callbacks, **framework))

    @property
    def _stops(self) -> list[str] | None:
        return list(self.stop or ()) or None

    def _returned(self, result: LLMResult) -> LLMResult:
        """The result with the detail that the answers of a call have."""
        return reduced_result(result, self.risk_metadata or self._detail, logprobs=self._keeps_logprobs)

    @property
    def _keeps_logprobs(self) -> bool:
        """Whether answers carry log-probabilities even if their metadata is not full."""
        return self.logprobs is True or (self.logprobs is None and bool(self.top_logprobs))

    @property
    def _lists_logprobs(self) -> bool:
        """Whether the service lists the tokens of answers. A server is asked for them only where they are wanted."""
        return self._keeps_logprobs if self.is_remote else self.logprobs is not False
