"""The messages of a request, and the variables of its chat template."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from cocoa_engine import CocoaEngine
from cocoa_engine.integration import block_text, short_repr, shortened
from cocoa_integrations._shared.options import entry_of, names, require_text
from cocoa_integrations.server.errors import bad_request, of_parameter
from cocoa_integrations.server.parameters import TEXT_ONLY
from cocoa_integrations.tool_calling import invalid_call_text, object_of

Element = TypeVar("Element")
Several = Annotated[list[Element], Field(fail_fast=True)]
"""A list whose first wrong element is its only error. By default pydantic makes an error of a kilobyte for each."""

NOT_VARIABLES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"} | {
    "messages"
}
"""Names in ``chat_template_kwargs`` that are options of transformers, such as another template."""

NOT_IN_MESSAGES = {"images": TEXT_ONLY, "audio": TEXT_ONLY, "function_call": "give tool_calls"}
"""Fields of messages that are not supported, and what to do instead."""


class Message(BaseModel):
    """A message of a conversation. Unknown fields are dropped, such as the risk of an answer that is sent back."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_calls: Several[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    images: Any = None
    audio: Any = None
    function_call: Any = None


def entries_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them, with ``tool_calls`` whose arguments are dicts.

    An :class:`~.errors.ApiError` names a message with other content than text.
    """
    called: dict[str, str] = {}
    entries = [_entry(f"messages[{number}]", message, called) for number, message in enumerate(messages)]
    with of_parameter("messages"):
        require_text(entries)
    return entries


def _entry(param: str, message: Message, called: dict[str, str]) -> dict[str, Any]:
    """A message; ``called`` has the names of the calls before it, by their ids."""
    for name, instead in NOT_IN_MESSAGES.items():
        if getattr(message, name):
            raise bad_request(f"{param}.{name} is not supported; {instead}", f"{param}.{name}")
    texts = [_text(message.content, f"{param}.content")]
    if message.role == "tool":
        call_id = message.tool_call_id or ""
        return entry_of("tool", texts, name=message.name or called.get(call_id), answers=call_id)
    if message.role != "assistant":
        return entry_of(message.role, texts, name=message.name)
    calls = []
    for position, call in enumerate(message.tool_calls or ()):
        where, function = f"{param}.tool_calls[{position}]", function_of(call)
        called_name, written = function.get("name"), function.get("arguments")
        if not isinstance(called_name, str) or not called_name:
            form = '{"id", "type": "function", "function": {"name", "arguments"}}'
            raise bad_request(f"{where} is not {form}", where)
        arguments = written if isinstance(written, dict) else object_of(str(written or "{}"))
        if arguments is None:  # a call that is not valid is text, as the model wrote it
            texts.append(invalid_call_text(called_name, str(written)))
            continue
        call_id = str(call.get("id") or "")
        called[call_id] = called_name
        calls.append((call_id, called_name, arguments))
    return entry_of("assistant", texts, name=message.name, calls=calls, reasoning=message.reasoning_content or "")


def _text(content: Any, param: str) -> str:
    """The text of a message: its content, or the concatenation of its parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{param} takes a text or a list of parts, not {short_repr(content)}", param)
    texts = []
    for position, part in enumerate(content):
        with of_parameter(where := f"{param}[{position}]"):
            texts.append(block_text(part, where))
    return "".join(texts)


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool or a call; empty if it has none."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def template_variables(values: Mapping[str, Any] | None, engine: CocoaEngine) -> dict[str, Any]:
    """``chat_template_kwargs`` of a request, which are variables of the model's template.

    Others are accepted if their value is false or empty: some clients send ``enable_thinking=False`` to every model.
    """
    variables, param = dict(values or {}), "chat_template_kwargs"
    if wrong := [name for name in variables if name in NOT_VARIABLES]:
        message = f"{param} takes variables of the model's chat template, not {', '.join(wrong)}; tools and "
        raise bad_request(f"{message}continue_final_message are parameters of the request", param)
    for name, value in variables.items():
        if value and engine.has_chat_template and not names(engine, name):
            param = f"{param}.{shortened(name, 200)}"
            why = f"the chat template of {engine.model_name} has no variable of this name"
            raise bad_request(f"{param}={short_repr(value)} has no effect: {why}", param)
    return variables
