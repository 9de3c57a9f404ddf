"""The engine of a LangChain model: given, or loaded by the model's options, which may change after construction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr, SecretStr
from typing_extensions import Self

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError, UnsupportedFeatureError
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_engine.model.load_options import LoadOptions, changed_options, loading_arguments
from cocoa_integrations._shared.load_options import checked_option, refuse_beside, require_picklable
from cocoa_integrations._shared.loading import LazyEngine, lazy_engine
from cocoa_integrations._shared.settings import FIELD_SYNONYMS

SHARED_BY_COPIES = ("engine", "cache", "callbacks", "rate_limiter")
"""Fields that a deep copy shares: a model with its weights, and objects with locks or connections."""


class EngineOwner(LoadOptions):
    """The loading options of a model, and the engine that they load.

    A loading option that is set after construction applies from the next call. The weights are loaded again only if the
    option concerns them.
    """

    engine: CocoaEngine | None = Field(default=None, exclude=True, repr=False)
    """The engine to use. Without one, the model is loaded at the first call, or by :meth:`load`. Models with the same
    loading options share one engine; models that differ in ``runtime`` or ``calibrator`` share the weights. Copies
    share the engine."""

    api_key: SecretStr | None = Field(default=None, exclude=True)
    """Access token of the Hugging Face Hub, for gated models. It is used only when something has to be downloaded."""

    _lazy: LazyEngine | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Call those of the other base classes too. pydantic defines one for private attributes that does not."""
        super().model_post_init(context)

    def load(self) -> CocoaEngine:
        """The engine; loads it on the first call.

        Raises:
            ModelLoadError: the model cannot be found or read, or was refused.
            UnsupportedModelError: it is not a causal language model.
        """
        return self.engine if self.engine is not None else self._lazy_engine.get()

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
        return self.engine.model_name if self.engine is not None else self.model_name or MODEL_NAME

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
            if name == "api_key" and isinstance(value, str):
                value = SecretStr(value)
            super().__setattr__(name, value)
            self.__dict__.pop("_serialized", None)  # LangChain's cached description of the model

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the engine, and the cache, callbacks and rate limiter of LangChain."""
        memo = {} if memo is None else memo
        for name in SHARED_BY_COPIES:
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
        _ = self._lazy_engine
