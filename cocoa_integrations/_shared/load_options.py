"""Checks of the loading options that adapters take as fields."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from pydantic import ValidationError

from cocoa_engine.errors import ConfigError, UnsupportedFeatureError
from cocoa_engine.messages import explain
from cocoa_engine.model.load_options import LoadOptions, default_of
from cocoa_integrations._shared.settings import FIELD_SYNONYMS


def checked_option(name: str, value: Any, *, what: str) -> Any:
    """The value of a loading option that is set after construction of ``what``, validated.

    ``None`` is the default of the option, except for ``device_map``, where it is the CPU.
    """
    if value is None and name != "device_map":
        return default_of(name)
    try:
        return getattr(LoadOptions.model_validate({name: value}), name)
    except ValidationError as error:
        raise ConfigError(f"{what}: {explain(error)}") from None


MODEL_NAMES = ("model", "model_name")
"""The names of the option that names the model. Every adapter takes both."""


def one_model_name(options: dict[str, Any], **more: Any) -> str:
    """Give the model's name the name of its field, in place, and return that under which it was given, for messages.

    ``more`` are further names of the option. A path becomes text.
    """
    given = {name: options.pop(name, None) for name in MODEL_NAMES} | more
    names: dict[str, str] = {}
    for name, value in given.items():
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


def with_field_names(update: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a copy, under their own names."""
    return {FIELD_SYNONYMS.get(name, name): value for name, value in (update or {}).items()}


def refuse_beside(given: str, names: Sequence[str]) -> None:
    """Refuse options, if there are any, that have no effect together with a given one."""
    if names:
        raise ConfigError(f"{given}= is given, so {', '.join(names)} would have no effect; give one or the other.")


def require_picklable(fields: Mapping[str, Any], *, what: str) -> None:
    """Refuse to pickle an adapter that has an option which cannot be pickled."""
    for name, value in fields.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # each class raises errors of its own
            raise UnsupportedFeatureError(
                f"this {what} cannot be pickled, because its {name} cannot be ({error}); leave {name} out, and set it "
                "after unpickling"
            ) from None
