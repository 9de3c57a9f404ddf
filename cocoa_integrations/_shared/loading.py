"""The engine behind an adapter: the one that was given, or one that is loaded from the adapter's options."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.errors import ConfigError
from cocoa_engine.model.load_options import LoadOptions, changed_options, loading_arguments
from cocoa_engine.model.loading import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LazyEngine:
    """An engine that is loaded when it is first needed. Create it with :func:`lazy_engine`.

    Args:
        arguments: keyword arguments of ``CocoaEngine.from_pretrained``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._engine: CocoaEngine | None = None
        self._lock = threading.Lock()

    @property
    def loaded(self) -> CocoaEngine | None:
        """The engine, or ``None`` if it is not loaded yet."""
        return self._engine

    @property
    def runtime(self) -> Runtime:
        """How the engine runs its model."""
        return self._arguments.get("runtime") or Runtime()

    def get(self) -> CocoaEngine:
        """The engine; loads it on the first call.

        Raises:
            ModelLoadError: the model cannot be loaded. The next call tries again.
        """
        with self._lock:
            if self._engine is None:
                self._engine = CocoaEngine.from_pretrained(**self._arguments)
            return self._engine


# LangChain builds a new model for every call with configurable_fields(); the weights must not be loaded each time.
_shared: weakref.WeakValueDictionary[str, LazyEngine] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def lazy_engine(arguments: dict[str, Any]) -> LazyEngine:
    """An engine for ``CocoaEngine.from_pretrained(**arguments)``, shared by all callers with equal arguments.

    The engine is freed when the last of these callers is.
    """
    key = repr(sorted(arguments.items()))
    with _shared_lock:
        engine = _shared.get(key)
        if engine is None:
            engine = _shared[key] = LazyEngine(arguments)
        return engine


def engine_for(
    options: LoadOptions,
    *,
    engine: CocoaEngine | None = None,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> CocoaEngine:
    """The given engine, an engine around the given model and tokenizer, or one loaded by name.

    As in LlamaIndex's ``HuggingFaceLLM``, ``model`` and ``tokenizer`` take precedence over their names. ``model_name``
    is then only a label.

    Args:
        options: how to load what is not given.
        engine: the engine, if there is one.
        model: a loaded model.
        tokenizer: a loaded tokenizer.

    Raises:
        ConfigError: two options contradict each other, or a model was given without a tokenizer.
        ModelLoadError: the model or the tokenizer cannot be loaded.
    """
    changed = changed_options(options)
    if engine is not None:
        objects = [name for name, given in (("model", model), ("tokenizer", tokenizer)) if given is not None]
        same_name = options.model_name == engine.model_name
        refuse_beside("engine", [name for name in changed if not (name == "model_name" and same_name)] + objects)
        return engine
    if tokenizer is not None:
        refuse_beside("tokenizer", [name for name in changed if name == "tokenizer_kwargs"])
    if model is None:
        loaded = CocoaEngine.from_pretrained(**loading_arguments(options))
        if tokenizer is None:
            return loaded
        return CocoaEngine(
            loaded.model,
            tokenizer,
            runtime=loaded.runtime,
            model_name=loaded.model_name,
            calibrator=loaded.calibrator,
        )
    weights = ("dtype", "device_map", "allow_pickle", "model_kwargs")
    refuse_beside("model", [name for name in changed if name in weights])
    if tokenizer is None:
        if options.tokenizer_name is None:
            raise ConfigError("model= was given without a tokenizer; give tokenizer= or tokenizer_name= too.")
        trust = {"trust_remote_code": options.trust_remote_code}
        tokenizer = load_tokenizer(options.tokenizer_name, {**trust, **options.tokenizer_kwargs})
    return CocoaEngine(
        model, tokenizer, runtime=options.runtime, model_name=options.model_name, calibrator=options.calibrator
    )


def refuse_beside(given: str, names: Sequence[str]) -> None:
    """Refuse options that have no effect together with another one.

    Args:
        given: the option that makes them ineffective.
        names: the ineffective options that were given.

    Raises:
        ConfigError: there is such an option.
    """
    if names:
        raise ConfigError(f"{given}= is given, so {', '.join(names)} would have no effect; give one or the other.")
