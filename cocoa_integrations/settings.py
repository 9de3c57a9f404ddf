"""Options of the adapters: which are decode settings, which are unknown. The settings themselves are declared once,
in :class:`cocoa_engine.CocoaConfig`; nothing here repeats a default, a range or a description."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, create_model

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown

LOADING = (
    "model_name", "tokenizer_name", "dtype", "device_map", "trust_remote_code", "allow_pickle", "model_kwargs",
    "tokenizer_kwargs", "runtime", "calibrator",
)  # fmt: skip
"""The options that say how a model is loaded."""

SYNONYMS = {"max_tokens": "max_new_tokens"}
"""Names that users of the frameworks know, and the setting each one means."""


def split_settings(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part keyword arguments into decode settings (under their own names) and the rest.

    A setting given as None counts as not given, unless None means something to it.

    Raises:
        ConfigError: a setting is given twice, under two names, with different values.
    """
    settings: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in options.items():
        setting = SYNONYMS.get(name, name)
        if setting not in CocoaConfig.model_fields:
            rest[name] = value
        elif value is None and CocoaConfig.model_fields[setting].default is not None:
            continue
        elif setting in settings and settings[setting] != value:
            raise ConfigError(f"{setting} is given twice: {settings[setting]!r} and, as {name}, {value!r}")
        else:
            settings[setting] = value
    return settings, rest


def refuse_unknown(options: Iterable[str], known: Iterable[str], *, what: str) -> None:
    """Refuse the option names that are not known.

    Args:
        options: the names given.
        known: the names there are, besides the decode settings and their synonyms.
        what: what takes the options, for the message.

    Raises:
        ConfigError: naming each unknown option and the nearest known one.
    """
    names = sorted({*known, *CocoaConfig.model_fields, *SYNONYMS})
    if strangers := [name for name in options if name not in names]:
        raise ConfigError(f"{what}: {unknown(strangers, names, what='option')}")


if TYPE_CHECKING:  # type checkers and editors see the fields themselves

    class DecodeSettings(CocoaConfig):
        """The settings of :class:`~cocoa_engine.CocoaConfig` as fields of an adapter."""

        model_config = ConfigDict(frozen=False)

else:
    DecodeSettings = create_model(
        "DecodeSettings",
        __doc__="The settings of CocoaConfig as fields of an adapter. CocoaConfig validates them, not the adapter.",
        __base__=BaseModel,
        **{
            name: (SkipValidation[field.annotation], Field(default=field.default, description=field.description))
            for name, field in CocoaConfig.model_fields.items()
        },
    )


def fields_of(holder: DecodeSettings | CocoaConfig) -> dict[str, Any]:
    """The decode settings that an adapter or a config holds, by name."""
    return {name: getattr(holder, name) for name in CocoaConfig.model_fields}


def config_of(adapter: DecodeSettings) -> CocoaConfig:
    """The settings an adapter holds, validated.

    Raises:
        ConfigError: one of them is out of range.
    """
    return CocoaConfig(**fields_of(adapter))
