"""The engine behind an adapter, loaded from the adapter's options when it is first needed.

Adapters with the same options share one engine. Adapters that differ only in the calibrator or in how the model is run
share its weights.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from cocoa_engine import CocoaEngine, RiskCalibrator, Runtime, load_tokenizer, read_context_window
from cocoa_engine.integration import free_in_child

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Shared = TypeVar("Shared")


class LazyEngine:
    """An engine that is loaded when it is first needed. Create it with :func:`lazy_engine`.

    Copies are the same object.
    """

    def __init__(self, arguments: dict[str, Any], weights: _Weights) -> None:
        self._arguments = arguments
        self._weights = weights
        self._engine: CocoaEngine | None = None
        self._as_loaded: str | None = None
        self._lock = free_in_child(threading.Lock())
        calibrator = arguments.get("calibrator", "auto")
        # engines that differ in the calibrator share their batch and their prefix cache too
        self._default = None if calibrator == "auto" else _lazy_engine({**arguments, "calibrator": "auto"}, weights)

    @property
    def runtime(self) -> Runtime:
        """How the engine runs its model."""
        return self._arguments.get("runtime") or Runtime()

    @property
    def context_window(self) -> int | None:
        """The window of the model, read from its configuration if it is not loaded; ``None`` if it is not known."""
        return self._engine.context_window if self._engine is not None else self._weights.context_window

    @property
    def changed_settings(self) -> str | None:
        """The digest of the engine's settings if they were changed since it was loaded, otherwise ``None``."""
        if self._engine is None or (digest := settings_digest(self._engine)) == self._as_loaded:
            return None
        return digest

    def get(self) -> CocoaEngine:
        """The engine. It is loaded by the first call that succeeds."""
        with self._lock:
            if self._engine is None:
                calibrator = self._arguments.get("calibrator", "auto")
                if self._default is None:
                    engine = self._weights.engine(self._arguments.get("runtime"))
                elif calibrator is None:
                    engine = self._default.get().without_calibrator()
                else:
                    fitted = RiskCalibrator.load(calibrator)  # before the weights are read
                    engine = self._default.get().with_calibrator(fitted)
                self._as_loaded = _digest(self._weights.settings, engine)
                self._engine = engine
            return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyEngine:
        return self


class _Weights:
    """A model and its tokenizer, given or loaded when they are first needed. The name of a given model is a label."""

    def __init__(
        self, arguments: dict[str, Any], model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self._arguments = arguments
        self._model, self._tokenizer = model, tokenizer
        self._parts: tuple[Any, PreTrainedTokenizerBase, str] | None = None
        self._lock = free_in_child(threading.Lock())
        self.settings = ""
        self._by_name = None
        if model is None and tokenizer is not None:
            self._by_name = _weights({**arguments, "tokenizer_name": None, "tokenizer_kwargs": {}})

    @cached_property
    def context_window(self) -> int | None:
        if self._model is not None:
            return None
        name, kwargs = self._arguments.get("model_name"), self._arguments.get("model_kwargs")
        trust = self._arguments.get("trust_remote_code", False)
        return read_context_window(name, trust_remote_code=trust, model_kwargs=kwargs)

    def engine(self, runtime: Runtime | None) -> CocoaEngine:
        """A new engine with these weights."""
        with self._lock:
            if self._parts is None:
                engine = self._load(runtime)
                self._parts = engine.held_model, engine.tokenizer, engine.model_name
                self.settings = _model_settings(engine)
                return engine
            model, tokenizer, name = self._parts
        return CocoaEngine(model, tokenizer, runtime=runtime, model_name=name)

    def _load(self, runtime: Runtime | None) -> CocoaEngine:
        arguments, tokenizer = self._arguments, self._tokenizer
        if self._by_name is not None:
            loaded: Any = self._by_name.engine(runtime)
            assert tokenizer is not None
            return CocoaEngine(loaded.held_model, tokenizer, runtime=runtime, model_name=loaded.model_name)
        if self._model is None:
            return CocoaEngine.from_pretrained(**arguments, runtime=runtime)
        if tokenizer is None:
            trust = {"trust_remote_code": arguments["trust_remote_code"]}
            tokenizer = load_tokenizer(arguments["tokenizer_name"], {**trust, **arguments["tokenizer_kwargs"]})
        return CocoaEngine(self._model, tokenizer, runtime=runtime, model_name=arguments["model_name"])


# LangChain builds a new model for every call with configurable_fields(); the weights must not be loaded each time.
_shared: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_shared_lock = free_in_child(threading.RLock())


def lazy_engine(
    arguments: dict[str, Any],
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LazyEngine:
    """An engine for ``CocoaEngine.from_pretrained(**arguments)``, shared by all callers with equal arguments.

    The engine is freed when the last of these callers is. A loaded ``model`` and ``tokenizer`` are used instead of
    those that the arguments name.
    """
    by_name = {name: value for name, value in arguments.items() if name not in ("runtime", "calibrator")}
    with _shared_lock:
        return _lazy_engine(dict(arguments), _weights(by_name, model, tokenizer))


def _lazy_engine(arguments: dict[str, Any], weights: _Weights) -> LazyEngine:
    return _once(("engine", id(weights), arguments), lambda: LazyEngine(arguments, weights))


def _weights(
    arguments: dict[str, Any],
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> _Weights:
    objects = id(model), id(tokenizer)  # alive as long as the entry is, so their ids are theirs alone
    return _once(("weights", *objects, arguments), lambda: _Weights(arguments, model, tokenizer))


def _once(key: tuple[Any, ...], make: Callable[[], Shared]) -> Shared:
    *rest, arguments = key
    text = repr((*rest, sorted(arguments.items())))
    with _shared_lock:
        shared = _shared.get(text)
        if shared is None:
            shared = _shared[text] = make()
        return shared


def settings_digest(engine: CocoaEngine) -> str:
    """Digest of what users may change on an engine: generation config, chat template and calibrator."""
    return _digest(_model_settings(engine), engine)


def _model_settings(engine: CocoaEngine) -> str:
    generation_config = getattr(engine.held_model, "generation_config", None)
    settings = generation_config.to_dict() if generation_config is not None else {}
    return repr((sorted(settings.items()), getattr(engine.tokenizer, "chat_template", None)))


def _digest(model_settings: str, engine: CocoaEngine) -> str:
    calibrator = None if engine.calibrator is None else engine.calibrator.model_dump_json()
    return hashlib.sha256(repr((model_settings, calibrator)).encode()).hexdigest()
