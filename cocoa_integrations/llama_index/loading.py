"""The engine behind an LLM: the one given, or one made from the options that HuggingFaceLLM's users know."""

from __future__ import annotations

from typing import Any

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.model.loading import load_tokenizer


def engine_for(engine: CocoaEngine | None, *, model: Any, tokenizer: Any, **loading: Any) -> CocoaEngine:
    """The given engine, one around the given model and tokenizer, or one loaded by name.

    As with HuggingFaceLLM, ``model`` and ``tokenizer`` go before their names; ``model_name`` then only labels.

    Args:
        engine: the engine, if there is one.
        model: a loaded model.
        tokenizer: a loaded tokenizer.
        **loading: all of ``cocoa_integrations.settings.LOADING``.

    Raises:
        ConfigError: two options contradict each other, or a model comes without a tokenizer.
        ModelLoadError: the model or the tokenizer cannot be loaded.
    """
    if engine is not None:
        other_name = None if loading["model_name"] == engine.model_name else loading["model_name"]
        _refuse_beside("engine", **{**loading, "model_name": other_name, "model": model, "tokenizer": tokenizer})
        return engine
    if tokenizer is not None:
        _refuse_beside("tokenizer", tokenizer_kwargs=loading["tokenizer_kwargs"])
    if model is None:
        loaded = CocoaEngine.from_pretrained(**loading)
        if tokenizer is None:
            return loaded
        return CocoaEngine(
            loaded.model,
            tokenizer,
            runtime=loaded.runtime,
            model_name=loaded.model_name,
            calibrator=loaded.calibrator,
        )
    _refuse_beside("model", **{name: loading[name] for name in ("dtype", "device_map", "allow_pickle", "model_kwargs")})
    if tokenizer is None:
        if loading["tokenizer_name"] is None:
            raise ConfigError("model= was given without a tokenizer; give tokenizer= or tokenizer_name= too.")
        trust = {"trust_remote_code": loading["trust_remote_code"]}
        tokenizer = load_tokenizer(loading["tokenizer_name"], {**trust, **loading["tokenizer_kwargs"]})
    options = {name: loading[name] for name in ("runtime", "model_name", "calibrator")}
    return CocoaEngine(model, tokenizer, **options)


def _refuse_beside(given: str, **others: Any) -> None:
    """Options that go unheard beside another must be as they are by default."""
    excess = [name for name, value in others.items() if value not in (None, "auto", False, {})]
    if excess:
        raise ConfigError(f"{given}= already settles {', '.join(excess)}; give the one or the other.")
