"""A request for tool calls, or for JSON with a schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cocoa_engine.errors import ConfigError, unknown
from cocoa_engine.integration import short_repr, written
from cocoa_integrations.tool_calling.schema_forms import standard


@dataclass(frozen=True)
class ToolRequest:
    """The tools and the structured output that one call asks for. Create it with :meth:`of`."""

    tools: tuple[dict[str, Any], ...] = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    required: bool = False  # whether a tool must be called
    allowed: tuple[str, ...] | None = None  # the names of the tools that can be called; None: all
    strict: bool = False  # whether calls that the model decides to make are also held to the schema of their tool
    parallel: bool | None = None  # whether an answer may have several calls; None: only if no call is required
    schema: dict[str, Any] | None = None  # of an answer in text
    described: bool = True  # whether the schema is part of the prompt
    checked: bool = True  # whether an answer that does not fit the schema is an error; else the caller validates it

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> "ToolRequest":
        """Create a request from the options of a call, which have OpenAI's meanings; others are a ``ConfigError``.

        ``tool_choice`` may also be ``"any"``, ``True``, or the name of a tool. A ``{"type": "json_object"}`` may have a
        ``"schema"``, which is not part of the prompt. With ``"strict": False`` next to it the caller validates.
        """
        checked = tuple(_tool(number, tool) for number, tool in enumerate(tools or ()))
        names = [tool["function"]["name"] for tool in checked]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"tools: two tools have the name {short_repr(twice)}; give each its own")
        mode, allowed = _choice(tool_choice, names)
        if mode == "required" and not names:
            raise ConfigError(f"tool_choice={short_repr(tool_choice)} requires tools, but none are given")
        choice = (() if mode == "none" else checked, mode == "required", allowed)
        return cls(*choice, bool(strict), parallel_tool_calls, *_schema(response_format))

    def __bool__(self) -> bool:
        return bool(self.tools) or self.schema is not None

    @property
    def enforced(self) -> bool:
        return self.schema is not None or (bool(self.tools) and (self.required or self.strict))

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        functions = tuple(tool["function"] for tool in self.tools)
        return tuple(each for each in functions if self.allowed is None or each["name"] in self.allowed)

    @property
    def name(self) -> str | None:
        return self.allowed[0] if self.required and self.allowed and len(self.allowed) == 1 else None

    @property
    def tool_choice(self) -> str | dict[str, Any]:
        mode = "required" if self.required else "auto"
        if self.allowed is None:
            return mode
        tools = [{"type": "function", "function": {"name": name}} for name in self.allowed]
        return tools[0] if self.name else {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    @property
    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {}
        if self.tools:
            strict = {"strict": True} if self.strict else {}
            parameters["tools"] = [{**tool, "function": {**tool["function"], **strict}} for tool in self.tools]
            parameters["tool_choice"] = self.tool_choice
            if self.parallel is not None:
                parameters["parallel_tool_calls"] = self.parallel
        if self.schema is not None:
            schema = {"schema": self.schema, "strict": self.checked}
            described = {"type": "json_schema", "json_schema": {"name": "answer", **schema}}
            parameters["response_format"] = described if self.described else {"type": "json_object", **schema}
        return parameters


def _tool(number: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(
            f'tools: number {number} is not {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}; '
            "a local model can call functions only"
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    for name, value, kinds, takes in (
        ("parameters", parameters, Mapping, "a JSON schema"),
        ("description", function.get("description"), (str, type(None)), "a text"),
        ("strict", function.get("strict"), (bool, type(None)), "true or false"),
    ):
        if not isinstance(value, kinds):
            raise ConfigError(f"tools: {name} of number {number} takes {takes}, not {short_repr(value)}")
    written({"description": function.get("description"), "parameters": parameters})  # refuses what JSON cannot hold
    parameters = standard(parameters)
    kind = parameters.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise ConfigError(f"tools: parameters of number {number} have the type {short_repr(kind)}, not object")
    parameters["type"] = "object"  # whatever else a $ref or anyOf allows
    # templates show a function as it is, in the order of its keys
    undescribed = {} if "description" in function else {"name": function["name"], "description": ""}
    return {"type": "function", "function": {**undescribed, **function, "parameters": parameters}}


def _choice(tool_choice: Any, names: Sequence[str]) -> tuple[str, tuple[str, ...] | None]:
    """``"auto"``, ``"none"`` or ``"required"``, and the names of the tools that can be called if not all can."""
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        inner = tool_choice.get("allowed_tools", tool_choice)
        mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
        if mode not in ("auto", "required") or not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
            raise ConfigError(
                'tool_choice: allowed_tools takes {"mode": "auto" or "required", "tools": [{"type": "function", '
                f'"function": {{"name": ...}}}}, ...]}} (got {short_repr(inner)})'
            )
        allowed = tuple(_named(tool, names) for tool in tools)
        return mode, tuple(name for name in names if name in allowed)
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") not in ("any", "auto", "none", "required"):
        return "required", (_named(tool_choice, names),)
    choice = tool_choice.get("type") if isinstance(tool_choice, Mapping) else tool_choice
    if choice in names:
        return "required", (str(choice),)
    if choice is None or choice is False or choice in ("auto", "none"):
        return choice or "auto", None
    if choice is True or choice in ("any", "required"):
        return "required", None
    raise ConfigError(
        f"tool_choice: {unknown([str(choice)], [*names, 'auto', 'any', 'required', 'none'], what='tool')}"
    )


def _named(tool: Any, names: Sequence[str]) -> str:
    """The name of the tool that a dict names."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if name is None:
        raise ConfigError(f"tool_choice: a dict names a function or a type (got {short_repr(tool)})")
    if name not in names:
        raise ConfigError(f"tool_choice: {unknown([str(name)], names, what='tool')}")
    return str(name)


def _schema(response_format: Any) -> tuple[dict[str, Any] | None, bool, bool]:
    """The schema of the answer, whether it is part of the prompt, and whether another answer is an error."""
    options = response_format if isinstance(response_format, Mapping) else {"type": response_format}
    kind, schema = options.get("type"), options.get("schema")
    if response_format is None or kind == "text":
        return None, False, False
    if kind == "json_object" and (schema is None or isinstance(schema, Mapping)):
        return _json(schema or {"type": "object"}), False, options.get("strict") is not False
    inner = options.get("json_schema")
    if kind == "json_schema" and isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping):
        return _json(inner["schema"]), True, inner.get("strict") is not False
    raise ConfigError(
        'response_format takes {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}, '
        f'{{"type": "json_object"}} or {{"type": "text"}} (got {short_repr(response_format)})'
    )


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    written(schema)  # refuses what JSON cannot hold
    return standard(schema)
