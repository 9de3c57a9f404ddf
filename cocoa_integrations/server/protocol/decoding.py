"""The parameters that say how an answer is decoded, from OpenAI's names and the object ``cocoa``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from transformers import SequenceBiasLogitsProcessor
from typing_extensions import Self

from cocoa_engine import METHODS, CocoaConfig, CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_engine.model.callables import Processor
from cocoa_engine.safe_text import short_repr
from cocoa_integrations._shared.citations import MOST_PASSAGES
from cocoa_integrations._shared.settings import OF_SAMPLING, DecodeSettings
from cocoa_integrations._shared.unsupported import INSTEAD, WITHOUT_EFFECT, is_without_effect
from cocoa_integrations.server.errors import at_most, bad_request
from cocoa_integrations.server.parameters import SAME_SETTING
from cocoa_integrations.server.settings import ServerSettings

Report = Literal["both", "message", "logprobs", "none"]

OPERATORS = ("decore_heads",)
"""Settings that name a file of the server's machine. Requests cannot give them."""

_BIAS = "give logit_bias"

OF_OTHER_SERVERS = {
    **{name: INSTEAD[name] for name in ("min_p", "typical_p", "do_sample", "num_beams", "best_of")},
    **{name: INSTEAD[name] for name in ("max_length", "max_output_tokens", "stop_sequences", "stop_strings")},
    **dict.fromkeys(("bad_words_ids", "suppress_tokens"), _BIAS),
    "no_repeat_ngram_size": "give repetition_penalty",
    "num_return_sequences": "give n",
    "eos_token_id": "give stop",
    "stop_token_ids": "give stop",
    "min_tokens": _BIAS,
    "ignore_eos": _BIAS,
    "length_penalty": "give cocoa.span_log_prob",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar"),
        "give response_format",
    ),
    **dict.fromkeys(("bad_words", "allowed_token_ids"), _BIAS),
    "use_beam_search": INSTEAD["num_beams"],
    "chat_template": "the template is the model's",
    "documents": "give chat_template_kwargs",
}
"""Parameters of other servers for local models that are not supported, and what to do instead."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **WITHOUT_EFFECT,
    **dict.fromkeys(("min_tokens", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("stop_token_ids", "bad_words_ids", "suppress_tokens", "stop_sequences", "stop_strings"), ([],)),
    **dict.fromkeys(("ignore_eos", "do_sample", "use_beam_search"), (False,)),
    "length_penalty": (1,),
}


def _number(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise ValueError("the value must be a number")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, Field(strict=True)]

_NUMBERS = frozenset(
    name
    for name, field in CocoaConfig.model_fields.items()
    if {int, float} & {field.annotation, *get_args(field.annotation)}
)
"""Settings that are numbers, and nothing else but `None`."""

Refused = Mapping[str, tuple[tuple[Any, ...], str]]
"""By the name of a parameter: the values that ask for what happens anyway, and what to do instead."""

REFUSED: Refused = {
    "frequency_penalty": ((0,), "give cocoa.repetition_penalty"),
    "presence_penalty": ((0,), "give cocoa.repetition_penalty"),
}


class CocoaOptions(DecodeSettings):
    """The object ``cocoa`` of a request: settings of the decode, and what the answer reports."""

    report: Report = Field(
        "both",
        description="Where the answer has its risk: in the `message` (or `delta`), in `logprobs`, in both, or nowhere.",
    )
    candidates: Flag = Field(False, description="Whether each span lists the candidates that competed in it.")
    source: list[str] | None = Field(
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
    """What requests for chat and for completions have in common. Unknown parameters are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    n: Whole | None = Field(None, ge=1)
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Whole | None = Field(None, description="As in other servers for local models; -1 and 0 are none.")
    repetition_penalty: Real | None = Field(None, description="As in other servers for local models.")
    seed: Whole | None = None
    stop: str | list[str] | None = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: dict[str, Real] | None = None
    cocoa: CocoaOptions | None = None
    of_other_routes: ClassVar[Mapping[str, str]] = {}
    """Parameters that only other routes have, and what to do instead."""
    _of_other_servers: dict[str, Any] = PrivateAttr(default_factory=dict)
    _of_other_routes: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_those_of_other_servers(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(given)
        if isinstance(given, Mapping):
            names = OF_OTHER_SERVERS.keys() - cls.model_fields.keys()
            made._of_other_servers = {name: given[name] for name in sorted(names & given.keys())}
            names = cls.of_other_routes.keys() & given.keys()
            made._of_other_routes = {name: given[name] for name in sorted(names)}
        return made

    @property
    def options(self) -> CocoaOptions:
        """The object ``cocoa``."""
        return CocoaOptions() if self.cocoa is None else self.cocoa

    @property
    def answers(self) -> int:
        """The number of answers."""
        return 1 if self.n is None else self.n

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def require_supported(self, limits: ServerSettings, refused: Refused) -> None:
        """Refuse parameters that would have no effect, and those above a limit.

        Args:
            limits: the limits.
            refused: the parameters that are not supported.

        Raises:
            ApiError: there is one. It names the parameter.
        """
        for name, (neutral, instead) in refused.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise bad_request(f"{name}={short_repr(value)} is not supported; {instead}", name)
        for name, value in self._of_other_servers.items():
            if value is not None and value not in _NEUTRAL.get(name, ()):
                raise bad_request(f"{name}={short_repr(value)} is not supported; {OF_OTHER_SERVERS[name]}", name)
        for name, value in self._of_other_routes.items():
            if value and value not in (*_NEUTRAL.get(name, ()), {"type": "text"}, "none", "auto"):
                raise bad_request(f"{name}={short_repr(value)} has no effect here; {self.of_other_routes[name]}", name)
        if self.stream_options is not None and not self.streams:
            raise bad_request("stream_options is given without stream; leave it out, or set stream", "stream_options")
        at_most(self.answers, limits.max_n, "n")

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
            raise bad_request(str(error), _param_of(str(error), given)) from None
        limited = {
            "max_new_tokens": limits.max_answer_tokens,
            "max_candidates": limits.max_candidates,
            "max_span_tokens": limits.max_span_tokens,
        }
        for name in limited.keys() & given.keys():
            at_most(getattr(config, name), limited[name], given[name][0])
        if "stop" in given:
            at_most(len(config.stop), limits.max_stop, given["stop"][0], "texts")
        return config

    def processors(self, engine: CocoaEngine) -> list[Processor]:
        """The logits processors of the request: the one of ``logit_bias``.

        Raises:
            ApiError: ``logit_bias`` has a token that the model does not have, or a bias outside [-100, 100].
        """
        if not self.logit_bias:
            return []
        size = engine.session.model.config.vocab_size
        for token, bias in self.logit_bias.items():
            if not (token.isdecimal() and len(token) < 10 and int(token) < size and -100 <= bias <= 100):
                raise bad_request(
                    f"logit_bias takes token ids below {size} with numbers in [-100, 100], not "
                    f"{short_repr(token)}: {bias:g}",
                    "logit_bias",
                )
        sequences = {(int(token),): float(bias) for token, bias in self.logit_bias.items()}
        return [SequenceBiasLogitsProcessor(sequences)]

    def _settings(self) -> dict[str, tuple[str, Any]]:
        """By the name of a setting, the parameter that gives it, and its value."""
        found = {name: (f"cocoa.{name}", value) for name, value in self.options.given().items()}
        for name, (param, value) in found.items():
            if name in _NUMBERS and isinstance(value, (bool, str)):
                raise bad_request(f"{param}: the value must be a number (got {short_repr(value)})", param)
        for param, setting in SAME_SETTING.items():
            value = getattr(self, param, None)
            if value is None:
                continue
            if param == "seed":
                value %= 2**63  # OpenAI's may be negative
            if param == "top_k" and value <= 0:
                continue
            if setting in found and found[setting][1] != value:
                raise bad_request(
                    f"{param} and {found[setting][0]} are the same setting, but differ: {short_repr(value)} and "
                    f"{short_repr(found[setting][1])}; give one of them",
                    param,
                )
            found[setting] = (param, value)
        return found


def config_of_answer(config: CocoaConfig, number: int) -> CocoaConfig:
    """The settings of one of several answers to a request, which have different seeds."""
    return config if config.seed is None or number == 0 else config.replace(seed=(config.seed + number) % 2**63)


def _param_of(message: str, given: Mapping[str, tuple[str, Any]]) -> str | None:
    """The parameter that gave the setting with which the message of an error begins."""
    found = re.match(r"(\w+)", message)
    return given[found[1]][0] if found and found[1] in given else None
