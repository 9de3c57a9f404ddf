"""A request for chat completions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_engine.model.text import block_text
from cocoa_engine.safe_text import short_repr, shortened
from cocoa_integrations._shared.chat_template import ChatTemplateOptions, names
from cocoa_integrations.server.errors import bad_request, of_parameter
from cocoa_integrations.server.protocol.decoding import DecodingRequest, Flag, Several, Whole, written_size
from cocoa_integrations.server.settings import REFUSED, Refused, ServerSettings, each
from cocoa_integrations.tool_calling import ToolRequest, invalid_call_text, object_of

NOT_VARIABLES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"} | {
    "messages"
}
"""Names in ``chat_template_kwargs`` that are options of transformers, such as another template."""

_TEXT_ONLY = "the model reads and writes text only"

REFUSED_IN_CHAT: Refused = {
    **REFUSED,
    **each("audio", _TEXT_ONLY),
    **each("modalities", _TEXT_ONLY, ["text"], []),
    **each("functions", "give tools", []),
    **each("function_call", "give tool_choice"),
    **each("web_search_options", "the server does not search the web"),
    **each("moderation", "the server does not moderate"),
    **each("store", "the server stores no answers", False),
    **each("service_tier", "leave it out", "auto", "default"),
    **each("verbosity", "ask for it in a message", "medium"),
    **each("prompt suffix", "give messages alone", "", []),
    **each("echo", "give messages alone", False),
    **each("add_special_tokens", "the chat template adds them", False),
}


NOT_IN_MESSAGES = {"images": _TEXT_ONLY, "audio": _TEXT_ONLY, "function_call": "give tool_calls"}
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


class ChatRequest(DecodingRequest):
    """The body of a request for chat completions."""

    refused: ClassVar[Refused] = REFUSED_IN_CHAT
    lengths: ClassVar[Mapping[str, tuple[str, str]]] = {
        **DecodingRequest.lengths,
        "messages": ("max_messages", ""),
        "tools": ("max_tools", ""),
    }
    in_prompt: ClassVar[tuple[str, ...]] = (
        *("messages", "tools", "response_format", "chat_template_kwargs", "reasoning_effort"),
    )
    messages: Several[Message] = Field(min_length=1)
    max_completion_tokens: Whole | None = None
    logprobs: Flag | None = Field(None, description="Also the tokens. An explicit false leaves the risk out there.")
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    tools: Several[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Flag = False
    add_generation_prompt: Flag | None = None
    reasoning_effort: str | None = None

    def check(self, limits: ServerSettings) -> None:
        """Refuse what contradicts itself or is above a limit; see :meth:`DecodingRequest.read`."""
        super().check(limits)
        if self.add_generation_prompt is self.continue_final_message:
            raise bad_request(
                "add_generation_prompt is the contrary of continue_final_message; leave it out", "add_generation_prompt"
            )
        if (self.top_logprobs or self.cocoa.top_logprobs) and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")

    def size_of(self, name: str) -> int:
        """The number of characters that a parameter adds to the prompt."""
        return size_of_messages(self.messages) if name == "messages" else super().size_of(name)

    def tool_request(self) -> ToolRequest:
        """The tools and the response format.

        Raises:
            ApiError: one of them is not valid. It names the parameter.
        """
        try:
            return ToolRequest.of(
                self.tools,
                tool_choice=self.tool_choice,
                strict=any(bool(_function(tool).get("strict")) for tool in self.tools or ()),
                parallel_tool_calls=self.parallel_tool_calls,
                response_format=self.response_format,
            )
        except ConfigError as error:
            named = re.match("response_format|tool_choice|tools", str(error))
            raise bad_request(str(error), named[0] if named else "tools" if self.tools else "response_format") from None

    def template_options(self, engine: CocoaEngine) -> ChatTemplateOptions:
        """The options of the chat template.

        ``reasoning_effort`` is the variable of this name; ``"none"`` is ``enable_thinking=False`` for other templates.

        Raises:
            ApiError: they are not variables of a template. A request must not bring a template of its own, either.
        """
        variables = template_variables(self.chat_template_kwargs, engine)
        if self.reasoning_effort is not None:
            if names(engine, "reasoning_effort"):
                variables["reasoning_effort"] = self.reasoning_effort
            elif self.reasoning_effort == "none" and names(engine, "enable_thinking"):
                variables["enable_thinking"] = False
            else:
                raise bad_request(
                    f"reasoning_effort={short_repr(self.reasoning_effort)} is not supported: the chat template of "
                    f"{engine.model_name} has no variable for it",
                    "reasoning_effort",
                )
        return ChatTemplateOptions(chat_template_kwargs=variables, continue_final_message=self.continue_final_message)


def entries_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them, with ``tool_calls`` whose arguments are dicts.

    Raises:
        ApiError: a message has other content than text. It names the message.
    """
    named: dict[str, str] = {}
    entries = [_entry(f"messages[{number}]", message, named) for number, message in enumerate(messages)]
    if not any(entry["content"].strip() or entry.get("tool_calls") for entry in entries):
        raise bad_request("the conversation is empty; give at least one message with text", "messages")
    return entries


def size_of_messages(messages: Sequence[Message]) -> int:
    """The number of characters that messages add to a prompt: of what a template is given of them, and of no more."""
    return sum(written_size(value) for entry in entries_of(messages) for value in entry.values())


def template_variables(given: Mapping[str, Any] | None, engine: CocoaEngine) -> dict[str, Any]:
    """``chat_template_kwargs`` of a request.

    Variables that the template does not have are accepted if their value is false or empty: some clients send
    ``enable_thinking=False`` to every model.

    Raises:
        ApiError: they are not variables of a template; or the model's template does not have one of them, whose value
            is neither false nor empty.
    """
    variables = dict(given or {})
    if wrong := [name for name in variables if name in NOT_VARIABLES]:
        raise bad_request(
            f"chat_template_kwargs takes variables of the model's chat template, not {', '.join(wrong)}; tools and "
            "continue_final_message are parameters of the request",
            "chat_template_kwargs",
        )
    for name, value in variables.items():
        if value and engine.has_chat_template and not names(engine, name):
            param = f"chat_template_kwargs.{shortened(name, 200)}"
            why = f"the chat template of {engine.model_name} has no variable of this name"
            raise bad_request(f"{param}={short_repr(value)} has no effect: {why}", param)
    return variables


def _entry(param: str, message: Message, named: dict[str, str]) -> dict[str, Any]:
    """A message; ``named`` has the names of the calls before it, by their ids."""
    for name, instead in NOT_IN_MESSAGES.items():
        if getattr(message, name):
            raise bad_request(f"{param}.{name} is not supported; {instead}", f"{param}.{name}")
    role = "system" if message.role == "developer" else message.role  # which templates do not know
    entry: dict[str, Any] = {"role": role, "content": _text(message.content, f"{param}.content")}
    if message.name:
        entry["name"] = message.name
    if role == "tool":
        entry["tool_call_id"] = message.tool_call_id or ""
        if not message.name and entry["tool_call_id"] in named:
            entry["name"] = named[entry["tool_call_id"]]
    if role == "assistant":
        calls = [
            _call(call, f"{param}.tool_calls[{position}]") for position, call in enumerate(message.tool_calls or ())
        ]
        valid = [call for call in calls if isinstance(call, dict)]
        named |= {call["id"]: call["function"]["name"] for call in valid}
        # a call that is not valid is text, as the model wrote it
        broken = [call for call in calls if isinstance(call, str)]
        entry["content"] = "\n".join([*filter(None, [entry["content"]]), *broken])
        if valid:
            entry["tool_calls"] = valid
        if message.reasoning_content:
            entry["reasoning_content"] = message.reasoning_content
    return entry


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


def _call(call: Mapping[str, Any], param: str) -> dict[str, Any] | str:
    """A call of an earlier answer, or its text if its arguments are not JSON."""
    function = _function(call)
    name, written = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise bad_request(f'{param} is not {{"id", "type": "function", "function": {{"name", "arguments"}}}}', param)
    arguments = written if isinstance(written, dict) else object_of(str(written or "{}"))
    if arguments is None:
        return invalid_call_text(name, str(written))
    return {"type": "function", "id": str(call.get("id") or ""), "function": {"name": name, "arguments": arguments}}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}
