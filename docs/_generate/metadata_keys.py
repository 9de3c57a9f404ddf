"""Documents the metadata that adapters attach to answers, from the typed dictionaries that declare it."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cocoa_integrations.schema import METADATA
from docs._generate.markdown import anchor, code, plain_roles, prose, table, type_name, typed_dicts


def metadata_keys() -> str:
    """A table of the metadata keys, then a section with the fields of each type."""
    rows = [[code(key), _linked(kind)] for key, kind in METADATA.items()]
    parts = [table(["Key", "Type"], rows)]
    parts += [
        "\n".join(
            [
                f"## {code(kind.__name__)} {{#{anchor(kind.__name__)}}}\n",
                f"{plain_roles(inspect.getdoc(kind) or '')}\n",
                _fields(kind),
            ]
        )
        for kind in entry_types()
    ]
    return "\n".join(parts)


def entry_types() -> list[Any]:
    """Every typed dictionary that a metadata key contains, directly or nested."""
    found: list[Any] = []
    waiting = [kind for value in METADATA.values() for kind in typed_dicts(value)]
    while waiting:
        kind = waiting.pop(0)
        if kind not in found:
            found.append(kind)
            waiting += [inner for hint in get_type_hints(kind).values() for inner in typed_dicts(hint)]
    return found


def _fields(kind: Any) -> str:
    rows = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        assert get_origin(hint) is Annotated, f"{kind.__name__}.{name} has no description"
        declared, description = get_args(hint)
        optional = "" if name in kind.__required_keys__ else " (optional)"
        rows.append([code(name) + optional, _linked(declared), prose(description)])
    return table(["Key", "Type", "Meaning"], rows)


def _linked(kind: Any) -> str:
    """A type as inline code; if it contains a typed dictionary, with a link to the table of the first one."""
    named = code(type_name(kind))
    inner = typed_dicts(kind)
    return (
        f"[{named}](#{anchor(inner[0].__name__)})"
        if inner
        else ", ".join(code(part) for part in type_name(kind).split(" | "))
    )
