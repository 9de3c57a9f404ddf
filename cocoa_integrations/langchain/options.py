"""The options of a call, and the keyword arguments that LangChain adds to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo

from cocoa_integrations._shared.chat_template import ChatTemplateOptions
from cocoa_integrations._shared.detail import Detail
from cocoa_integrations._shared.settings import DecodeSettings

FRAMEWORK = frozenset({"tags", "metadata", "run_name", "run_id", "stream", "ls_structured_output_format"})
"""Keyword arguments of a call that belong to LangChain."""

TOOLS = frozenset({"tools", "tool_choice", "functions", "function_call", "response_format"})
"""Keyword arguments of a call that ask for tools or structured output."""

TOOL_DETAILS = frozenset({"strict", "parallel_tool_calls"})
"""Keyword arguments that control how tools are called. They have no effect without tools."""

INSTEAD = {
    "model_id": "give model, or use from_model_id",
    "pipeline_kwargs": "give the decode settings themselves, e.g. max_new_tokens=64",
    "pipeline": "give engine=CocoaEngine(pipeline.model, pipeline.tokenizer), or model and its loading options",
}
"""Options of LangChain's other local models, and what to pass instead."""


class CallOptions(DecodeSettings):
    """The options that both the constructor and a single call take."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Time limit for an answer in seconds, from the start of the call. An answer that takes longer raises
    ``GenerationTimeoutError``. ``None``: no limit."""

    stream_usage: bool = True
    """Whether the last chunk of a stream has the token counts of the answer."""

    logprobs: bool | None = None
    """Whether answers carry the log-probabilities of their tokens, in the format of OpenAI's ``logprobs``. ``None``: in
    full metadata only, and wherever ``top_logprobs`` asks for the most probable tokens at each position."""

    risk_metadata: Detail | None = None
    """How much of the risk the answers that a call returns carry. ``"full"``: everything, in ``cocoa_spans`` and in
    ``cocoa_risk``. ``"compact"``: one report in which nothing is written twice, for messages that are stored.
    ``"none"``: no report. ``None``: compact for the messages of a chat model's ``invoke``, ``batch`` and ``generate``,
    which agents keep in their state, and full for streams and text models. Callbacks always receive everything."""

    logits_processor: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Logits processors of transformers, one or a list. Answers are then not cached, because a processor cannot be part
    of a cache key."""

    stopping_criteria: Sequence[Callable[..., Any]] = Field(default=(), exclude=True, repr=False)
    """Stopping criteria of transformers, one or a list. Answers are then not cached."""

    @field_validator("logits_processor", "stopping_criteria", mode="before")
    @classmethod
    def _as_tuple(cls, given: Any) -> tuple[Any, ...]:
        # transformers' LogitsProcessorList is itself callable, so lists are checked first
        return tuple(given) if isinstance(given, Sequence) else (given,)


class ChatCallOptions(ChatTemplateOptions, CallOptions):
    """The options that both the constructor and a single call of a chat model take."""

    source: Sequence[str] | Sequence[tuple[int, int]] = Field(default=(), exclude=True, repr=False)
    """Passages of the prompt, as texts that it contains or as ranges of its characters after the chat template. Every
    span then has ``passage_attention``: the attention of the span on each of them."""


PER_CALL = frozenset(ChatCallOptions.model_fields)
"""The names of the options of a call of a chat model."""


def without_unset(kind: type[CallOptions], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that are ``None``. They are kept if ``None`` is a valid value of the option."""
    fields = kind.model_fields
    return {
        name: value
        for name, value in options.items()
        # None is a value of device_map (the CPU), though not its default
        if value is not None or name not in fields or name == "device_map" or default_of(fields[name]) is None
    }


def default_of(field: FieldInfo) -> Any:
    """The default of a field."""
    return field.get_default(call_default_factory=True)
