"""What the text model and the chat model share: their options, their engine, and the metadata of an answer."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar

import torch
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import BaseLanguageModel, LangSmithParams
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from langchain_core.runnables.utils import AnyConfigurableField
from pydantic import Field, PrivateAttr, ValidationError, model_validator
from typing_extensions import Self

from cocoa_engine import Cancellation, CocoaConfig, CocoaEngine, Generation, Span, SpanStream, __version__
from cocoa_engine.errors import ConfigError, UnsupportedFeatureError
from cocoa_engine.messages import explain
from cocoa_engine.model.load_options import changed_options
from cocoa_integrations._shared.async_stream import AsyncStream
from cocoa_integrations._shared.detail import require_detail
from cocoa_integrations._shared.load_options import one_model_name, refuse_beside, with_field_names
from cocoa_integrations._shared.loading import settings_digest
from cocoa_integrations._shared.logprobs import openai_logprobs
from cocoa_integrations._shared.metadata import RISK_KEY, risk_report
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations._shared.settings import (
    FIELD_SYNONYMS,
    config_of,
    fields_of,
    refuse_unknown,
    set_config,
    split_settings,
)
from cocoa_integrations._shared.unsupported import refuse_unsupported
from cocoa_integrations._shared.workers import in_worker
from cocoa_integrations.langchain.composed import Composable
from cocoa_integrations.langchain.engine_owner import EngineOwner
from cocoa_integrations.langchain.from_model_id import FromModelId
from cocoa_integrations.langchain.identity import engine_id
from cocoa_integrations.langchain.options import (
    FRAMEWORK,
    INSTEAD,
    TOOL_DETAILS,
    TOOLS,
    CallOptions,
    without_unset,
)
from cocoa_integrations.langchain.time_limit import TimeLimit
from cocoa_integrations.tracing import RiskTrace

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

RETRY_PAUSE = 0.5
"""Seconds before the first retry; doubled before each further one."""


class CocoaModel(CallOptions, EngineOwner, FromModelId, Composable, BaseLanguageModel[Any]):
    """Base of :class:`CocoaLLM` and :class:`ChatCocoa`: construction, options of a call, access to the engine.

    Every setting of :class:`~cocoa_engine.CocoaConfig` is a field. A setting that is not given is taken from
    ``config``, or else from the engine. Every loading option is a field too: ``model_name``, ``tokenizer_name``,
    ``dtype``, ``device_map`` (default: the GPUs if there are any, otherwise the CPU; ``None``: the CPU),
    ``trust_remote_code``, ``allow_pickle``, ``model_kwargs``, ``tokenizer_kwargs``, ``runtime`` (a
    :class:`~cocoa_engine.Runtime` or its fields as a dict) and ``calibrator``. ``model`` is a synonym of
    ``model_name``, and ``max_tokens`` of ``max_new_tokens``.

    Raises:
        ConfigError: an option is unknown, out of range, or contradicts another.
    """

    max_retries: int = Field(default=2, ge=0)
    """How often a call is retried after it ran out of GPU memory, which other work may have used temporarily. Other
    errors are not retried: decoding the same prompt again gives the same answer."""

    streaming: bool | None = None
    """``True``: ``invoke`` also passes each span to the callbacks as soon as it is decided. ``False``: ``stream`` of a
    chat model yields the answer in one piece."""

    if TYPE_CHECKING:  # further arguments of the constructor
        model: str | os.PathLike[str] | None = None
        max_tokens: int | None = None
        config: CocoaConfig | None = None
    else:
        model = property(lambda self: self.model_name, lambda self, name: setattr(self, "model_name", name))
        max_tokens = property(lambda self: self.max_new_tokens, lambda self, n: setattr(self, "max_new_tokens", n))
        config = property(config_of, set_config)

    _cancellation: Cancellation | None = PrivateAttr(default=None)
    """Cancels the call that this copy was made for."""

    _ls_model_type: ClassVar[Literal["chat", "llm"]]
    _call_options: ClassVar[type[CallOptions]] = CallOptions
    _tool_options: ClassVar[frozenset[str]] = frozenset()
    """The names of the options that ask for tools, for error messages."""

    def __init__(self, **options: Any) -> None:
        base, engine = options.get("config"), options.get("engine")
        if base is None:
            base = engine.config if isinstance(engine, CocoaEngine) else CocoaConfig()
        if not isinstance(base, CocoaConfig):
            raise ConfigError(f"config takes a CocoaConfig, not {type(base).__name__}")
        settings, rest = split_settings(options, base.method)
        rest = refuse_unsupported(without_unset(type(self), rest), what=type(self).__name__)
        if not_here := INSTEAD.keys() & rest.keys():
            hints = "; ".join(f"instead of {name} {INSTEAD[name]}" for name in sorted(not_here))
            raise ConfigError(f"{type(self).__name__}: {hints}")
        if isinstance(rest.get("metadata"), str):
            raise ConfigError(f"{type(self).__name__}: metadata is LangChain's; the option is named risk_metadata")
        refuse_unknown(rest, [*type(self).model_fields, "model", "config"], what=type(self).__name__)
        rest.pop("config", None)
        named = one_model_name(rest)
        if isinstance(engine, CocoaEngine):
            refuse_beside("engine", [named if name == "model_name" else name for name in changed_options(rest)])
        try:
            super().__init__(**rest, **fields_of(base.replace(**settings)))
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
        _ = self._engine_or_lazy  # created now, so that models rebuilt from this one share it

    @model_validator(mode="after")
    def _set_cocoa_version(self) -> Self:
        self._add_version("cocoa-integrations", __version__)
        return self

    def configurable_fields(self, **kwargs: AnyConfigurableField) -> Any:
        """As in LangChain. ``max_tokens`` and ``model`` are accepted for ``max_new_tokens`` and ``model_name``.

        Raises:
            ConfigError: a field is given under two names.
        """
        fields: dict[str, AnyConfigurableField] = {}
        for name, field in kwargs.items():
            if FIELD_SYNONYMS.get(name, name) in fields:
                raise ConfigError(f"{FIELD_SYNONYMS.get(name, name)} is given under two names; give one of them")
            fields[FIELD_SYNONYMS.get(name, name)] = field
        return super().configurable_fields(**fields)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As in pydantic; ``max_tokens`` and ``model`` are accepted for ``max_new_tokens`` and ``model_name``."""
        return super().model_copy(update=with_field_names(update), deep=deep)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """The model with the options of one call applied.

        Raises:
            ConfigError: an option is unknown or out of range.
        """
        return self._for_call(None, options)[0]

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text from the tokenizer of the model, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.load().encode(text, add_special_tokens=False)

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that an answer depends on. LangChain's caches use it as their key."""
        if self.engine is None:
            model = {name: getattr(self, name) for name in changed_options(self)}
            for kwargs in model.keys() & {"model_kwargs", "tokenizer_kwargs"}:
                model[kwargs] = {name: value for name, value in model[kwargs].items() if name != "token"}
            if (changed := self._lazy_engine.changed_settings) is not None:
                model["settings"] = changed
        else:
            model = {
                "dtype": str(self.engine.held_model.dtype),
                "engine_id": engine_id(self.engine),
                "settings": settings_digest(self.engine),
            }
        if not self.stream_usage:
            model["stream_usage"] = False
        settings = config_of(self).model_dump(mode="json")
        return {**model, "model_name": self._name, **settings, "logprobs": self.logprobs is not False}

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
            params["ls_stop"] = list(stop or self.stop)
        return params

    def _for_call(self, stop: list[str] | None, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """The model with the options of one call applied, and the options that belong to LangChain.

        LangChain's cache for text models uses only the model as its key, not the options of a call.

        Raises:
            ConfigError: an option is unknown or out of range, or names another model.
            UnsupportedFeatureError: a text model is asked for tools or structured output.
        """
        require_detail(self.risk_metadata)  # it may have been set after construction
        _ = self._engine_or_lazy  # of the current options; the copy of this call shares it
        called = self._with_tools(options)
        framework = {name: value for name, value in options.items() if name in FRAMEWORK}
        others = FRAMEWORK | TOOLS | TOOL_DETAILS
        own = {name: value for name, value in options.items() if name not in others}
        settings, rest = split_settings(own, self.method)
        rest = refuse_unsupported(without_unset(self._call_options, rest), what=f"a call of {type(self).__name__}")
        one_model_name(rest)
        name = rest.pop("model_name", None)
        if name not in (None, self._name):
            raise ConfigError(
                f"a call of {type(self).__name__} cannot change the model from {self._name!r} to {name!r}; "
                f"make another {type(self).__name__}"
            )
        known = self._call_options.model_fields.keys() | self._tool_options
        refuse_unknown(rest, known, what=f"a call of {type(self).__name__}")
        config = config_of(self).replace(**settings, **({} if stop is None else {"stop": stop}))
        try:
            checked = self._call_options(**rest)
        except ValidationError as error:
            raise ConfigError(f"a call of {type(self).__name__}: {explain(error)}") from None
        update = {name: getattr(checked, name) for name in rest}
        if any(update.get(name, getattr(self, name)) for name in ("logits_processor", "stopping_criteria")):
            update["cache"] = False
        if not update and config == config_of(self):
            return called, framework
        copy = called.model_copy(update={**fields_of(config), **update})
        copy.__dict__.pop("_serialized", None)  # LangChain's cached description of the original
        return copy, framework

    def _decode_options(self) -> dict[str, Any]:
        """Keyword arguments for the engine. The time limit starts here."""
        limit = [] if self.timeout is None else [TimeLimit(self.timeout)]
        return {
            "config": config_of(self),
            "logits_processor": self.logits_processor,
            "stopping_criteria": [*self.stopping_criteria, *limit],
            "cancellation": self._cancellation,
        }

    def _with_tools(self, options: Mapping[str, Any]) -> Self:
        """The model with the tools and the response format that the options of a call ask for.

        Raises:
            UnsupportedFeatureError: this is a text model, which supports neither.
        """
        if asked := [name for name in sorted(TOOLS) if options.get(name)]:
            raise UnsupportedFeatureError(
                f"{type(self).__name__} does not call tools or enforce a schema ({', '.join(asked)}); use ChatCocoa"
            )
        return self

    @abstractmethod
    def _chunks(self, prompt: Any) -> Generator[Any, None, None]:
        """The chunks of an answer. The caller runs the callbacks."""

    def _stream(
        self,
        prompt: Any,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Generator[Any, None, None]:
        model, _ = self._for_call(stop, kwargs)
        with closing(model._chunks(prompt)) as chunks:
            for chunk in chunks:
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: Any,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[Any, None]:
        with self._cancellable(stop, kwargs) as (model, _):
            async with AsyncStream(self._engine_or_lazy, model._chunks(prompt)) as chunks:
                async for chunk in chunks:
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _agenerate(
        self,
        prompts: Any,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._cancellable(stop, kwargs) as (model, framework):
            return await in_worker(self._engine_or_lazy, model._generate, prompts, **framework)  # type: ignore[attr-defined]

    @contextmanager
    def _cancellable(self, stop: list[str] | None, options: Mapping[str, Any]) -> Iterator[tuple[Self, dict[str, Any]]]:
        """Like :meth:`_for_call`, as a context manager that cancels the work of the model on exit."""
        model, framework = self._for_call(stop, options)
        model, cancellation = model.model_copy(), Cancellation()
        model._cancellation = cancellation
        try:
            yield model, framework
        finally:
            cancellation.cancel()

    def _with_concurrency(
        self, config: RunnableConfig | list[RunnableConfig] | None, count: int, batch_size: int | None = None
    ) -> list[RunnableConfig]:
        """The configs of a batch, with ``max_concurrency`` where it is not set: by default the engine's batch size."""
        batch_size = batch_size or self._engine_or_lazy.runtime.max_batch_size
        return [
            {**each, "max_concurrency": each.get("max_concurrency") or batch_size}
            for each in get_config_list(config, count)
        ]

    def _retrying(self, work: Callable[[], Result]) -> Result:
        """Call ``work``, again up to ``max_retries`` times if it runs out of GPU memory."""
        for attempt in range(self.max_retries):
            try:
                return work()
            except torch.OutOfMemoryError:
                pass  # the traceback holds tensors of the failed call until the handler is left
            torch.cuda.empty_cache()
            time.sleep(RETRY_PAUSE * 2**attempt)
        return work()

    def _stream_spans(
        self,
        start: Callable[[], SpanStream],
        to_chunk: Callable[[int, Span], Result],
        answered: Callable[[Generation], Generation] = lambda generation: generation,
    ) -> Generator[Result, None, Generation]:
        """Yield ``to_chunk(number, span)`` for each span of a stream, and return the complete answer.

        Only the start of a stream is retried. Closing this generator closes the stream. ``answered`` returns the part
        of the generation whose risk is traced.
        """
        trace = RiskTrace()

        def first_span() -> tuple[SpanStream, Span | None]:
            stream = start()
            return stream, next(stream, None)

        stream, span = self._retrying(first_span)
        number = 0
        with stream:
            while span is not None:
                yield to_chunk(number, span)
                span, number = next(stream, None), number + 1
        assert stream.generation is not None
        trace.record(answered(stream.generation))
        return stream.generation

    @property
    def _keeps_logprobs(self) -> bool:
        """Whether answers carry log-probabilities even if their metadata is not full."""
        return self.logprobs is True or (self.logprobs is None and self.top_logprobs > 0)

    def _metadata(self, generation: Generation, split: Split | None = None) -> dict[str, Any]:
        """The full metadata of a complete answer. In a stream, only one chunk may carry it."""
        metadata = {
            RISK_KEY: risk_report(generation, split),
            "model_name": self._name,
            "finish_reason": generation.finish_reason,
        }
        if self.logprobs is not False:
            metadata["logprobs"] = openai_logprobs(generation.spans, self.load())
        return metadata


async def in_worker_of(
    model: CocoaModel, call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Run a function in a worker thread of the engine of a model."""
    return await in_worker(model._engine_or_lazy, call, *args, **kwargs)


def usage_of(generation: Generation, split: Split | None = None) -> UsageMetadata:
    """Token counts under LangChain's names, with those of the reasoning if the model reasoned."""
    usage = generation.usage
    counts = UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
    if split is not None and split.parts is not None:
        counts["output_token_details"] = {"reasoning": split.reasoning_tokens(generation)}
    return counts
