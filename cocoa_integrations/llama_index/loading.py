"""The engine behind an LLM: the one given, or one made from the options that HuggingFaceLLM's users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer

from cocoa_engine import CocoaEngine, ConfigError

DEVICE_MAP = "auto"


def engine_for(
    engine: CocoaEngine | None,
    *,
    model_name: str | None,
    tokenizer_name: str | None,
    model: Any,
    tokenizer: Any,
    device_map: str | Mapping[str, Any] | None,
    model_kwargs: Mapping[str, Any],
    tokenizer_kwargs: Mapping[str, Any],
) -> CocoaEngine:
    """The given engine, one around the given model and tokenizer, or one loaded by name.

    As with HuggingFaceLLM, ``model`` and ``tokenizer`` go before their names; ``model_name`` then only labels.

    Raises:
        ConfigError: two options contradict each other, or a model comes without a tokenizer.
        ModelLoadError: the model cannot be loaded.
    """
    device_map_given = device_map if device_map != DEVICE_MAP else None
    if engine is not None:
        other_name = model_name if model_name != engine.model_name else None
        _refuse_beside(
            "engine",
            model_name=other_name,
            tokenizer_name=tokenizer_name,
            model=model,
            tokenizer=tokenizer,
            device_map=device_map_given,
            model_kwargs=model_kwargs,
            tokenizer_kwargs=tokenizer_kwargs,
        )
        return engine
    if tokenizer is not None:
        _refuse_beside("tokenizer", tokenizer_kwargs=tokenizer_kwargs)
    if model is None:
        loaded = CocoaEngine.from_pretrained(
            model_name,
            tokenizer_name=tokenizer_name,
            tokenizer_kwargs=dict(tokenizer_kwargs),
            **{"device_map": device_map, **model_kwargs},
        )
        return loaded if tokenizer is None else CocoaEngine(loaded.model, tokenizer, model_name=loaded.model_name)
    _refuse_beside("model", device_map=device_map_given, model_kwargs=model_kwargs)
    if tokenizer is None:
        if tokenizer_name is None:
            raise ConfigError("model= was given without a tokenizer; give tokenizer= or tokenizer_name= too.")
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, **tokenizer_kwargs)
    return CocoaEngine(model, tokenizer, model_name=model_name)


def _refuse_beside(given: str, **others: Any) -> None:
    excess = [name for name, value in others.items() if value is not None and value != {}]
    if excess:
        raise ConfigError(f"{given}= already settles {', '.join(excess)}; give the one or the other.")
