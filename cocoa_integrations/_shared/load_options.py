"""Checks of the loading options that adapters take as fields."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from cocoa_engine.errors import ConfigError, UnsupportedFeatureError
from cocoa_engine.messages import explain
from cocoa_engine.model.load_options import LoadOptions, default_of


def checked_option(name: str, value: Any, *, what: str) -> Any:
    """The value of a loading option that is set after construction, validated.

    ``None`` is the default of the option, except for ``device_map``, where it is the CPU.

    Args:
        name: the option.
        value: its new value.
        what: the class of the adapter, for the message.

    Raises:
        ConfigError: the value is not valid.
    """
    if value is None and name != "device_map":
        return default_of(name)
    try:
        return getattr(LoadOptions.model_validate({name: fspath(name, value)}), name)
    except ValidationError as error:
        raise ConfigError(f"{what}: {explain(error)}") from None


def fspath(name: str, value: Any) -> Any:
    """The value of an option, which for a name of a model or of its parts may be a path."""
    return os.fspath(value) if name != "device_map" and isinstance(value, os.PathLike) else value


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


def require_picklable(fields: Mapping[str, Any], *, what: str) -> None:
    """Refuse to pickle an adapter that has an option which cannot be pickled.

    Raises:
        UnsupportedFeatureError: there is such an option. The message names it.
    """
    for name, value in fields.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # each class raises errors of its own
            raise UnsupportedFeatureError(
                f"this {what} cannot be pickled, because its {name} cannot be ({error}); leave {name} out, and set it "
                "after unpickling"
            ) from None
