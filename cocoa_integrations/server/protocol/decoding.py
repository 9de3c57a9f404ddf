"""The parameters that say how an answer is decoded, from OpenAI's names and the object ``cocoa``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from transformers import SequenceBiasLogitsProcessor
from typing_extensions import Self

from cocoa_engine import METHODS, CocoaConfig, CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_engine.model.callables import Processor
from cocoa_engine.safe_text import short_repr
from cocoa_integrations._shared.citations import MOST_PASSAGES
from cocoa_integrations._shared.settings import OF_SAMPLING, DecodeSettings
from cocoa_integrations._shared.unsupported import INSTEAD, is_without_effect
from cocoa_integrations.server.errors import at_most, bad_request, validation_error
from cocoa_integrations.server.settings import REFUSED, SAME_SETTING, Refused, ServerSettings

OPERATORS = ("decore_heads",)
"""Settings that name a file of the server's machine. Requests cannot give them."""


def _number(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise ValueError("the value must be a number")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, Field(strict=True)]

Element = TypeVar("Element")
Several = Annotated[list[Element], Field(fail_fast=True)]
"""A list whose first wrong element is its only error. By default pydantic makes an error of a kilobyte for each."""

_NUMBERS = [
    name
    for name, field in CocoaConfig.model_fields.items()
    if {int, float} & {field.annotation, *get_args(field.annotation)}
]


class CocoaOptions(DecodeSettings):
    """The object ``cocoa`` of a request: settings of the decode, and what the answer reports."""

    report: Literal["both", "message", "logprobs", "none"] = Field(
        "both",
        description="Where the answer has its risk: in the `message` (or `delta`), in `logprobs`, in both, or nowhere.",
    )
    candidates: Flag = Field(False, description="Whether each span lists the candidates that competed in it.")
    source: Several[str] | None = Field(
        None,
        max_length=MOST_PASSAGES,
        description="Texts in the messages that the answer should come from. Spans then have their attention on each.",
    )

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, given: Any) -> Any:
        known = [name for name in cls.model_fields if name not in OPERATORS]
        if isinstance(given, Mapping) and (strangers := [name for name in given if name not in known]):
            raise ValueError(unknown(strangers, known, what="option"))
        return given

    def given(self) -> dict[str, Any]:
        """The settings that the request gives."""
        return {
            name: value
            for name in sorted(self.model_fields_set & CocoaConfig.model_fields.keys())
            if (value := getattr(self, name)) is not None or CocoaConfig.model_fields[name].default is None
        }


class StreamOptions(BaseModel):
    """``stream_options`` of a request."""

    include_usage: Flag | None = None


class DecodingRequest(BaseModel):
    """What requests have in common. Unknown parameters are ignored, and ``null`` is as good as nothing."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    n: Whole = Field(1, ge=1)
    stream: Flag = False
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    max_new_tokens: Whole | None = Field(None, description="As in TGI and SGLang; `max_tokens`.")
    n_predict: Whole | None = Field(None, description="As in llama.cpp; `max_tokens`.")
    num_predict: Whole | None = Field(None, description="As in Ollama; `max_tokens`.")
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Whole | None = Field(None, description="As in other servers for local models; -1 and 0 are none.")
    repetition_penalty: Real | None = Field(None, description="As in other servers for local models.")
    seed: Whole | None = None
    stop: str | Several[str] | None = None
    logit_bias: dict[str, Any] | None = None
    cocoa: CocoaOptions = Field(default_factory=CocoaOptions)
    refused: ClassVar[Refused] = REFUSED
    """Parameters that are not supported."""
    lengths: ClassVar[Mapping[str, tuple[str, str]]] = {
        "stop": ("max_stop", "texts"),
        "cocoa.stop": ("max_stop", "texts"),
    }
    """By the name of a list: the setting of the server that limits it, and what it has."""
    in_prompt: ClassVar[tuple[str, ...]] = ()
    """Parameters that the prompt may contain."""

    @classmethod
    def read(cls, given: Mapping[str, Any], limits: ServerSettings) -> Self:
        """The checked request. Nothing is made of a value that is refused, so that the work is bounded.

        Args:
            given: the JSON of the request.
            limits: the limits.

        Raises:
            ApiError: a parameter is wrong, not supported, contradicts another one, or is above a limit. It names it.
        """
        given = {name: value for name, value in given.items() if value is not None}
        cls.screen(given, limits)
        try:
            request = cls.model_validate(given)
        except ValidationError as error:
            raise validation_error(error) from None
        for name, (neutral, instead) in cls.refused.items():
            if (value := _value(given, name)) is not None and value not in neutral:
                raise bad_request(f"{name}={short_repr(value)} is not supported; {instead}", name)
        request.check(limits)
        size = 0
        for name in cls.in_prompt:
            size += request.size_of(name)
            at_most(size, limits.max_prompt_chars, name, "characters of the prompt")
        return request

    @classmethod
    def screen(cls, given: Mapping[str, Any], limits: ServerSettings) -> None:
        """Refuse lists above a limit, JSON that is nested too deeply, and lone surrogates, which no tokenizer can read.

        Raises:
            ApiError: there is one. It names the parameter.
        """
        for name, (limit, what) in cls.lengths.items():
            value = _value(given, name)
            if isinstance(value, list):
                at_most(len(value), getattr(limits, limit), name, what)
        for name in given.keys() & cls.model_fields.keys():
            level = [given[name]]
            for _ in range(limits.max_json_depth):
                level = [inner for outer in level for inner in _members(outer)]
                if not level:
                    break
            else:
                message = f"{name} is nested too deeply; the server's limit is {limits.max_json_depth}"
                raise bad_request(message, name)
            try:
                json.dumps(given[name], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                message = f"{name} has a lone surrogate (half of a character), which is not valid Unicode; remove it"
                raise bad_request(message, name) from None

    @property
    def places(self) -> tuple[int, str]:
        """The number of answers that the engine queues for the request, and the parameter that asks for them."""
        return self.n, "n"

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self, limits: ServerSettings) -> None:
        """Refuse what contradicts itself or is above a limit; see :meth:`read`."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is given without stream; leave it out, or set stream", "stream_options")
        at_most(self.n, limits.max_n, "n")

    def size_of(self, name: str) -> int:
        """The number of characters that a parameter adds to the prompt."""
        return written_size(getattr(self, name))

    def config(self, base: CocoaConfig, limits: ServerSettings) -> CocoaConfig:
        """The settings of the decode.

        Args:
            base: the settings that the request does not give.
            limits: the limits of a request.

        Raises:
            ApiError: a setting is out of range, above a limit, given twice, or has no effect. It names the parameter.
        """
        given = self._settings()
        method = str(given.get("method", ("", base.method))[1])
        if method in METHODS and not METHODS[method].samples:
            for name in OF_SAMPLING:
                param, value = given.pop(name, (name, None))
                if not is_without_effect(name, value):
                    raise bad_request(f"{param}={short_repr(value)} is not supported; {INSTEAD[name]}", param)
        try:
            config = base.replace(**{name: value for name, (_, value) in given.items()})
        except ConfigError as error:
            raise bad_request(*_in_words_of_the_request(str(error), given)) from None
        limited = {
            "max_new_tokens": limits.max_answer_tokens,
            "max_candidates": limits.max_candidates,
            "max_span_tokens": limits.max_span_tokens,
        }
        for name in limited.keys() & given.keys():
            at_most(getattr(config, name), limited[name], given[name][0])
        return config

    def processors(self, engine: CocoaEngine) -> list[Processor]:
        """The logits processors of the request: the one of ``logit_bias``.

        Raises:
            ApiError: ``logit_bias`` has a token that the model does not have, or a bias outside [-100, 100].
        """
        if not self.logit_bias:
            return []
        size, biases = engine.session.model.config.vocab_size, {}
        for token, bias in self.logit_bias.items():
            is_bias = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
            if not (is_bias and token.isdecimal() and len(token) < 10 and int(token) < size):
                message = f"logit_bias takes token ids below {size} with numbers in [-100, 100]"
                raise bad_request(f"{message}, not {short_repr(token)}: {short_repr(bias)}", "logit_bias")
            biases[int(token),] = float(bias)
        return [SequenceBiasLogitsProcessor(biases)]

    def _settings(self) -> dict[str, tuple[str, Any]]:
        """By the name of a setting, the parameter that gives it, and its value."""
        settings = {name: (f"cocoa.{name}", value) for name, value in self.cocoa.given().items()}
        for name, (param, value) in settings.items():
            if name in _NUMBERS and isinstance(value, (bool, str)):
                raise bad_request(f"{param}: the value must be a number (got {short_repr(value)})", param)
        for param, setting in SAME_SETTING.items():
            value = getattr(self, param, None)
            if value is None or (param == "top_k" and value <= 0):
                continue
            if param == "seed":
                value %= 2**63  # OpenAI's may be negative
            other, before = settings.setdefault(setting, (param, value))
            if before != value:
                raise bad_request(
                    f"{param} and {other} are the same setting, but differ: {short_repr(value)} and "
                    f"{short_repr(before)}; give one of them",
                    param,
                )
            settings[setting] = (param, value)
        return settings


def config_of_answer(config: CocoaConfig, number: int) -> CocoaConfig:
    """The settings of one of several answers to a request, which have different seeds."""
    return config if config.seed is None or number == 0 else config.replace(seed=(config.seed + number) % 2**63)


def written_size(value: Any) -> int:
    """The characters of a value in a prompt: of texts their own, of other JSON those with which it is written."""
    if value is None or isinstance(value, str):
        return len(value or "")
    if isinstance(value, list) and all(isinstance(text, str) for text in value):  # each is a prompt of its own
        return sum(map(len, value))
    return len(json.dumps(value, ensure_ascii=False))


def _value(given: Mapping[str, Any], name: str) -> Any:
    """The value of a parameter, or of one inside an object; ``None`` if it is not given."""
    outer, _, inner = name.partition(".")
    value = given.get(outer)
    return value if not inner else value.get(inner) if isinstance(value, Mapping) else None


def _members(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _in_words_of_the_request(message: str, given: Mapping[str, tuple[str, Any]]) -> tuple[str, str | None]:
    """The message of an error about settings with the parameters that gave them, and the first of these."""
    params = {name: param for name, (param, _) in given.items()}
    renamed = re.sub(r"(^|; )(\w+): ", lambda found: f"{found[1]}{params.get(found[2], found[2])}: ", message)
    first = re.match(r"\w*", message)
    name = first[0] if first else ""
    return renamed, params.get(name, name if name in CocoaConfig.model_fields else None)
