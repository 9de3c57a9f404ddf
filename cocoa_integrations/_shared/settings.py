"""Decode settings as options of the adapters. The settings are declared once, in :class:`cocoa_engine.CocoaConfig`."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, create_model

from cocoa_engine import METHODS, CocoaConfig
from cocoa_engine.errors import ConfigError, unknown

OF_SAMPLING = ("top_k", "top_p")
"""Settings that are options of other models unless the method samples tokens."""

SYNONYMS = {"max_tokens": "max_new_tokens"}
"""Other names of settings, from the frameworks."""

FIELD_SYNONYMS = {"model": "model_name", **SYNONYMS}
"""Other names of fields."""


def split_settings(options: Mapping[str, Any], method: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into decode settings, with synonyms resolved, and the rest.

    A setting that is ``None`` is dropped, unless ``None`` is its default. If the current method is given, ``top_k``
    and ``top_p`` belong to the rest unless that method, or the one that the arguments name, samples tokens.
    """
    used = METHODS.get(str(options.get("method") or method))
    refused = () if method is None or (used is not None and used.samples) else OF_SAMPLING
    settings: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in options.items():
        setting = SYNONYMS.get(name, name)
        if setting not in CocoaConfig.model_fields or setting in refused:
            rest[name] = value
        elif value is None and CocoaConfig.model_fields[setting].default is not None:
            continue
        elif setting in settings and settings[setting] != value:
            raise ConfigError(f"{setting} is given twice: {settings[setting]!r} and, as {name}, {value!r}")
        else:
            settings[setting] = value
    return settings, rest


def refuse_unknown(options: Iterable[str], names: Iterable[str], *, what: str) -> None:
    """Refuse names that are neither known options nor settings, and name the closest known one."""
    names = sorted({*names, *CocoaConfig.model_fields, *SYNONYMS})
    if not_known := [name for name in options if name not in names]:
        raise ConfigError(f"{what}: {unknown(not_known, names, what='option')}")


if TYPE_CHECKING:  # type checkers and editors see the fields themselves

    class DecodeSettings(CocoaConfig):
        """The settings of :class:`~cocoa_engine.CocoaConfig` as fields of an adapter."""

        model_config = ConfigDict(frozen=False)

else:
    DecodeSettings = create_model(
        "DecodeSettings",
        __doc__="The settings of CocoaConfig as fields of an adapter. CocoaConfig validates their values.",
        __base__=BaseModel,
        **{
            name: (SkipValidation[field.annotation], Field(default=field.default, description=field.description))
            for name, field in CocoaConfig.model_fields.items()
        },
    )


def fields_of(source: DecodeSettings | CocoaConfig) -> dict[str, Any]:
    """The decode settings of an adapter, or those that were set in a config, by name."""
    names = source.model_fields_set if isinstance(source, CocoaConfig) else CocoaConfig.model_fields
    return {name: getattr(source, name) for name in CocoaConfig.model_fields if name in names}


def config_of(adapter: DecodeSettings) -> CocoaConfig:
    """The decode settings of an adapter, validated. With a model at a server, those that are ``None`` are not set."""
    fields = fields_of(adapter)
    if getattr(adapter, "base_url", None) is not None:
        fields = {name: value for name, value in fields.items() if value is not None}
    return CocoaConfig(**fields)


def updated(config: CocoaConfig, settings: Mapping[str, Any]) -> CocoaConfig:
    """A copy with some settings changed. What was not set in the config is not set in the copy, either."""
    return CocoaConfig(**{**{name: getattr(config, name) for name in config.model_fields_set}, **settings})


def set_config(adapter: DecodeSettings, config: CocoaConfig) -> None:
    """Set all decode settings of an adapter."""
    if not isinstance(config, CocoaConfig):
        raise ConfigError(f"config takes a CocoaConfig, not {type(config).__name__}")
    for name in CocoaConfig.model_fields:
        setattr(adapter, name, getattr(config, name))
