"""Documents the metadata that adapters attach to answers, from the types that declare it."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from pydantic import BaseModel

from cocoa_engine.report import RiskReport, SpanReport
from cocoa_integrations._shared.citations import Citation
from cocoa_integrations._shared.tries import Try
from cocoa_integrations.langchain.agents import AgentRisk
from docs._generate.markdown import anchor, code, plain_roles, prose, table, type_name

METADATA: dict[str, Any] = {
    "cocoa_spans": list[SpanReport],
    "cocoa_risk": RiskReport,
    "cocoa_citations": list[Citation],
    "cocoa_reports": list[RiskReport],
    "cocoa_risks": list[AgentRisk],
    "cocoa_tries": list[Try],
}
"""The type of each metadata key."""


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


def entry_types() -> list[type[BaseModel]]:
    """Every type that a metadata key contains, directly or nested."""
    types: list[type[BaseModel]] = []
    waiting = [kind for value in METADATA.values() for kind in _models(value)]
    while waiting:
        kind = waiting.pop(0)
        if kind not in types:
            types.append(kind)
            waiting += [inner for field in kind.model_fields.values() for inner in _models(field.annotation)]
    return types


def _models(kind: Any) -> list[type[BaseModel]]:
    """The types of ours that occur in a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for argument in get_args(kind) for model in _models(argument)]


def _fields(kind: type[BaseModel]) -> str:
    rows = []
    for name, field in kind.model_fields.items():
        assert field.description, f"{kind.__name__}.{name} has no description"
        optional = "" if field.is_required() else " (optional)"
        rows.append([code(field.alias or name) + optional, _linked(field.annotation), prose(field.description)])
    return table(["Key", "Type", "Meaning"], rows)


def _linked(kind: Any) -> str:
    """A type as inline code; if it contains one of ours, with a link to the table of the first one."""
    named = code(type_name(kind))
    inner = _models(kind)
    return (
        f"[{named}](#{anchor(inner[0].__name__)})"
        if inner
        else ", ".join(code(part) for part in type_name(kind).split(" | "))
    )
