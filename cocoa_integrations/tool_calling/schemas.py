"""JSON schemas: closed before a grammar is made of them, and compared with the finished values.

Workers of :mod:`cocoa_engine.confined` run this module, because a regular expression or references in a schema can take
time without end. So it imports neither torch nor transformers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import need, run_confined, shortened, unenforced_here

USES = ("llguidance", "jsonschema.exceptions", "jsonschema.validators", "jsonschema_specifications")
"""The optional packages that its functions import in workers."""


def warm() -> None:
    """Do what the first comparison in a process takes longer for: a worker whose first call is slow is used once."""
    _validator({})


def mismatch(text: str, schema: Mapping[str, Any]) -> str | None:
    """Why a JSON text does not fit a schema; ``None`` if it does, or was cut off.

    Numbers are compared as they are written: 0.07 is a multiple of 0.01. Nothing is fetched that a ``$ref`` names.
    """
    try:
        return run_confined(_mismatch, str(text), schema, what="to compare the answer with its schema")
    except ConfigError as error:
        return f"it cannot be validated: {error}"


def _mismatch(text: str, schema: Mapping[str, Any]) -> str | None:
    try:
        value = json.loads(text, parse_float=Decimal, strict=False)
    except (ValueError, RecursionError):
        return None
    except ArithmeticError:
        return "a number has an exponent that is out of range"
    try:
        error = need("jsonschema.exceptions", extra="tools", what="a schema").best_match(
            _validator(schema).iter_errors(value)
        )
    except re.error:  # `enforceable` has refused the schema unless its grammar enforces the pattern
        return None
    except Exception as unable:  # such as a reference to nothing
        if isinstance(unable, RecursionError) and not unenforced_here(schema):
            return None  # a reference that leads to itself beside other alternatives, which a grammar enforces
        return shortened(f"it cannot be validated: {unable}", 300)
    return None if error is None else shortened(f"{error.json_path}: {error.message}", 300)


def enforceable(schema: Mapping[str, Any]) -> Any:
    """The schema for a grammar: :func:`closed`, unless no value would fit it then.

    The grammar may leave out a part of it, which :func:`mismatch` finds in the finished value. What can neither be
    enforced nor validated, or takes too much time or memory, is a ``ConfigError``.
    """
    return enforceable_each([schema])[0]


def enforceable_each(schemas: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Like :func:`enforceable`, for several schemas, which have one limit of time and memory together."""
    what = "the JSON schema" if len(schemas) == 1 else "the list of JSON schemas"
    return run_confined(_enforceable_each, [*schemas], what=what)


def _enforceable_each(schemas: Sequence[Mapping[str, Any]]) -> list[Any]:
    enforced: list[Any] = []
    for schema in schemas:
        left_out, (kind, is_valid) = unenforced_here(schema), _draft(schema)
        if left_out or not is_valid:
            checker = kind.FORMAT_CHECKER if left_out else None  # of regular expressions
            try:
                kind.check_schema(schema, format_checker=checker)
            except need("jsonschema", extra="tools", what="a schema").SchemaError as error:
                parts = f" ({'; '.join(left_out)})" if left_out else ""
                raise ConfigError(f"the JSON schema{parts} is invalid at {error.json_path}: {error.message}") from None
        made = closed(schema)
        try:
            unenforced_here(made)
        except ConfigError:  # such as of properties that several parts of a schema declare together
            made = schema
        enforced.append(made)
    return enforced


def _validator(schema: Mapping[str, Any]) -> Any:
    exact, (kind, _) = json.loads(json.dumps(schema), parse_float=Decimal), _draft(schema)
    validators = need("jsonschema.validators", extra="tools", what="a schema")
    specifications = need("jsonschema_specifications", extra="tools", what="a schema")
    types = kind.TYPE_CHECKER.redefine("integer", _is_integer)
    return validators.extend(kind, type_checker=types)(exact, registry=specifications.REGISTRY)


def _draft(schema: Mapping[str, Any]) -> tuple[Any, bool]:
    """The validators of the draft that ``$schema`` names, or the newest it is valid in; and whether it is valid."""
    if not isinstance(schema.get("$schema", ""), str):
        raise ConfigError("the JSON schema is invalid at $.$schema: it must be a text, the address of a draft")
    validators = need("jsonschema.validators", extra="tools", what="a schema")
    named = validators.validator_for(schema, default=None)
    names = ("Draft202012Validator", "Draft7Validator", "Draft4Validator", "Draft3Validator")
    drafts = [getattr(validators, name) for name in names] if named is None else [named]
    valid = next((draft for draft in drafts if draft(draft.META_SCHEMA).is_valid(schema)), None)
    return valid or drafts[0], valid is not None


def _is_integer(_: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def closed(schema: Any) -> Any:
    """A schema whose objects allow only the declared properties, unless it explicitly allows others."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = dict(schema)
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            inner[key] = {name: closed(each) for name, each in value.items()}  # a property may be named "properties"
        elif key not in ("allOf", "enum", "const", "default"):  # a part of allOf declares some of the properties
            inner[key] = closed(value)
    if isinstance(schema.get("properties"), Mapping) and "allOf" not in schema and "type" in schema:
        inner.setdefault("additionalProperties", False)
    return inner
