"""What the text and the chat model share: their options, their engine, and the metadata of an answer."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import torch
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import BaseLanguageModel, LangSmithParams
from langchain_core.messages.ai import UsageMetadata
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import Self

from cocoa_engine import Cancellation, CocoaConfig, CocoaEngine, Generation, Runtime, Span, SpanStream, __version__
from cocoa_engine.errors import ConfigError, UnsupportedFeatureError
from cocoa_engine.messages import explain
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_integrations.langchain.identity import changes_since_loading, engine_id, remember_loaded, settings_digest
from cocoa_integrations.langchain.lazy_engine import LazyEngine, lazy_engine
from cocoa_integrations.langchain.time_limit import TimeLimit
from cocoa_integrations.logprobs import openai_logprobs
from cocoa_integrations.metadata import RISK_KEY, risk_report
from cocoa_integrations.settings import LOADING, DecodeSettings, config_of, fields_of, refuse_unknown, split_settings
from cocoa_integrations.tracing import RiskTrace
from cocoa_integrations.workers import in_worker

Result = TypeVar("Result")

FRAMEWORK = frozenset({"tags", "metadata", "run_name", "run_id", "stream", "ls_structured_output_format"})
"""Keyword arguments of a call that are LangChain's own."""

TOOLS = frozenset({"tools", "tool_choice", "functions", "function_call", "response_format"})
"""Keyword arguments of a call that ask for tools or structured output."""

TOOL_DETAILS = frozenset({"strict", "parallel_tool_calls"})
"""Keyword arguments that say how tools are to be called, and nothing where there are none."""

INSTEAD = {
    "model_id": "give model",
    "pipeline_kwargs": "give the decode settings themselves, e.g. max_new_tokens=64",
    "pipeline": "give engine=CocoaEngine(pipeline.model, pipeline.tokenizer), or model and its loading options",
}
"""Options of LangChain's other local models, and what to give here."""

RETRY_PAUSE = 0.5
"""Seconds before the first repetition; twice as long before each further one."""


class CallOptions(DecodeSettings):
    """The options that both a constructor and a single call take."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds an answer may take, from the call on; then ``GenerationTimeoutError`` is raised. None: any time."""

    logprobs: bool = True
    """Whether answers carry their token log-probabilities, in the shape of OpenAI's ``logprobs``."""

    logits_processor: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Logits processors of transformers, one or a list. Answers are not cached: what they do has no name."""

    stopping_criteria: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Stopping criteria of transformers, one or a list. Answers are not cached."""

    @field_validator("logits_processor", "stopping_criteria", mode="before")
    @classmethod
    def _as_tuple(cls, given: Any) -> Any:
        # a transformers list is itself callable, so lists are looked for first
        return tuple(given) if isinstance(given, Sequence) else (given,)


class CocoaModel(CallOptions, BaseLanguageModel[Any]):
    """Base of :class:`CocoaLLM` and :class:`ChatCocoa`: construction, options of a call, access to the engine.

    Every setting of :class:`~cocoa_engine.CocoaConfig` is a field. Those not given are those of ``config``, if one is
    given, else the engine's. ``model`` means ``model_name`` and ``max_tokens`` means ``max_new_tokens``.

    Raises:
        ConfigError: an option is unknown, out of range, or contradicts another.
    """

    engine: CocoaEngine | None = Field(default=None, exclude=True, repr=False)
    """An engine of your own. Without one, the model is loaded at the first call (or by :meth:`load`) and shared by all
    models that were given the same loading options."""

    model_name: str | None = None
    """A local folder or a hub id; none is the embedded SmolLM2-135M-Instruct."""

    tokenizer_name: str | None = None
    """Where the tokenizer is, if not with the model."""

    dtype: Any = "auto"
    """``"auto"`` (as stored), a name such as ``"bfloat16"``, or a ``torch.dtype``."""

    device_map: Any = None
    """As in transformers, e.g. ``"auto"``; none is the CPU."""

    trust_remote_code: bool = False
    """Run code that comes with the checkpoint."""

    allow_pickle: bool = False
    """Read weights stored as pickle, which can run code when read."""

    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Further options of the model's ``from_pretrained``."""

    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the tokenizer's ``from_pretrained``."""

    runtime: Runtime | None = None
    """How the model is run (speed and memory): a :class:`~cocoa_engine.Runtime` or its fields as a dict."""

    calibrator: str | None = None
    """File of a :class:`~cocoa_engine.RiskCalibrator`: the risk of every span is then in [0, 1]."""

    api_key: SecretStr | None = Field(default=None, exclude=True)
    """Access token of the Hugging Face Hub, for gated models; only used if something has to be downloaded."""

    max_retries: int = Field(default=2, ge=0)
    """How often a call is tried again that ran out of GPU memory, which others may have held for a moment. Nothing else
    is tried again: decoding the same prompt again gives the same answer."""

    streaming: bool | None = None
    """True: ``invoke`` too hands each span to the callbacks as soon as it is decided. False: a chat model's ``stream``
    yields its answer whole."""

    if TYPE_CHECKING:  # further names that the constructor takes
        model: str | os.PathLike[str] | None = None
        max_tokens: int | None = None
        config: CocoaConfig | None = None
    else:
        model = property(lambda self: self.model_name)
        max_tokens = property(lambda self: self.max_new_tokens)
        config = property(config_of)

    _cancellation: Cancellation | None = PrivateAttr(default=None)
    """Ends the call that this copy was made for."""

    _ls_model_type: ClassVar[Literal["chat", "llm"]]
    _tool_options: ClassVar[frozenset[str]] = frozenset()
    """The names of the options that ask for tools, for messages."""

    def __init__(self, **options: Any) -> None:
        settings, rest = split_settings(options)
        rest = _given(type(self), rest)
        if foreign := INSTEAD.keys() & rest.keys():
            hints = "; ".join(f"instead of {name} {INSTEAD[name]}" for name in sorted(foreign))
            raise ConfigError(f"{type(self).__name__}: {hints}")
        refuse_unknown(rest, [*type(self).model_fields, "model", "config"], what=type(self).__name__)
        base = rest.pop("config", None)
        engine = rest.get("engine")
        _name_model(rest)
        if isinstance(engine, CocoaEngine):
            _refuse_loading(type(self), rest)
        if base is None:
            base = engine.config if isinstance(engine, CocoaEngine) else CocoaConfig()
        if not isinstance(base, CocoaConfig):
            raise ConfigError(f"config takes a CocoaConfig, not {type(base).__name__}")
        try:
            super().__init__(**rest, **fields_of(base.replace(**settings)))
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
        if self.engine is None:
            _ = self._lazy_engine  # held from now on, so that whatever is rebuilt from this model shares it

    @model_validator(mode="after")
    def _set_cocoa_version(self) -> Self:
        self._add_version("cocoa-integrations", __version__)
        return self

    @cached_property
    def _lazy_engine(self) -> LazyEngine:
        options = {name: getattr(self, name) for name in LOADING}
        if self.api_key is not None:
            options["model_kwargs"] = {"token": self.api_key.get_secret_value(), **self.model_kwargs}
        return lazy_engine(options)

    def load(self) -> CocoaEngine:
        """The engine, loaded now if it was not.

        Raises:
            ModelLoadError: the model cannot be found or read, or was refused.
            UnsupportedModelError: it is not a causal language model.
        """
        return self.engine if self.engine is not None else remember_loaded(self._lazy_engine.get())

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of the text's tokens by the model's own tokenizer, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.load().encode(text, add_special_tokens=False)

    @property
    def _runs(self) -> CocoaEngine | LazyEngine:
        """The engine, or the promise of it: loads nothing."""
        return self.engine if self.engine is not None else self._lazy_engine

    @property
    def _name(self) -> str:
        return self.engine.model_name if self.engine is not None else self.model_name or MODEL_NAME

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """All that an answer depends on; LangChain's caches key on it."""
        if self.engine is None:
            fields = type(self).model_fields
            model = {name: getattr(self, name) for name in LOADING if getattr(self, name) != _default(fields[name])}
            for kwargs in model.keys() & {"model_kwargs", "tokenizer_kwargs"}:
                model[kwargs] = {name: value for name, value in model[kwargs].items() if name != "token"}
            model |= changes_since_loading(self._lazy_engine.loaded)
        else:
            model = {
                "dtype": str(self.engine.model.dtype),
                "engine_id": engine_id(self.engine),
                "settings": settings_digest(self.engine),
            }
        return {**model, "model_name": self._name, **config_of(self).model_dump(mode="json"), "logprobs": self.logprobs}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        settings, rest = split_settings({name: value for name, value in kwargs.items() if name not in FRAMEWORK})
        params = LangSmithParams(
            ls_provider="cocoa",
            ls_model_type=self._ls_model_type,
            ls_model_name=rest.get("model") or self._name,
            ls_temperature=settings.get("temperature", self.temperature),
            ls_max_tokens=settings.get("max_new_tokens", self.max_new_tokens),
        )
        if stop or self.stop:
            params["ls_stop"] = list(stop or self.stop)
        return params

    def _for_call(self, stop: list[str] | None, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """The model with the options of one call folded in, and those that are LangChain's own.

        LangChain's cache for text models keys on the model alone, not on a call's options.

        Raises:
            ConfigError: an option is unknown or out of range, or names another model.
            UnsupportedFeatureError: tools or structured output are asked of a text model.
        """
        called = self._with_tools(options)
        framework = {name: value for name, value in options.items() if name in FRAMEWORK}
        others = FRAMEWORK | TOOLS | TOOL_DETAILS
        settings, rest = split_settings({name: value for name, value in options.items() if name not in others})
        rest = _given(CallOptions, rest)
        name = rest.pop("model", None)
        if name not in (None, self._name):
            raise ConfigError(
                f"a {type(self).__name__} keeps the model it was made with ({self._name}); make another for {name!r}"
            )
        refuse_unknown(rest, _PER_CALL | self._tool_options, what=f"a call of {type(self).__name__}")
        config = config_of(self).replace(**settings, **({} if stop is None else {"stop": stop}))
        try:
            checked = CallOptions(**rest)
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
        """Keyword arguments for the engine; the time limit runs from here."""
        limit = [] if self.timeout is None else [TimeLimit(self.timeout)]
        return {
            "config": config_of(self),
            "logits_processor": self.logits_processor,
            "stopping_criteria": [*self.stopping_criteria, *limit],
            "cancellation": self._cancellation,
        }

    def _with_tools(self, options: Mapping[str, Any]) -> Self:
        """The model with what a call's options ask for beside text.

        Raises:
            UnsupportedFeatureError: they ask for tools or structured output, which a text model does not have.
        """
        if asked := [name for name in sorted(TOOLS) if options.get(name)]:
            raise UnsupportedFeatureError(
                f"{type(self).__name__} does not call tools or enforce a schema ({', '.join(asked)}); use ChatCocoa"
            )
        return self

    @abstractmethod
    def _chunks(self, prompt: Any) -> Generator[Any, None, None]:
        """The chunks of an answer; nothing is told of them."""

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
            chunks = model._chunks(prompt)
            try:
                while (chunk := await in_worker(self._runs, next, chunks, None)) is not None:
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            finally:
                with suppress(ValueError):  # the worker thread is inside: it breaks off by itself
                    chunks.close()

    async def _agenerate(
        self,
        prompts: Any,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._cancellable(stop, kwargs) as (model, framework):
            return await in_worker(self._runs, model._generate, prompts, **framework)  # type: ignore[attr-defined]

    @contextmanager
    def _cancellable(self, stop: list[str] | None, options: Mapping[str, Any]) -> Iterator[tuple[Self, dict[str, Any]]]:
        """As :meth:`_for_call`, but whatever the model is doing when the block is left ends."""
        model, framework = self._for_call(stop, options)
        model, cancellation = model.model_copy(), Cancellation()
        model._cancellation = cancellation
        try:
            yield model, framework
        finally:
            cancellation.cancel()

    def _retrying(self, work: Callable[[], Result]) -> Result:
        for attempt in range(self.max_retries):
            try:
                return work()
            except torch.OutOfMemoryError:
                pass  # outside of the handler, what the failed call held is free again
            torch.cuda.empty_cache()
            time.sleep(RETRY_PAUSE * 2**attempt)
        return work()

    def _decided(
        self, start: Callable[[], SpanStream], chunk: Callable[[int, Span], Result]
    ) -> Generator[Result, None, Generation]:
        """What ``chunk`` makes of each span and its number; returns the whole answer.

        Only the beginning of a stream can be tried again. Closing this closes the stream.
        """

        trace = RiskTrace()

        def begin() -> tuple[SpanStream, Span | None]:
            stream = start()
            return stream, next(stream, None)

        stream, span = self._retrying(begin)
        number = 0
        with stream:
            while span is not None:
                yield chunk(number, span)
                span, number = next(stream, None), number + 1
        assert stream.generation is not None
        trace.record(stream.generation)
        return stream.generation

    def _metadata(self, generation: Generation) -> dict[str, Any]:
        """What a whole answer carries: its report, and all that must occur in one chunk of a stream only."""
        metadata = {
            RISK_KEY: risk_report(generation),
            "model_name": self._name,
            "finish_reason": generation.finish_reason,
        }
        if self.logprobs:
            metadata["logprobs"] = openai_logprobs(generation.spans, self.load())
        return metadata


def usage_of(generation: Generation) -> UsageMetadata:
    """Token counts under LangChain's names."""
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens, total_tokens=usage.total_tokens
    )


_PER_CALL = frozenset(CallOptions.model_fields)


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _given(kind: type[CallOptions], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that are None and for which None means nothing: they count as not given."""
    fields = kind.model_fields
    return {
        name: value
        for name, value in options.items()
        if value is not None or name not in fields or _default(fields[name]) is None
    }


def _name_model(options: dict[str, Any]) -> None:
    """Let ``model`` be another name of ``model_name``."""
    given = [name for name in (options.pop("model", None), options.get("model_name")) if name is not None]
    if len(set(map(str, given))) > 1:
        raise ConfigError(f"model and model_name are the same option, given as {given[0]!r} and {given[1]!r}")
    if given:
        if not isinstance(given[0], (str, os.PathLike)):
            raise ConfigError(
                f"model takes a name or a folder, not a {type(given[0]).__name__}; "
                "for objects of your own pass engine=CocoaEngine(model, tokenizer)"
            )
        options["model_name"] = os.fspath(given[0])


def _refuse_loading(model: type[CocoaModel], options: Mapping[str, Any]) -> None:
    """An engine is loaded already; options that say how to load one must not go unheard."""
    fields = model.model_fields
    unheard = [name for name in LOADING if name in options and options[name] != _default(fields[name])]
    if unheard:
        raise ConfigError(f"engine= is loaded already; leave out {', '.join(unheard)}, or leave out engine")
