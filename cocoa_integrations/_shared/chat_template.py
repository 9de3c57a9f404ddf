"""The options of the chat template, and what the rendered prompt says about reasoning."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, field_validator

from cocoa_engine import CocoaEngine, ConfigError, PromptError
from cocoa_engine.errors import ChatTemplateError
from cocoa_engine.integration import require_unicode
from cocoa_integrations._shared.reasoning import OPENING, ReasoningTags

_OF_THE_ADAPTER = {
    "tools": "bind the tools to the model, or give the option tools",
    "add_generation_prompt": "give the option continue_final_message",
    "continue_final_message": "give it as an option of its own",
    "tokenize": "leave it out",
    "return_dict": "leave it out",
    "return_tensors": "leave it out",
}
"""Arguments of ``apply_chat_template`` that are not variables of a template, and what to do instead."""


class ChatTemplateOptions(BaseModel):
    """The options of the chat template that both the constructor and a single call take."""

    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables for the chat template, such as ``documents``."
    )
    enable_thinking: bool | None = Field(
        None,
        description="Whether the model reasons before it answers, for chat templates with a variable of this name, "
        "such as that of Qwen3. ``None``: as the template decides. It takes precedence over ``chat_template_kwargs``.",
    )
    continue_final_message: bool = Field(
        False,
        description="Continue the last message, which must be an assistant's, instead of beginning a new one. The "
        "answer is the continuation only.",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if wrong := [f"{name} ({_OF_THE_ADAPTER[name]})" for name in variables if name in _OF_THE_ADAPTER]:
            raise ValueError(f"chat_template_kwargs takes variables of the template, not {', '.join(wrong)}")
        return variables


OPTIONS = frozenset(ChatTemplateOptions.model_fields)
"""The names of the options."""


def entry_of(
    role: str,
    texts: Iterable[str | None],
    *,
    name: str | None = None,
    calls: Iterable[tuple[str | None, str, Any]] = (),
    reasoning: str = "",
    answers: str | None = None,
) -> dict[str, Any]:
    """A message as a chat template takes it. Metadata of earlier answers, such as risk reports, never reach the prompt.

    Args:
        role: its role.
        texts: its text, and that of each invalid call.
        name: its name; for the result of a tool, that of the tool.
        calls: its tool calls: the id, the name and the arguments as a dict.
        reasoning: the reasoning of an assistant.
        answers: for the result of a tool, the id of the call.
    """
    optional = {
        "name": name,
        "tool_calls": [
            {"type": "function", "id": call_id, "function": {"name": called, "arguments": arguments}}
            for call_id, called, arguments in calls
        ],
        "reasoning_content": reasoning,
    }
    return {
        "role": role,
        "content": "\n".join(filter(None, texts)),
        **{key: value for key, value in optional.items() if value},
        **({} if answers is None else {"tool_call_id": answers}),
    }


def require_text(chat: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a conversation without text, or with a lone surrogate."""
    for number, entry in enumerate(chat):
        require_unicode(entry["content"], f"content of message {number} ({entry['role']})")
    if not any(entry["content"].strip() or entry.get("tool_calls") for entry in chat):
        raise PromptError("the conversation is empty; give at least one message with text")


def template_options(source: ChatTemplateOptions) -> ChatTemplateOptions:
    """The options alone, of an adapter that has them as fields."""
    return ChatTemplateOptions(**{name: getattr(source, name) for name in OPTIONS})


def template_kwargs(
    options: ChatTemplateOptions, chat: Sequence[Mapping[str, Any]], engine: CocoaEngine
) -> dict[str, Any]:
    """The arguments of the chat template for a conversation."""
    kwargs = dict(options.chat_template_kwargs)
    if options.enable_thinking is not None:
        if engine.has_chat_template and not names(engine, "enable_thinking"):
            raise ConfigError(
                f"the chat template of {engine.model_name} has no variable enable_thinking, so the option would have "
                "no effect; leave it out, or give the template's own variable in chat_template_kwargs"
            )
        kwargs["enable_thinking"] = options.enable_thinking
    if options.continue_final_message:
        role = chat[-1]["role"] if chat else None
        if role != "assistant":
            raise PromptError(
                "continue_final_message continues an assistant message, but the last message has the role "
                f"{role!r}; add the beginning of the answer as an assistant message, or leave the option out"
            )
        kwargs |= {"continue_final_message": True, "add_generation_prompt": False}
    return kwargs


def given_options(options: ChatTemplateOptions) -> dict[str, Any]:
    """The options that differ from their defaults, by name."""
    defaults = ChatTemplateOptions()
    return {
        name: getattr(options, name) for name in sorted(OPTIONS) if getattr(options, name) != getattr(defaults, name)
    }


def names(engine: CocoaEngine, name: str) -> bool:
    """Whether the source of the chat template contains a name."""
    return name in str(getattr(engine.tokenizer, "chat_template", None))


def with_reasoning(chat: Sequence[Mapping[str, Any]], engine: CocoaEngine, tags: ReasoningTags) -> list[dict[str, Any]]:
    """Copies of the messages. ``reasoning_content`` is left out if the chat template does not read it."""
    reads = tags.is_block or any(names(engine, field) for field in ("reasoning_content", "thinking"))
    copies = [dict(message) for message in chat]
    for message in copies:
        if not reads:
            message.pop("reasoning_content", None)
        elif tags.is_alone and message["content"] and message.get("tool_calls"):
            thought = message.pop("reasoning_content", "")
            message["content"] = "\n\n".join(filter(None, [thought, message["content"]]))
    return copies


def with_blocks(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ``reasoning_content`` as the first block of the content."""
    copies = [dict(message) for message in chat]
    for message in copies:
        if thought := message.pop("reasoning_content", ""):
            message["content"] = blocks_of(thought, message["content"])
    return copies


def blocks_of(thought: str, text: str) -> list[dict[str, str]]:
    """The content of an answer with reasoning, as blocks."""
    return [{"type": "thinking", "thinking": thought}, {"type": "text", "text": text}]


def ends_inside_reasoning(
    engine: CocoaEngine,
    chat: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    tags: ReasoningTags | None = None,
) -> bool:
    """Whether the rendered prompt ends inside the reasoning of the answer.

    The text after the last header of an assistant is what the prompt has more than the rendered messages before it.
    Tags in those messages do not count.
    """
    tags = tags or ReasoningTags()
    last = [*chat[-1:]] if kwargs.get("continue_final_message") else []
    shown = json.dumps(chat[: len(chat) - len(last)], default=str)
    opening, closing = tags.opening.strip(), tags.closing.strip()
    earlier = json.loads(shown.replace("<" if "<" in opening else json.dumps(opening)[1:-1], ""))
    try:
        prompt = engine.render_chat([*earlier, *last], **kwargs)
    except ChatTemplateError:  # the call itself will raise it
        return False
    if opening not in prompt:
        return False
    before = ""
    if earlier:
        try:
            plain = {**kwargs, "add_generation_prompt": False, "continue_final_message": False}
            before = engine.render_chat(earlier, **plain)
        except ChatTemplateError:
            return prompt.rstrip().endswith(opening)
    pairs = enumerate(zip(prompt, before, strict=False))
    shared = len(before) if prompt.startswith(before) else next((at for at, (char, other) in pairs if char != other), 0)
    begun = prompt[shared:]
    return opening in begun.rpartition(closing)[2]


def text_ends_inside_reasoning(prompt: str) -> bool:
    """Whether a prompt that no chat template rendered ends with the opening tag."""
    return prompt.rstrip().endswith(OPENING)
