"""The engine of a LlamaIndex LLM: given, or loaded by the LLM's options, which may change after construction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from typing_extensions import Self

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.errors import UnsupportedFeatureError
from cocoa_engine.model.load_options import LoadOptions, changed_options, loading_arguments
from cocoa_integrations._shared.load_options import checked_option, refuse_beside, require_picklable
from cocoa_integrations._shared.loading import LazyEngine, lazy_engine
from cocoa_integrations._shared.settings import FIELD_SYNONYMS
from cocoa_integrations._shared.workers import in_worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OTHERS = ("model_name", "tokenizer_name", "trust_remote_code", "tokenizer_kwargs", "runtime", "calibrator")
WEIGHTS = [name for name in LoadOptions.model_fields if name not in _OTHERS]
"""Options that have no effect on a model that is loaded already."""


LOADED = ("_engine", "_lazy")
"""Private attributes that hold the loaded model."""


class EngineOwner(LoadOptions):
    """The loading options of an LLM, and the engine that they load.

    LLMs with the same loading options share one engine. LLMs that differ in ``runtime`` or ``calibrator`` share the
    weights. A loading option that is set after construction applies from the next call.
    """

    _engine: CocoaEngine = PrivateAttr()
    """The engine of the last call. An unpickled LLM has none before its first."""

    _lazy: LazyEngine | None = PrivateAttr(default=None)
    """What loaded it; ``None`` if it was given."""

    _given: CocoaEngine | None = PrivateAttr(default=None)
    _model: PreTrainedModel | None = PrivateAttr(default=None)
    _tokenizer: PreTrainedTokenizerBase | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Call those of the other base classes too. pydantic defines one for private attributes that does not."""
        super().model_post_init(context)

    @property
    def engine(self) -> CocoaEngine:
        """The engine that decodes. It is loaded again if loading options were changed.

        Raises:
            ModelLoadError: the model cannot be loaded.
        """
        self._follow_options()
        return self._engine

    def _follow_options(self) -> None:
        """Use the engine of the current options, which may have been set since the last call.

        Raises:
            ModelLoadError: the model cannot be loaded.
        """
        if self._given is not None:
            return
        lazy = self._current()
        engine = lazy.get()
        if lazy is not self._lazy:
            self._lazy, self._engine = lazy, engine
            self._adapt_to(engine)

    async def _follow_options_in_worker(self) -> None:
        """Like :meth:`_follow_options`, without blocking the event loop while a model is loaded."""
        if self._given is None and (lazy := self._current()) is not self._lazy:
            await in_worker(lazy, self._follow_options)

    def _current(self) -> LazyEngine:
        return lazy_engine(loading_arguments(self), model=self._model, tokenizer=self._tokenizer)

    def _adapt_to(self, engine: CocoaEngine) -> None:
        """Set the options that follow from the model, where they were not given."""

    def _use(
        self,
        engine: CocoaEngine | None,
        model: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
        named: str,
    ) -> None:
        """Use these objects, and load what is not given.

        As in ``HuggingFaceLLM``, ``model`` and ``tokenizer`` take precedence over their names. ``model_name`` is then
        only a label.

        Args:
            engine, model, tokenizer: what is loaded already.
            named: the name under which ``model_name`` was given, for messages.

        Raises:
            ConfigError: two options contradict each other, or a model was given without a tokenizer.
            ModelLoadError: the model or the tokenizer cannot be loaded.
        """
        changed = changed_options(self)
        if engine is not None:
            objects = [name for name, given in (("model", model), ("tokenizer", tokenizer)) if given is not None]
            same_name = self.model_name == engine.model_name
            own = {"model_name": None if same_name else named}
            refuse_beside("engine", [name for one in changed if (name := own.get(one, one))] + objects)
        self._given, self._model, self._tokenizer = engine, model, tokenizer
        self._refuse_without_effect(changed)
        if model is not None and tokenizer is None and self.tokenizer_name is None:
            raise ConfigError("model= was given without a tokenizer; give tokenizer= or tokenizer_name= too.")
        if engine is None:
            self._follow_options()
        else:
            self._engine = engine
            self._adapt_to(engine)
        if engine is not None or model is not None:
            super().__setattr__("model_name", self._engine.model_name)

    def _refuse_without_effect(self, changed: list[str]) -> None:
        if self._tokenizer is not None:
            refuse_beside("tokenizer", [name for name in changed if name == "tokenizer_kwargs"])
        if self._model is not None:
            refuse_beside("model", [name for name in changed if name in WEIGHTS])

    if not TYPE_CHECKING:  # type checkers keep the field-by-field assignment

        def __setattr__(self, name: str, value: Any) -> None:
            field = FIELD_SYNONYMS.get(name, name)
            if field in LoadOptions.model_fields:
                value = checked_option(field, value, what=type(self).__name__)
                changed = changed_options({field: value})
                if self._given is not None:
                    refuse_beside("engine", [name for _ in changed if value != getattr(self, field)])
                self._refuse_without_effect(changed)
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the engine."""
        memo = {} if memo is None else memo
        for shared in (self._given, self._model, self._tokenizer, getattr(self, "_engine", None)):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """The options, without the model, which is loaded again by its name when the unpickled object is used.

        Raises:
            UnsupportedFeatureError: a loaded engine, model or tokenizer was given, or an option cannot be pickled.
        """
        what = type(self).__name__
        if any(given is not None for given in (self._given, self._model, self._tokenizer)):
            raise UnsupportedFeatureError(
                f"a {what} with a loaded engine, model or tokenizer cannot be pickled; give model_name= and its "
                f"loading options instead, send its to_dict() and use {what}.from_dict(...), or create one in each "
                "process"
            )
        state = BaseModel.__getstate__(self)  # LlamaIndex's own removes what cannot be pickled, from this object too
        require_picklable(state["__dict__"], what=what)
        private = {name: value for name, value in state["__pydantic_private__"].items() if name not in LOADED}
        return {**state, "__pydantic_private__": {**private, "_lazy": None}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore the options. The model is loaded when it is needed."""
        BaseModel.__setstate__(self, state)
