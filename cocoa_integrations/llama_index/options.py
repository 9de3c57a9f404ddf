"""The options of a call: decode settings, and the keywords of transformers' ``generate`` that are supported.

No option is ignored silently. An unsupported keyword raises an error, unless its value has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llama_index.core.bridge.pydantic import ValidationError
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from cocoa_engine import CocoaConfig, ConfigError
from cocoa_engine.logs import safe_logger
from cocoa_engine.messages import explain
from cocoa_engine.model.callables import Criterion, Processor
from cocoa_engine.model.generation_config import OptionProcessor, usable
from cocoa_engine.safe_text import short_repr
from cocoa_integrations._shared.chat_template import OPTIONS, ChatTemplateOptions, template_options
from cocoa_integrations._shared.settings import refuse_unknown, split_settings
from cocoa_integrations._shared.unsupported import INSTEAD, is_without_effect, refused

logger = safe_logger(__name__)


def _checked(name: str, kind: Callable[[Any], Any]) -> Callable[[Any], list[Processor]]:
    """Makes the processor of an option, whose errors name it: some values are checked only when it is called."""
    return lambda value: [OptionProcessor(name, kind(value))]


_PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "no_repeat_ngram_size": _checked("no_repeat_ngram_size", NoRepeatNGramLogitsProcessor),
    "bad_words_ids": _checked("bad_words_ids", NoBadWordsLogitsProcessor),
    "suppress_tokens": _checked("suppress_tokens", SuppressTokensLogitsProcessor),
    "logits_processor": lambda given: given if isinstance(given, Sequence) else [given],
}
_CRITERIA: dict[str, Callable[[Any], Any]] = {
    "stopping_ids": lambda token_ids: [EosTokenCriteria(list(token_ids))],
    "eos_token_id": lambda token_ids: [EosTokenCriteria(token_ids)],
    "stopping_criteria": lambda given: given if isinstance(given, Sequence) else [given],
}
_INSTEAD = {
    **INSTEAD,
    "streamer": "use stream_complete or stream_chat",
    "tools": "completions do not call tools; use chat messages, see chat_with_tools and FunctionAgent",
}
_SAMPLING = ("do_sample", "stop_strings", "pad_token_id")
BESIDE_SETTINGS = (*_PROCESSORS, *_CRITERIA)
"""The options that become logits processors and stopping criteria rather than decode settings."""
SUPPORTED = (*BESIDE_SETTINGS, *_SAMPLING)
"""The supported options besides the decode settings."""


@dataclass(frozen=True)
class DecodeOptions:
    """The decode options of a call.

    Attributes:
        config: the settings.
        processors: logits processors, by the name of the option that adds them.
        criteria: stopping criteria, by the name of the option that adds them.
    """

    config: CocoaConfig
    processors: dict[str, list[Processor]] = field(default_factory=dict)
    criteria: dict[str, list[Criterion]] = field(default_factory=dict)

    def updated(self, options: Mapping[str, Any]) -> DecodeOptions:
        """A copy with some options replaced.

        ``do_sample`` has the meaning of transformers: ``False`` sets ``temperature`` to 0; ``True`` without a
        temperature sets it to 1.0. ``eos_token_id`` is added to the end tokens of the model. ``pad_token_id`` is
        accepted and has no effect. A transformers keyword that is ``None`` counts as not given.

        Args:
            options: fields of :class:`CocoaConfig`, and the names in ``SUPPORTED``.

        Raises:
            ConfigError: an option is unknown, out of range or not supported.
        """
        if not isinstance(options, Mapping):  # possible for generate_kwargs
            raise ConfigError(f"generate_kwargs takes a dict of options, not {type(options).__name__}.")
        settings, rest = split_settings(options, self.config.method)
        unsupported = {*_INSTEAD, *GenerationConfig().to_dict()} - {*SUPPORTED}
        refuse_unknown(rest.keys() - unsupported, SUPPORTED, what="CocoaLLM")
        processors, criteria = dict(self.processors), dict(self.criteria)
        unusable: dict[str, Any] = {}
        for name, value in rest.items():
            if is_without_effect(name, value):
                continue
            if name in _PROCESSORS:
                processors[name] = _made(name, _PROCESSORS[name], value)
            elif name in _CRITERIA:
                criteria[name] = _made(name, _CRITERIA[name], value)
            elif name == "stop_strings":
                settings["stop"] = value
            elif name in unsupported:
                unusable[name] = value
        if unusable:
            otherwise = f"supported are {', '.join(SUPPORTED)} and the fields of CocoaConfig"
            raise ConfigError(refused(unusable, {name: _INSTEAD.get(name, otherwise) for name in unusable}))
        for name in ("temperature", "max_new_tokens"):  # in transformers, None leaves them unchanged
            if settings.get(name, 0) is None:
                del settings[name]
        settings |= self._sampling(rest.get("do_sample"), settings)
        return replace(self, config=self.config.replace(**settings), processors=processors, criteria=criteria)

    def _sampling(self, do_sample: bool | None, settings: Mapping[str, Any]) -> dict[str, Any]:
        if do_sample is None:
            return {}
        if do_sample:
            temperature = settings.get("temperature", self.config.temperature or 1.0)
            if temperature == 0:
                raise ConfigError("do_sample=True and temperature=0 contradict each other; leave one out.")
            return {"temperature": temperature}
        if settings.get("temperature"):
            logger.warning("temperature=%s has no effect with do_sample=False.", settings["temperature"])
        return {"temperature": 0.0}

    def logits_processors(self) -> LogitsProcessorList:
        """All processors, in the order of the options."""
        return LogitsProcessorList(processor for each in self.processors.values() for processor in each)

    def stopping_criteria(self) -> StoppingCriteriaList:
        """All criteria, in the order of the options."""
        return StoppingCriteriaList(criterion for each in self.criteria.values() for criterion in each)


def split_template_options(
    current: ChatTemplateOptions, options: Mapping[str, Any]
) -> tuple[ChatTemplateOptions, dict[str, Any]]:
    """Split the options of a chat call into those of the chat template, and the rest.

    Args:
        current: the options that apply where the call gives none.
        options: the options of the call. For options that cannot be ``None``, ``None`` counts as not given.

    Raises:
        ConfigError: an option has a wrong value.
    """
    given = {
        name: value
        for name, value in options.items()
        if name in OPTIONS and (value is not None or name == "enable_thinking")
    }
    rest = {name: value for name, value in options.items() if name not in OPTIONS}
    try:
        return ChatTemplateOptions(**{**template_options(current).model_dump(), **given}), rest
    except ValidationError as error:
        raise ConfigError(f"a call of CocoaLLM: {explain(error)}") from None


def _made(name: str, make: Callable[[Any], Any], value: Any) -> list[Any]:
    with usable(f"{name}={short_repr(value)}"):
        return list(make(value))
