"""The options of a call."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from cocoa_integrations._shared.chat_template import ChatTemplateOptions
from cocoa_integrations._shared.settings import DecodeSettings
from cocoa_integrations.chat_service.options import AnswerOptions

FRAMEWORK = frozenset({"tags", "metadata", "run_name", "run_id", "stream", "ls_structured_output_format"})
"""Keyword arguments of a call that belong to LangChain."""

TOOLS = frozenset({"tools", "tool_choice", "response_format"})
"""Keyword arguments of a call that ask for tools or structured output."""

TOOL_DETAILS = frozenset({"strict", "parallel_tool_calls"})
"""Keyword arguments that control how tools are called. They have no effect without tools."""


class CallOptions(AnswerOptions, DecodeSettings):
    """The options that both the constructor and a single call take, besides those of ``AnswerOptions``."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    stream_usage: bool = True
    """Whether the last chunk of a stream has the token counts of the answer."""

    logits_processor: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Logits processors of transformers, one or a list. Answers are then not cached, because a processor cannot be part
    of a cache key."""

    stopping_criteria: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Stopping criteria of transformers, one or a list. Answers are then not cached."""

    @field_validator("logits_processor", "stopping_criteria", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> tuple[Any, ...]:
        # transformers' LogitsProcessorList is itself callable, so lists are checked first
        return tuple(value) if isinstance(value, Sequence) else (value,)


class ChatCallOptions(ChatTemplateOptions, CallOptions):
    """The options that both the constructor and a single call of a chat model take."""

    source: Sequence[str] | Sequence[tuple[int, int]] = Field(default=(), exclude=True, repr=False)
    """Passages of the prompt, as texts that it contains or as ranges of its characters after the chat template (texts
    only for a model at a server). Every span then has ``passage_attention``: its attention on each of them."""


PER_CALL = frozenset(ChatCallOptions.model_fields)
"""The names of the options of a call of a chat model."""
