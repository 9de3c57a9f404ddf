"""The options of the models: those of a call, and those that say which model answers, here or at a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, Field, PrivateAttr, field_validator
from typing_extensions import Self

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError, UnsupportedFeatureError
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_engine.model.load_options import DeviceMap, LoadOptions, changed_options, loading_arguments
from cocoa_engine.report import Detail
from cocoa_integrations._shared.chat_template import ChatTemplateOptions
from cocoa_integrations._shared.load_options import checked_option, one_model_name, refuse_beside, require_picklable
from cocoa_integrations._shared.loading import LazyEngine, lazy_engine
from cocoa_integrations._shared.settings import FIELD_SYNONYMS, DecodeSettings
from cocoa_integrations._shared.workers import in_worker
from cocoa_integrations.chat_service import ChatService
from cocoa_integrations.chat_service.options import ServiceOptions
from cocoa_integrations.chat_service.remote import DEFAULT_MODEL

FRAMEWORK = frozenset({"tags", "metadata", "run_name", "run_id", "stream", "ls_structured_output_format"})
"""Keyword arguments of a call that belong to LangChain."""

TOOLS = frozenset({"tools", "tool_choice", "response_format"})
"""Keyword arguments of a call that ask for tools or structured output."""

TOOL_DETAILS = frozenset({"strict", "parallel_tool_calls"})
"""Keyword arguments that control how tools are called. They have no effect without tools."""


class CallOptions(DecodeSettings):
    """The options that both the constructor and a single call take."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Time limit for an answer in seconds, from the start of the call. An answer that takes longer raises
    ``GenerationTimeoutError``. ``None``: no limit."""

    stream_usage: bool = True
    """Whether the last chunk of a stream has the token counts of the answer."""

    logprobs: bool | None = None
    """Whether answers carry the log-probabilities of their tokens, in the format of OpenAI's ``logprobs``. ``None``: in
    full metadata only, and wherever ``top_logprobs`` asks for the most probable tokens at each position."""

    risk_metadata: Detail | None = None
    """How much of the risk the answers that a call returns carry. ``"full"``: everything, in ``cocoa_spans`` and in
    ``cocoa_risk``. ``"compact"``: one report in which nothing is written twice, for messages that are stored.
    ``"none"``: no report. ``None``: compact for the messages of a chat model's ``invoke``, ``batch`` and ``generate``,
    which agents keep in their state, and full for streams and text models. Callbacks always receive everything."""

    candidates: bool = False
    """Whether the entries of spans list the candidates that competed in them, as ``rivals``."""

    logits_processor: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Logits processors of transformers, one or a list. Answers are then not cached, because a processor cannot be part
    of a cache key."""

    stopping_criteria: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Stopping criteria of transformers, one or a list. Answers are then not cached."""

    @field_validator("logits_processor", "stopping_criteria", mode="before")
    @classmethod
    def _as_tuple(cls, given: Any) -> tuple[Any, ...]:
        # transformers' LogitsProcessorList is itself callable, so lists are checked first
        return tuple(given) if isinstance(given, Sequence) else (given,)


class ChatCallOptions(ChatTemplateOptions, CallOptions):
    """The options that both the constructor and a single call of a chat model take."""

    source: Sequence[str] | Sequence[tuple[int, int]] = Field(default=(), exclude=True, repr=False)
    """Passages of the prompt, as texts that it contains or as ranges of its characters after the chat template (texts
    only for a model at a server). Every span then has ``passage_attention``: its attention on each of them."""


PER_CALL = frozenset(ChatCallOptions.model_fields)
"""The names of the options of a call of a chat model."""


def without_unset(kind: type[CallOptions], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that are ``None``. They are kept if ``None`` is a valid value of the option."""
    # None is a value of device_map (the CPU), though not its default
    set_by_default = {
        name
        for name, field in kind.model_fields.items()
        if name != "device_map" and field.get_default(call_default_factory=True) is not None
    }
    return {name: value for name, value in options.items() if value is not None or name not in set_by_default}


_engine_ids: WeakKeyDictionary[CocoaEngine, str] = WeakKeyDictionary()


def engine_id(engine: CocoaEngine) -> str:
    """An id for cache keys. The name of a model is not unique, and an ``id()`` can be reused."""
    return _engine_ids.setdefault(engine, uuid4().hex)


class ModelOptions(ServiceOptions):
    """Which model answers: an engine, one that the loading options name, or that of a server.

    A loading option that is set after construction applies from the next call. The weights are loaded again only if the
    option concerns them.
    """

    engine: CocoaEngine | None = Field(default=None, exclude=True, repr=False)
    """The engine to use. Without one, the model is loaded at the first call, or by :meth:`load`. Models with the same
    loading options share one engine; models that differ in ``runtime`` or ``calibrator`` share the weights. Copies
    share the engine."""

    _lazy: LazyEngine | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Call those of the other base classes too, unlike pydantic's for private attributes."""
        super().model_post_init(context)

    def load(self) -> CocoaEngine:
        """The engine; loads it on the first call.

        Raises:
            ModelLoadError: the model cannot be found or read, or was refused.
            UnsupportedModelError: it is not a causal language model.
            UnsupportedFeatureError: the model is at a server.
        """
        self.require_engine()
        return self.engine if self.engine is not None else self._lazy_engine.get()

    async def in_worker(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a worker thread of the engine."""
        return await in_worker(self._engine_or_lazy, call, *args)

    @property
    def service(self) -> ChatService:
        """What answers the calls."""
        return self.service_of(None if self.is_remote else self._engine_or_lazy)

    @property
    def _lazy_engine(self) -> LazyEngine:
        """The engine of the current options, not loaded yet. Holding it keeps it shared."""
        arguments = loading_arguments(self)
        if self.api_key is not None:
            arguments["model_kwargs"] = {"token": self.api_key.get_secret_value(), **self.model_kwargs}
        current = lazy_engine(arguments)
        if current is not self._lazy:
            self._lazy = current
        return current

    @property
    def _engine_or_lazy(self) -> CocoaEngine | LazyEngine:
        """The engine, or the :class:`LazyEngine` that will load it. Does not load the model."""
        return self.engine if self.engine is not None else self._lazy_engine

    @property
    def _name(self) -> str:
        if self.engine is not None:
            return self.engine.model_name
        return self.model_name or (DEFAULT_MODEL if self.is_remote else MODEL_NAME)

    if not TYPE_CHECKING:  # type checkers keep the field-by-field assignment

        def __setattr__(self, name: str, value: Any) -> None:
            what = type(self).__name__
            if name == "engine" and value is not None:
                if not isinstance(value, CocoaEngine):
                    raise ConfigError(f"{what}: engine takes a CocoaEngine, not {type(value).__name__}")
                refuse_beside("engine", changed_options(self))
            field = FIELD_SYNONYMS.get(name, name)
            if field in LoadOptions.model_fields:
                value = checked_option(field, value, what=what)
                if self.engine is not None:
                    refuse_beside("engine", [name for _ in changed_options({field: value})])
            super().__setattr__(name, value)
            self.__dict__.pop("_serialized", None)  # LangChain's cached description of the model

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the engine, and the cache, callbacks and rate limiter of LangChain."""
        memo = {} if memo is None else memo
        for name in ("engine", "cache", "callbacks", "rate_limiter"):  # weights, and objects with locks or connections
            if (value := getattr(self, name, None)) is not None:
                memo[id(value)] = value
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """The options, without the model, which is loaded again by its name when the unpickled object is used.

        Raises:
            UnsupportedFeatureError: ``engine=`` was given, or an option cannot be pickled.
        """
        what = type(self).__name__
        if self.engine is not None:
            raise UnsupportedFeatureError(
                f"a {what} with engine= contains a model and cannot be pickled; give model= and its loading options "
                f"instead, or create the {what} in each process"
            )
        state = super().__getstate__()
        fields = {name: value for name, value in state["__dict__"].items() if name != "_serialized"}
        require_picklable(fields, what=what)
        return {**state, "__dict__": fields, "__pydantic_private__": {**state["__pydantic_private__"], "_lazy": None}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore the options. The model is loaded by the next call, unless another object has it."""
        super().__setstate__(state)
        if not self.is_remote:
            _ = self._lazy_engine

    @classmethod
    def from_model_id(
        cls,
        model_id: str,
        task: str | None = None,
        backend: str = "default",
        device: int | str | None = None,
        device_map: DeviceMap = "auto",
        model_kwargs: dict[str, Any] | None = None,
        pipeline_kwargs: dict[str, Any] | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> Self:
        """The model, with the arguments of the constructor that ``langchain-huggingface`` has.

        Args:
            model_id: as ``model`` of the constructor.
            task: ``"text-generation"``.
            backend: ``"default"`` (or ``"pipeline"``): transformers with PyTorch.
            device: a number of a GPU, -1 for the CPU, or a device such as ``"cuda:0"``. The default is that of
                ``device_map``.
            device_map: as for the constructor.
            model_kwargs: as for the constructor. ``dtype`` and ``trust_remote_code`` may be among them.
            pipeline_kwargs: decode settings such as ``max_new_tokens``, under the names of transformers.
            batch_size: as for the constructor of :class:`CocoaLLM`. A chat model has no such option.
            **options: further options of the constructor.

        Raises:
            ConfigError: an option is unknown, out of range or not supported.
        """
        name = f"{cls.__name__}.from_model_id"
        if task not in (None, "text-generation"):
            raise ConfigError(f"{name}: task={task!r} is not supported; only 'text-generation' is")
        if backend not in ("default", "pipeline"):
            raise ConfigError(f"{name}: backend={backend!r} is not supported; models run in transformers with PyTorch")
        if device is not None:
            if device_map not in ("auto", None):
                raise ConfigError(f"{name}: device and device_map are both given; give device_map alone")
            device_map = device if isinstance(device, str) else "cpu" if device < 0 else f"cuda:{device}"
        one_model_name(options, model_id=model_id)
        arguments = {"batch_size": batch_size, **options}
        arguments = {key: value for key, value in arguments.items() if value is not None} | {"device_map": device_map}
        # from_pretrained takes these under model_kwargs too; here they are options
        rest = dict(model_kwargs or {})
        if "torch_dtype" in rest:
            rest.setdefault("dtype", rest.pop("torch_dtype"))
        own = {key: rest.pop(key) for key in LoadOptions.model_fields if key in rest}
        decode = {key: value for key, value in (pipeline_kwargs or {}).items() if value is not None}
        if decode.pop("return_full_text", False):
            raise ConfigError(f"{name}: return_full_text=True is not supported; answers do not repeat the prompt")
        if samples := decode.pop("do_sample", None):
            decode.setdefault("temperature", 1.0)
        elif samples is False:
            decode["temperature"] = 0.0
        for group, values in (("model_kwargs", own), ("pipeline_kwargs", decode)):
            if twice := arguments.keys() & values.keys():
                raise ConfigError(f"{name}: {', '.join(sorted(twice))} is given in {group} and elsewhere too")
            arguments |= values
        return cls(**arguments, **({"model_kwargs": rest} if rest else {}))
