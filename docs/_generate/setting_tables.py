"""Tables of the decoding and runtime settings, from the fields of their pydantic models."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cocoa_engine import METHODS, CocoaConfig, Runtime
from cocoa_integrations.ray.settings import RaySettings
from cocoa_integrations.server import ServerSettings
from docs._generate.markdown import code, prose, table, type_name

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def settings() -> str:
    """The table of ``CocoaConfig``."""
    return _table(CocoaConfig)


def runtime_settings() -> str:
    """The table of ``Runtime``."""
    return _table(Runtime)


def server_settings() -> str:
    """The table of ``ServerSettings``."""
    return _table(ServerSettings)


def ray_settings() -> str:
    """The table of ``RaySettings``."""
    return _table(RaySettings)


def _table(model: type[BaseModel]) -> str:
    rows = [
        [f"{code(name)}{{#{name}}}", code(_default(field)), _values(name, field), prose(field.description or "")]
        for name, field in model.model_fields.items()
    ]
    return table(["Setting", "Default", "Values", "Meaning"], rows)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return f"{type_name(field.annotation)}()"
    return repr(field.default).replace("'", '"')


def _values(name: str, field: FieldInfo) -> str:
    if name == "method":
        return ", ".join(code(f'"{method}"') for method in METHODS)
    values = type_name(field.annotation)
    first, *others = (code(part) for part in values.split(" | "))
    return ", ".join([" ".join([first, ", ".join(_bounds(field))]).strip(), *others])


def _bounds(field: FieldInfo) -> Iterator[str]:
    for bound in field.metadata:
        for name, sign in _BOUNDS.items():
            if (value := getattr(bound, name, None)) is not None:
                power = value.bit_length() - 1 if isinstance(value, int) and value > 10**9 else 0
                number = f"2^{power}" if power and value == 2**power else f"{value:.15g}"
                yield f"{sign}&nbsp;{number}"
