"""The options of the LLM: which model answers, here or at a server, and how.

A call takes decode settings, and the keywords of transformers' ``generate`` that are supported. No option is ignored
silently: an unsupported keyword raises an error, unless its value has no effect.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transformers
from pydantic import ValidationError

from cocoa_engine import CocoaConfig, ConfigError
from cocoa_engine.errors import explain
from cocoa_engine.integration import Criterion, Processor, safe_logger, short_repr, usable
from cocoa_integrations._shared.options import (
    OPTIONS,
    REFUSALS,
    ChatTemplateOptions,
    is_without_effect,
    refuse_unknown,
    refused,
    split_settings,
)
from cocoa_integrations.chat_service.options import AnswerOptions
from cocoa_integrations.tool_calling import ToolRequest

logger = safe_logger(__name__)


def _checked(name: str, kind: Callable[[Any], Any]) -> Callable[[Any], list[Processor]]:
    """Makes the processor of an option, whose errors name it: some values are checked only when it is called."""
    return lambda value: [usable(name)(kind(value))]


_PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "no_repeat_ngram_size": _checked("no_repeat_ngram_size", transformers.NoRepeatNGramLogitsProcessor),
    "bad_words_ids": _checked("bad_words_ids", transformers.NoBadWordsLogitsProcessor),
    "suppress_tokens": _checked("suppress_tokens", transformers.SuppressTokensLogitsProcessor),
    "logits_processor": lambda value: value if isinstance(value, Sequence) else [value],
}
_CRITERIA: dict[str, Callable[[Any], Any]] = {
    "stopping_ids": lambda token_ids: [transformers.EosTokenCriteria(list(token_ids))],
    "eos_token_id": lambda token_ids: [transformers.EosTokenCriteria(token_ids)],
    "stopping_criteria": lambda value: value if isinstance(value, Sequence) else [value],
}
_INSTEAD = {
    **{name: instead for name, (_, instead) in REFUSALS.items()},
    "streamer": "use stream_complete or stream_chat",
    "tools": "completions do not call tools; use chat messages, see chat_with_tools and FunctionAgent",
}
BESIDE_SETTINGS = (*_PROCESSORS, *_CRITERIA)
"""The options that become logits processors and stopping criteria rather than decode settings."""
SUPPORTED = (*BESIDE_SETTINGS, "do_sample", "stop_strings", "pad_token_id")
"""The supported options besides the decode settings."""


TOOL_OPTIONS = frozenset({"tools", "tool_choice", "strict", "parallel_tool_calls", "response_format"})
"""Options of a chat call that ask for tools or an answer in JSON."""


def decode_settings(config: CocoaConfig, options: Mapping[str, Any]) -> CocoaConfig:
    """Settings, changed by the options of a call.

    ``do_sample`` has the meaning of transformers: ``False`` sets ``temperature`` to 0; ``True`` without a temperature
    sets it to 1.0. ``pad_token_id`` is accepted and has no effect. A transformers keyword that is ``None`` counts as
    not given.
    """
    if not isinstance(options, Mapping):  # possible for generate_kwargs
        raise ConfigError(f"generate_kwargs takes a dict of options, not {type(options).__name__}.")
    settings, rest = split_settings(options, config.method)
    unsupported = {*_INSTEAD, *transformers.GenerationConfig().to_dict()} - {*SUPPORTED}
    refuse_unknown(rest.keys() - unsupported, SUPPORTED, what="CocoaLLM")
    asked = {name: value for name, value in rest.items() if not is_without_effect(name, value)}
    if unusable := {name: value for name, value in asked.items() if name in unsupported}:
        otherwise = f"supported are {', '.join(SUPPORTED)} and the fields of CocoaConfig"
        raise ConfigError(refused(unusable, {name: _INSTEAD.get(name, otherwise) for name in unusable}))
    if "stop_strings" in asked:
        settings["stop"] = asked["stop_strings"]
    if asked.get("do_sample"):
        settings.setdefault("temperature", config.temperature or 1.0)
        if settings["temperature"] == 0:
            raise ConfigError("do_sample=True and temperature=0 contradict each other; leave one out.")
    elif "do_sample" in asked:
        if settings.get("temperature"):
            logger.warning("temperature=%s has no effect with do_sample=False.", settings["temperature"])
        settings["temperature"] = 0.0
    return config.replace(**settings)


def processors_and_criteria(options: Mapping[str, Any]) -> tuple[list[Processor], list[Criterion]]:
    """The logits processors and the stopping criteria that options of a call ask for."""

    def made(makers: Mapping[str, Callable[[Any], Any]]) -> list[Any]:
        results: list[Any] = []
        for name, make in makers.items():
            if (value := options.get(name)) is not None:
                with usable(f"{name}={short_repr(value)}"):
                    results += make(value)
        return results

    return made(_PROCESSORS), made(_CRITERIA)


def split_tools(options: Mapping[str, Any]) -> tuple[ToolRequest, dict[str, Any]]:
    """Split the options of a chat call into a request for tools or structured output, and the rest."""
    asked = {name: value for name, value in options.items() if name in TOOL_OPTIONS}
    rest = {name: value for name, value in options.items() if name not in TOOL_OPTIONS}
    return ToolRequest.of(asked.pop("tools", None), **asked), rest


class CallOptions(AnswerOptions, ChatTemplateOptions):
    """The options besides the settings that both the constructor and a single call take, except the time limit."""

    def _of_call(self, options: Mapping[str, Any], *, is_chat: bool) -> "tuple[CallOptions, dict[str, Any]]":
        """These options with those of a call, and the rest of the options of the call.

        For options that cannot be ``None``, ``None`` counts as not given.
        """
        fields = CallOptions.model_fields
        names = fields.keys() - {"timeout", *(() if is_chat else OPTIONS)}
        values = {name: getattr(self, name) for name in fields}
        values |= {
            name: options[name]
            for name in names & options.keys()
            if options[name] is not None or name == "enable_thinking"
        }
        try:
            called = CallOptions(**values)
        except ValidationError as error:
            raise ConfigError(f"a call of CocoaLLM: {explain(error)}") from None
        return called, {name: value for name, value in options.items() if name not in names}
