"""Decode options by the names users know: our settings, and transformers' generate keywords that we can honour.

Nothing is ignored silently: a keyword that cannot be honoured raises, unless its value changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from cocoa_integrations.settings import refuse_unknown, split_settings

logger = logging.getLogger(__name__)

_PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "no_repeat_ngram_size": lambda size: [NoRepeatNGramLogitsProcessor(size)],
    "bad_words_ids": lambda words: [NoBadWordsLogitsProcessor(words)],
    "suppress_tokens": lambda token_ids: [SuppressTokensLogitsProcessor(token_ids)],
    "logits_processor": lambda given: given if isinstance(given, Sequence) else [given],
}
_CRITERIA: dict[str, Callable[[Any], Any]] = {
    "stopping_ids": lambda token_ids: [EosTokenCriteria(list(token_ids))],
    "eos_token_id": lambda token_ids: [EosTokenCriteria(token_ids)],
    "stopping_criteria": lambda given: given if isinstance(given, Sequence) else [given],
}
# Keywords with a value that asks for what happens anyway.
_WITHOUT_EFFECT: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "top_k": 0,
    "top_p": 1.0,
    "use_cache": True,
}
_INSTEAD = {
    "max_length": "give max_new_tokens",
    "top_k": "gamma and max_candidates set which tokens compete",
    "top_p": "gamma and max_candidates set which tokens compete",
    "min_p": "gamma is such a threshold: a token competes if its probability is at least gamma times the highest",
    "num_beams": "it searches candidate spans instead, see max_candidates and max_span_tokens",
    "num_return_sequences": "ask again with a temperature above 0",
    "streamer": "use stream_complete or stream_chat",
    "tools": "a text model calls none; tools go with chat messages, see chat_with_tools and FunctionAgent",
}
_SAMPLING = ("do_sample", "stop_strings", "pad_token_id")
BESIDE_SETTINGS = (*_PROCESSORS, *_CRITERIA)
"""The options that are no other name for a decode setting."""
HONOURED = (*BESIDE_SETTINGS, *_SAMPLING)
"""The options there are besides the decode settings."""


@dataclass(frozen=True)
class DecodeOptions:
    """What a decode is asked to do.

    Attributes:
        config: its settings.
        processors: logits processors, by the name of the option that asks for them.
        criteria: stopping criteria, likewise.
    """

    config: CocoaConfig
    processors: dict[str, list[Any]] = field(default_factory=dict)
    criteria: dict[str, list[Any]] = field(default_factory=dict)

    def updated(self, options: Mapping[str, Any]) -> DecodeOptions:
        """These options with some of them given anew.

        ``do_sample`` means what it means in transformers: False turns ``temperature`` off, True without one is 1.0.
        ``eos_token_id`` adds to the model's end tokens. A transformers keyword that is None counts as not given.

        Args:
            options: by name: fields of :class:`CocoaConfig`, and what ``HONOURED`` lists.

        Raises:
            ConfigError: an option is unknown, out of range, or nothing this decoder can honour.
        """
        if not isinstance(options, Mapping):  # of a call they always are
            raise ConfigError(f"generate_kwargs takes a dict of options, not {type(options).__name__}.")
        settings, rest = split_settings(options)
        foreign = {*_INSTEAD, *GenerationConfig().to_dict()} - {*HONOURED}
        refuse_unknown(rest.keys() - foreign, HONOURED, what="CocoaLLM")
        processors, criteria = dict(self.processors), dict(self.criteria)
        refused: dict[str, list[str]] = {}
        for name, value in rest.items():
            if value is None or (name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name]):
                continue
            if name in _PROCESSORS:
                processors[name] = _made(name, _PROCESSORS[name], value)
            elif name in _CRITERIA:
                criteria[name] = _made(name, _CRITERIA[name], value)
            elif name == "stop_strings":
                settings["stop"] = value
            elif name in foreign:
                reason = _INSTEAD.get(name, f"honoured are {', '.join(HONOURED)} and the fields of CocoaConfig")
                refused.setdefault(reason, []).append(f"{name}={value!r}")
        if refused:
            faults = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in refused.items())
            raise ConfigError(f"cannot be honoured by CoCoA decoding, leave out: {faults}.")
        for name in ("temperature", "max_new_tokens"):  # None is transformers' way to leave them as they are
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
        """Every processor, in the order the options were given."""
        return LogitsProcessorList(processor for each in self.processors.values() for processor in each)

    def stopping_criteria(self) -> StoppingCriteriaList:
        """Every criterion, in the order the options were given."""
        return StoppingCriteriaList(criterion for each in self.criteria.values() for criterion in each)


def _made(name: str, make: Callable[[Any], Any], value: Any) -> list[Any]:
    try:
        return list(make(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error} (got {value!r})") from None
