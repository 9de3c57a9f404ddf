"""The options that adapters share: of one call, and which model answers, in this process or at a server."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, field_serializer
from typing_extensions import Self

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_engine.errors import ConfigError, UnsupportedFeatureError, explain
from cocoa_engine.integration import ACCESS_OPTIONS, LoadOptions, changed_options, loading_arguments
from cocoa_engine.report import Detail
from cocoa_integrations._shared.engines import LazyEngine, in_worker, lazy_engine
from cocoa_integrations._shared.options import (
    FIELD_SYNONYMS,
    DecodeSettings,
    config_of,
    refuse_unknown,
    refuse_unsupported,
    set_config,
    split_settings,
)
from cocoa_integrations.chat_service.local import LocalChat
from cocoa_integrations.chat_service.remote import RemoteChat, remote_chat, sent_settings

_WEIGHTS = LoadOptions.model_fields.keys() - {
    "model_name",
    "tokenizer_name",
    "trust_remote_code",
    "tokenizer_kwargs",
    "runtime",
    "calibrator",
}
"""Options that have no effect on a model that is loaded already."""


class AnswerOptions(BaseModel):
    """What answers carry, and how long they may take."""

    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Time limit for an answer in seconds, from the start of the call. An answer that takes longer "
        "raises `GenerationTimeoutError`. None: no limit.",
    )
    logprobs: bool | None = Field(
        None,
        description="Whether answers carry the log-probabilities of their tokens, in the format of OpenAI's "
        "`logprobs`. None: where the risk is full, and where `top_logprobs` asks for the most probable tokens at each "
        "position.",
    )
    risk_metadata: Detail | None = Field(
        None,
        description="How much of the risk answers carry: `full`; `compact`, one report in which nothing is written "
        "twice, for messages that are stored; or `none`. None: full in streams and for text models of LangChain, "
        "compact in other answers and in the `raw` of LlamaIndex's, which agents keep. Callbacks, events and "
        "collectors always receive everything.",
    )
    candidates: bool = Field(
        False, description="Whether the entries of spans list the candidates that competed in them, as `rivals`."
    )


class ModelOptions(AnswerOptions, DecodeSettings, LoadOptions):
    """Which model answers: an engine, one that the loading options name, or that of a server.

    Every setting of :class:`~cocoa_engine.CocoaConfig` is a field. A setting that is not given is taken from
    ``config``, or else from the engine. Every loading option is a field too: ``model_name``, ``tokenizer_name``,
    ``dtype``, ``device_map`` (default: the GPUs if there are any, otherwise the CPU; ``None``: the CPU),
    ``trust_remote_code``, ``allow_pickle``, ``model_kwargs``, ``tokenizer_kwargs``, ``runtime`` (a
    :class:`~cocoa_engine.Runtime` or its fields as a dict) and ``calibrator``. ``model`` is a synonym of
    ``model_name``, and ``max_tokens`` of ``max_new_tokens``.

    Models with the same loading options share one engine; models that differ in ``runtime`` or ``calibrator`` share the
    weights. Copies share the engine. A field that is set after construction applies from the next call. The weights are
    loaded again only if it concerns them.

    With ``base_url`` the model is that of a server (``cocoa serve``), which needs the extra ``remote``. ``api_key``,
    ``timeout``, ``max_retries`` and ``default_headers`` are those of the requests, and ``model`` is a name of the model
    there. Settings that are not given are the server's. Errors of the server are those of the package ``openai``, with
    the server's message, such as ``BadRequestError``, ``AuthenticationError`` and ``RateLimitError``. An answer with a
    missing field or one of a wrong type, such as that of a server of another kind, is a ``DataError``.

    Raises:
        ConfigError: an option is unknown, out of range, not supported, or contradicts another.
        MissingExtraError: ``base_url`` is given, and the package openai is not installed.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=("pydantic_model_",))

    base_url: str | None = Field(
        None,
        description="The address of the API of a server (`cocoa serve`) whose model answers, such as "
        "`http://gpu-box:8000/v1`.",
    )
    api_key: SecretStr | None = Field(
        None,
        exclude=True,
        description="With `base_url` the key of the server, if it was given keys; that of OpenAI in the environment is "
        "never sent. Otherwise the access token of the Hugging Face Hub, which only a download uses.",
    )
    default_headers: dict[str, str] = Field(
        default_factory=dict,
        exclude=True,
        repr=False,
        description="Further headers of each request to the server, such as those of a gateway.",
    )
    max_retries: int = Field(
        2,
        ge=0,
        description="How often a call is tried again: after it ran out of GPU memory, which other work may have used "
        "temporarily, or if the server is busy or cannot be reached. Other errors would come again.",
    )
    _lazy: LazyEngine | None = PrivateAttr(default=None)  # holding it keeps it shared

    if TYPE_CHECKING:  # further arguments of the constructor
        model: str | os.PathLike[str] | None = None
        max_tokens: int | None = None
        config: CocoaConfig | None = None
    else:
        model = property(lambda self: self.model_name, lambda self, name: setattr(self, "model_name", name))
        max_tokens = property(lambda self: self.max_new_tokens, lambda self, n: setattr(self, "max_new_tokens", n))
        config = property(config_of, set_config)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None

    def model_post_init(self, context: Any, /) -> None:
        """Call those of the other base classes too, unlike pydantic's for private attributes."""
        super().model_post_init(context)

    @property
    def is_remote(self) -> bool:
        """Whether the model is at a server."""
        return self.base_url is not None

    def load(self) -> CocoaEngine:
        """The engine; loads it on the first call.

        Raises:
            ModelLoadError: the model cannot be found or read, or was refused.
            UnsupportedModelError: it is not a causal language model.
            UnsupportedFeatureError: the model is at a server.
        """
        if self.is_remote:
            raise UnsupportedFeatureError(
                f"this needs the engine, and the model of this {type(self).__name__} is at {self.base_url}; use one in "
                "this process, without base_url"
            )
        engine = self._engine_or_lazy
        return engine.get() if isinstance(engine, LazyEngine) else engine

    async def in_worker(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a worker thread of the engine."""
        return await in_worker(self._engine_or_lazy, call, *args)

    @field_serializer("model_kwargs", "tokenizer_kwargs")
    def _serialized_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return shown_entries(kwargs)

    @field_serializer("dtype")
    def _serialized_dtype(self, dtype: Any) -> str:
        return str(dtype).removeprefix("torch.")

    @property
    def service(self) -> LocalChat | RemoteChat:
        """What answers the calls."""
        if self.base_url is None:
            return LocalChat(self._engine_or_lazy, max_retries=self.max_retries)
        return remote_chat(
            self.base_url,
            api_key=None if self.api_key is None else self.api_key.get_secret_value(),
            model=self.model_name,
            timeout=self.timeout,
            max_retries=self.max_retries,
            headers=tuple(sorted(self.default_headers.items())),
        )

    @property
    def _objects(self) -> Mapping[str, Any]:
        """The loaded ``engine``, or the loaded ``model`` and ``tokenizer``, that are used instead of loading."""
        raise NotImplementedError

    @property
    def _engine_or_lazy(self) -> CocoaEngine | LazyEngine:
        """The engine that was given, or what will load that of the current options."""
        objects = self._objects
        if "engine" in objects:
            engine: CocoaEngine = objects["engine"]
            return engine
        arguments = loading_arguments(self)
        if self.api_key is not None:
            arguments["model_kwargs"] = {"token": self.api_key.get_secret_value(), **self.model_kwargs}
        lazy = self._lazy = lazy_engine(arguments, **objects)
        return lazy

    @classmethod
    def _read(
        cls, options: dict[str, Any], more: Iterable[str] = (), **loaded: Any
    ) -> tuple[CocoaConfig, dict[str, Any]]:
        """The settings, and the other fields, that the options of a constructor give. At a server, settings are unset.

        Args:
            options: the options, with ``engine`` and ``config`` among them.
            more: the names of options that are no fields.
            **loaded: the loaded model and tokenizer.
        """
        what, engine, config = cls.__name__, options.get("engine"), options.pop("config", None)
        require_kind("engine", engine, CocoaEngine)
        require_kind("config", config, CocoaConfig)
        named = one_model_name(options)
        base = config or (engine.config if engine is not None else CocoaConfig())
        settings, rest = split_settings(options, base.method)
        rest = refuse_unsupported(rest, what=what)
        refuse_unknown(rest, {*cls.model_fields, *more, "engine", "config", "model"}, what=what)
        objects = {name: value for name, value in {**loaded, "engine": engine}.items() if value is not None}
        changed = changed_options(rest)
        if rest.get("base_url") is not None:
            refuse_beside("base_url", [*(name for name in changed if name != "model_name"), *objects])
            settings = {name: value for name, value in settings.items() if value is not None}
        else:
            is_label = engine is not None and rest.get("model_name") == engine.model_name
            changed = [name for name in changed if name != "model_name" or not is_label]
            _refuse_without_effect(objects, changed, named)
        config = base.replace(**settings)
        # None is a value of device_map, the CPU, and leaves every other option at its default
        fields = {name: value for name, value in rest.items() if value is not None or name == "device_map"}
        if "base_url" in fields:
            sent_settings(config)  # refuses those of the server's machine
            fields |= dict.fromkeys(CocoaConfig.model_fields)
        return config, fields

    if not TYPE_CHECKING:  # type checkers keep the field-by-field assignment

        def __setattr__(self, name: str, value: Any) -> None:
            field = FIELD_SYNONYMS.get(name, name)
            if name == "engine" and value is not None:
                require_kind(f"{type(self).__name__}: engine", value, CocoaEngine)
                refuse_beside("engine", changed_options(self))
            elif name == "api_key" and isinstance(value, str):
                value = SecretStr(value)
            elif field in LoadOptions.model_fields:
                if value is None and field != "device_map":
                    value = LoadOptions.model_fields[field].get_default(call_default_factory=True)
                try:
                    value = getattr(LoadOptions.model_validate({field: value}), field)
                except ValidationError as error:
                    raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
                if value != getattr(self, field):
                    _refuse_without_effect(self._objects, changed_options({field: value}), name)
            super().__setattr__(name, value)
            self.__dict__.pop("_serialized", None)  # LangChain's cached description of the model

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As in pydantic; ``max_tokens`` and ``model`` are accepted for ``max_new_tokens`` and ``model_name``."""
        fields = {FIELD_SYNONYMS.get(name, name): value for name, value in (update or {}).items()}
        return super().model_copy(update=fields, deep=deep)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares loaded objects, and the cache, callbacks and rate limiter of the framework."""
        memo = {} if memo is None else memo
        shared = (getattr(self, name, None) for name in ("cache", "callbacks", "rate_limiter"))
        memo |= {id(value): value for value in (*self._objects.values(), *shared) if value is not None}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """The options, without the model, which is loaded again by its name when the unpickled object is used.

        Raises:
            UnsupportedFeatureError: a loaded object was given.
        """
        if self._objects:
            raise UnsupportedFeatureError(
                f"a {type(self).__name__} with a loaded engine, model or tokenizer cannot be pickled; give model= and "
                "its loading options instead, or create one in each process"
            )
        state = BaseModel.__getstate__(self)  # LlamaIndex's own removes what cannot be pickled, from this object too
        fields = {name: value for name, value in state["__dict__"].items() if name != "_serialized"}
        return {**state, "__dict__": fields, "__pydantic_private__": {**state["__pydantic_private__"], "_lazy": None}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore the options. The model is loaded by the next call, unless another object has it."""
        BaseModel.__setstate__(self, state)
        if not self.is_remote:
            _ = self._engine_or_lazy


def _refuse_without_effect(objects: Mapping[str, Any], changed: list[str], named: str) -> None:
    """Refuse changed loading options that have no effect beside loaded objects; the model's was given as ``named``."""
    if "engine" in objects:
        others = [name for name in objects if name != "engine"]
        refuse_beside("engine", [*(named if name == "model_name" else name for name in changed), *others])
    if "tokenizer" in objects:
        refuse_beside("tokenizer", [name for name in changed if name == "tokenizer_kwargs"])
    if "model" in objects:
        refuse_beside("model", [name for name in changed if name in _WEIGHTS])


def refuse_beside(option: str, names: Sequence[str]) -> None:
    """Refuse options, if there are any, that have no effect together with a given one."""
    if names:
        raise ConfigError(f"{option}= is given, so {', '.join(names)} would have no effect; give one or the other.")


def require_kind(name: str, value: Any, kind: type) -> None:
    """Refuse an object of another class. ``None`` is allowed."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} takes a {kind.__name__}, not {type(value).__name__}")


def one_model_name(options: dict[str, Any]) -> str:
    """Give the model's name the name of its field, in place, and return that under which it was given, for messages.

    A path becomes text.
    """
    names: dict[str, str] = {}
    for name, value in {name: options.pop(name, None) for name in ("model", "model_name")}.items():
        if not isinstance(value, (str, os.PathLike, NoneType)):
            raise ConfigError(
                f"{name} takes a Hub id, a folder or a GGUF file, not a {type(value).__name__}; to use a loaded model "
                "pass engine=CocoaEngine(model, tokenizer)"
            )
        if value == "":
            raise ConfigError(f"{name} is empty; name a model, or leave it out for the default")
        if value is not None:
            names[name] = str(os.fspath(value))
    if len(set(names.values())) > 1:
        listed = " and ".join(f"{name}={value!r}" for name, value in names.items())
        raise ConfigError(f"{' and '.join(names)} are the same option, given as {listed}; give one of them")
    if names:
        options["model_name"] = next(iter(names.values()))
    return next(iter(names), "model_name")


def shown_entries(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that can be written as JSON and are not secret."""

    def is_plain(value: Any) -> bool:
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return False
        return True

    return {name: value for name, value in kwargs.items() if name not in ACCESS_OPTIONS and is_plain(value)}
