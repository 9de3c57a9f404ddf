"""The JSON schema of every form in which a schema or a function can be given."""

import json
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, ForwardRef, Literal, Optional, Union, get_args, get_origin

from pydantic import Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import NotRequired, ReadOnly, Required, get_type_hints, is_typeddict

from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import short_repr, shortened

_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_DATA = frozenset({"enum", "const", "default", "examples"})
_DEFINITIONS = ("$defs", "definitions")
_NOT_BESIDE_NULL = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "const"})  # can forbid null
_QUALIFIERS: tuple[Any, ...] = (Annotated, Required, NotRequired, ReadOnly)
_LIMITS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length")
_TYPES = (None, "function", "custom", "json_schema")  # of dicts that describe a function; others are a provider's
_PLAIN = (type(...), str, int, float, list, dict)  # LangChain's defaults and descriptions; others are pydantic's


def json_schema(form: Any) -> dict[str, Any]:
    """The JSON schema of a type that pydantic knows, with definitions in the place of references."""
    try:
        adapter = TypeAdapter(_with_models(form))
        if adapter.core_schema["type"] == "call":
            raise TypeError("it is a function")
        return _inlined(adapter.json_schema(schema_generator=_WithoutFieldTitles))
    except Exception as error:  # of the code of any type
        raise ConfigError(
            f"{short_repr(form)} is not a schema: give a pydantic class, a TypedDict, a dataclass or a JSON schema "
            f"({shortened(str(error).partition(chr(10))[0], 200)})"
        ) from error


def reader_of(form: Any) -> Callable[[str], Any] | None:
    """What makes an object of a type from JSON; ``None`` if it stays plain, as for a TypedDict or a JSON schema."""
    replaced: list[Any] = []
    _replaced(form, lambda each: replaced.append(each) or each)  # type: ignore[func-returns-value]
    if isinstance(form, Mapping) or any(map(is_typeddict, replaced)):
        return None
    return form.parse_raw if _is_of_pydantic_1(form) else TypeAdapter(form).validate_json


class _WithoutFieldTitles(GenerateJsonSchema):  # which repeat names, and infinite defaults are no JSON
    def default_schema(self, schema: Any) -> dict[str, Any]:
        made = super().default_schema(schema)
        try:
            json.dumps(made.get("default"), allow_nan=False)
        except ValueError:
            del made["default"]
        return made

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _with_models(form: Any) -> Any:
    """The type with classes of pydantic 2 in the place of TypedDicts, with LangChain's defaults, and of pydantic 1."""
    names: dict[Any, str] = {}
    models: dict[str, Any] = {}

    def reference(old: Any) -> ForwardRef:
        if old not in names:  # it may refer to itself
            name = names[old] = f"Model{len(names)}"
            fields: dict[str, Any] = {}
            for number, (hint, required, options) in enumerate(_fields_of(old)):
                if not required and "default" not in options:
                    options["default_factory"] = lambda: None  # so that the schema has no default
                fields[f"field_{number}"] = _replaced(hint, reference), Field(**options)
            models[name] = create_model(old.__name__, __doc__=old.__doc__, **fields)
        return ForwardRef(names[old])

    _replaced(form, reference)
    for model in models.values():
        model.model_rebuild(_types_namespace=models)
    return _replaced(form, lambda old: models[names[old]])


def _replaced(form: Any, replace: Callable[[Any], Any]) -> Any:
    """The type with others in the place of TypedDicts and of classes of pydantic 1."""
    if is_typeddict(form) or _is_of_pydantic_1(form):
        return replace(form)
    origin: Any = get_origin(form)
    args = get_args(form)
    types = args[:1] if origin is Annotated else () if origin is Literal else args
    new = tuple(_replaced(each, replace) for each in types)
    if all(part is other for part, other in zip(new, types, strict=True)):
        return form
    if origin is Annotated:
        new = (*new, *args[1:])
        return Annotated[new]
    return Union[new] if origin in (Union, UnionType) else origin[new]  # noqa: UP007


def _fields_of(form: Any) -> Iterator[tuple[Any, bool, dict[str, Any]]]:
    """The type of each key of a TypedDict, or field of pydantic 1, whether it is required, and its other options."""
    if not is_typeddict(form):
        hints = get_type_hints(form)
        for name, field in form.__fields__.items():
            info = field.field_info
            options = {limit: value for limit in _LIMITS if (value := getattr(info, limit, None)) is not None}
            options |= {"alias": field.alias, "description": info.description, "pattern": info.regex}
            options |= {} if field.required or field.default is None else {"default": field.default}
            yield Optional[hints[name]] if field.allow_none else hints[name], field.required, options  # noqa: UP045
        return
    for key, hint in get_type_hints(form, include_extras=True).items():
        required, metadata = key in form.__required_keys__, list[Any]()
        origin: Any
        while (origin := get_origin(hint)) in _QUALIFIERS:
            required = origin is Required or (required and origin is not NotRequired)
            hint, *more = get_args(hint)
            metadata = [*more, *metadata]
        # LangChain's default and description, of which one alone is the description if it is a text
        plain = [each for each in metadata if each is None or isinstance(each, _PLAIN)]
        is_described = len(plain) == 1 and isinstance(plain[0], str)
        default, description = (..., plain[0]) if is_described else (*plain, ..., None)[:2] if plain else (..., None)
        of_pydantic = (hint, *(each for each in metadata if not any(each is text for text in plain)))
        hint = Annotated[of_pydantic] if len(of_pydantic) > 1 else hint
        options = {"alias": key, "description": None if description is ... else description}
        yield hint, required, options if default is ... else {**options, "default": default}


def _is_of_pydantic_1(form: Any) -> bool:
    return isinstance(form, type) and not hasattr(form, "model_fields") and hasattr(form, "__fields__")


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of pydantic with its definitions in the place of their references, but for those inside themselves."""
    definitions, recursive = schema.pop("$defs", {}), dict[str, Any]()

    def inlined(part: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [inlined(each, inside) for each in part]
        if not isinstance(part, dict):
            return part
        rest = {key: inlined(value, inside) for key, value in part.items() if key != "$ref"}
        names = rest.get("propertyNames")
        if rest.get("type") == "object" and names and "enum" in names:  # pydantic gives numbers, which no name is
            rest["propertyNames"] = {"enum": [str(each) for each in names["enum"]]}
        name = str(part.get("$ref")).removeprefix("#/$defs/")
        if name not in definitions:
            return {**part, **rest}
        if name not in inside:
            return {**inlined(definitions[name], (*inside, name)), **rest}
        if name not in recursive:
            recursive[name] = None  # it may refer to itself
            recursive[name] = inlined(definitions[name], (name,))
        return {"$ref": part["$ref"], **rest}

    whole = inlined(schema, ())
    return {**whole, "$defs": recursive} if recursive else whole


def function_of(form: Mapping[str, Any]) -> dict[str, Any]:
    """The name, description and parameters in a tool of OpenAI, Anthropic or Bedrock, or a JSON schema with a title."""
    inner = next((form[key] for key in ("function", "json_schema", "toolSpec") if key in form), form)
    if isinstance(inner, Mapping) and "name" in inner and form.get("type") in _TYPES:
        parameters = next((inner[key] for key in ("parameters", "input_schema", "schema") if key in inner), None)
        if isinstance(inner.get("inputSchema"), Mapping):
            parameters = inner["inputSchema"].get("json")
        shared = {key: inner[key] for key in ("name", "description", "strict") if key in inner}
        return shared if parameters is None else {**shared, "parameters": parameters}
    if inner is form and "title" in form and "name" not in form:
        parameters = {key: value for key, value in form.items() if key not in ("title", "description")}
        return {"name": form["title"], "description": form.get("description", ""), "parameters": parameters}
    raise ConfigError(
        f"{short_repr(form)} is not a tool: give a function in OpenAI's or Anthropic's format, or a JSON schema with a "
        "title"
    )


def standard(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema with ``null`` among its types where OpenAPI's ``nullable`` is true."""
    plain = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            plain[key] = {name: standard(each) if isinstance(each, Mapping) else each for name, each in value.items()}
        elif isinstance(value, Mapping) and key not in _DATA:
            plain[key] = standard(value)
        elif isinstance(value, list) and key not in _DATA:
            plain[key] = [standard(each) if isinstance(each, Mapping) else each for each in value]
    if plain.pop("nullable", False) is not True:
        return plain
    if "type" in plain and plain.keys().isdisjoint(_NOT_BESIDE_NULL):
        kinds = plain["type"] if isinstance(plain["type"], list) else [plain["type"]]
        values = {"enum": [*plain["enum"], None]} if "enum" in plain else {}
        return {**plain, "type": [*kinds, "null"], **values}
    definitions = {key: plain.pop(key) for key in _DEFINITIONS if key in plain}
    return {"anyOf": [plain, {"type": "null"}], **definitions}
