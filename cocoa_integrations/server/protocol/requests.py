"""The bodies of requests: what is answered, and how it is decoded, from OpenAI's names and the object ``cocoa``."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from transformers import SequenceBiasLogitsProcessor
from typing_extensions import Self

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_engine.errors import ConfigError, unknown
from cocoa_engine.integration import Processor, short_repr
from cocoa_integrations._shared.citations import MOST_PASSAGES
from cocoa_integrations._shared.options import (
    REFUSALS,
    ChatTemplateOptions,
    DecodeSettings,
    Refusals,
    is_without_effect,
    names,
    split_settings,
)
from cocoa_integrations.server import parameters
from cocoa_integrations.server.errors import at_most, bad_request, validation_error
from cocoa_integrations.server.protocol.messages import Message, Several, entries_of, function_of, template_variables
from cocoa_integrations.server.settings import ServerSettings
from cocoa_integrations.tool_calling import ToolRequest

OPERATORS = ("decore_heads",)
"""Settings that name a file of the server's machine. Requests cannot give them."""

_NUMBERS = [
    name
    for name, field in CocoaConfig.model_fields.items()
    if {int, float} & {field.annotation, *get_args(field.annotation)}
]

_LENGTHS = {
    "messages": ("max_messages", ""),
    "tools": ("max_tools", ""),
    "stop": ("max_stop", "texts"),
    "cocoa.stop": ("max_stop", "texts"),
    "texts": ("max_prompts", ""),
    "prompt": ("max_prompt_chars", "tokens"),
}
"""By the name of a list: the setting of the server that limits it, and what it has."""


def _number(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        raise ValueError("the value must be a number")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, Field(strict=True)]


class CocoaOptions(DecodeSettings):
    """The object ``cocoa`` of a request: settings of the decode, and what the answer reports."""

    report: Literal["both", "message", "logprobs", "none"] = Field(
        "both",
        description="Where the answer has its risk: in the `message` (or `delta`), in `logprobs`, in both, or nowhere.",
    )
    candidates: Flag = Field(False, description="Whether each span lists the candidates that competed in it.")
    invalid_calls: Flag = Field(
        False,
        description="Whether `tool_calls` also has calls without a name and calls that are not allowed. Otherwise "
        "their text is part of the content, because clients would run them.",
    )
    source: Several[str] | None = Field(
        None,
        max_length=MOST_PASSAGES,
        description="Texts in the messages that the answer should come from. Spans then have their attention on each.",
    )

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, value: Any) -> Any:
        options = [name for name in cls.model_fields if name not in OPERATORS]
        if isinstance(value, Mapping) and (strangers := [name for name in value if name not in options]):
            raise ValueError(unknown(strangers, options, what="option"))
        return value

    def given(self) -> dict[str, Any]:
        """The settings that the request gives."""
        return split_settings({name: getattr(self, name) for name in sorted(self.model_fields_set)})[0]


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
    refused: ClassVar[Refusals] = parameters.REFUSED
    """Parameters that are not supported."""
    in_prompt: ClassVar[tuple[str, ...]] = ()
    """Parameters that the prompt may contain."""

    @classmethod
    def read(cls, body: Mapping[str, Any], limits: ServerSettings) -> Self:
        """The checked request. Nothing is made of a value that is refused, so that the work is bounded.

        An :class:`~.errors.ApiError` names a parameter that is wrong, not supported, contradicts another, or is above
        a limit.
        """
        body = {name: value for name, value in body.items() if value is not None}
        cls._screen(body, limits)
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            raise validation_error(error) from None
        for name, (neutral, instead) in cls.refused.items():
            if (value := _value(body, name)) is not None and value not in neutral:
                raise bad_request(f"{name}={short_repr(value)} is not supported; {instead}", name)
        request.check(limits)
        size = 0
        for name in cls.in_prompt:
            size += request.size_of(name)
            at_most(size, limits.max_prompt_chars, name, "characters of the prompt")
        return request

    @classmethod
    def _screen(cls, body: Mapping[str, Any], limits: ServerSettings) -> None:
        """Refuse lists above a limit, JSON that is nested too deeply, and lone surrogates, which no tokenizer reads."""
        for name, (limit, what) in _LENGTHS.items():
            value = _value(body, name)
            if isinstance(value, list) and name.partition(".")[0] in cls.model_fields:
                if name == "prompt" and isinstance(next(iter(value), None), (str, list)):
                    limit, what = "max_prompts", "prompts"
                at_most(len(value), getattr(limits, limit), name, what)
        for name in body.keys() & cls.model_fields.keys():
            level = [body[name]]
            for _ in range(limits.max_json_depth):
                level = [inner for outer in level for inner in _members(outer)]
                if not level:
                    break
            else:
                raise bad_request(f"{name} is nested too deeply; the server's limit is {limits.max_json_depth}", name)
            try:
                json.dumps(body[name], ensure_ascii=False).encode()
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
        """The number of characters that a parameter adds to the prompt: of messages, those that a template is given.

        Texts have their own characters, token ids count as one, and other JSON has those with which it is written.
        """
        value = getattr(self, name)
        if value is None:
            return 0
        if name == "prompt" and not isinstance(value, str):
            return sum(1 if isinstance(part, int) else len(part) for part in value)
        parts = [value]
        if name == "messages":
            parts = [part for entry in entries_of(value) for part in entry.values()]
        elif isinstance(value, list) and all(isinstance(text, str) for text in value):  # each is a prompt of its own
            parts = value
        return sum(len(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)) for part in parts)

    def config(self, base: CocoaConfig, limits: ServerSettings) -> CocoaConfig:
        """The settings of the decode; ``base`` has those that the request does not give.

        An :class:`~.errors.ApiError` names a setting out of range, above a limit, given twice or without effect.
        """
        settings = self._settings()
        params = {name: param for name, (param, _) in settings.items()}
        values, others = split_settings({name: value for name, (_, value) in settings.items()}, base.method)
        for name, value in others.items():
            if not is_without_effect(name, value):
                message = f"{params[name]}={short_repr(value)} is not supported; {REFUSALS[name][1]}"
                raise bad_request(message, params[name])
        try:
            config = base.replace(**values)
        except ConfigError as error:  # in the words of the request
            message = re.sub(r"(^|; )(\w+): ", lambda name: f"{name[1]}{params.get(name[2], name[2])}: ", str(error))
            first = re.split(r"\W", str(error), maxsplit=1)[0]
            by_default = first if first in CocoaConfig.model_fields else None
            raise bad_request(message, params.get(first, by_default)) from None
        limited = {
            "max_new_tokens": limits.max_answer_tokens,
            "max_candidates": limits.max_candidates,
            "max_span_tokens": limits.max_span_tokens,
        }
        for name in limited.keys() & settings.keys():
            at_most(getattr(config, name), limited[name], params[name])
        return config

    def _settings(self) -> dict[str, tuple[str, Any]]:
        """By the name of a setting, the parameter that gives it, and its value."""
        settings = {name: (f"cocoa.{name}", value) for name, value in self.cocoa.given().items()}
        for name, (param, value) in settings.items():
            if name in _NUMBERS and isinstance(value, (bool, str)):
                raise bad_request(f"{param}: the value must be a number (got {short_repr(value)})", param)
        for param, setting in parameters.SAME_SETTING.items():
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

    def processors(self, engine: CocoaEngine) -> list[Processor]:
        """The logits processors of the request: the one of ``logit_bias``."""
        size, biases = engine.session.model.config.vocab_size, {}
        for token, bias in (self.logit_bias or {}).items():
            is_bias = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
            if not (is_bias and token.isdecimal() and len(token) < 10 and int(token) < size):
                message = f"logit_bias takes token ids below {size} with numbers in [-100, 100]"
                raise bad_request(f"{message}, not {short_repr(token)}: {short_repr(bias)}", "logit_bias")
            biases[int(token),] = float(bias)
        return [SequenceBiasLogitsProcessor(biases)] if biases else []


def _value(body: Mapping[str, Any], name: str) -> Any:
    """The value of a parameter, or of one inside an object; ``None`` if it is not given."""
    outer, _, inner = name.partition(".")
    value = body.get(outer)
    return value if not inner else value.get(inner) if isinstance(value, Mapping) else None


def _members(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class ChatRequest(DecodingRequest):
    """The body of a request for chat completions."""

    refused: ClassVar[Refusals] = parameters.REFUSED_BY_CHAT
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

    def tool_request(self) -> ToolRequest:
        """The tools and the response format. Raises :class:`~.errors.ApiError`, with its name, if one is not valid."""
        try:
            return ToolRequest.of(
                self.tools,
                tool_choice=self.tool_choice,
                strict=any(bool(function_of(tool).get("strict")) for tool in self.tools or ()),
                parallel_tool_calls=self.parallel_tool_calls,
                response_format=self.response_format,
            )
        except ConfigError as error:
            named = re.match("response_format|tool_choice|tools", str(error))
            raise bad_request(str(error), named[0] if named else "tools" if self.tools else "response_format") from None

    def template_options(self, engine: CocoaEngine) -> ChatTemplateOptions:
        """The options of the chat template. A request must not bring a template of its own.

        ``reasoning_effort`` is the variable of this name; ``"none"`` is ``enable_thinking=False`` for other templates.
        """
        variables, effort = template_variables(self.chat_template_kwargs, engine), self.reasoning_effort
        if effort is not None and names(engine, "reasoning_effort"):
            variables["reasoning_effort"] = effort
        elif effort == "none" and names(engine, "enable_thinking"):
            variables["enable_thinking"] = False
        elif effort is not None:
            why = f"the chat template of {engine.model_name} has no variable for it"
            raise bad_request(f"reasoning_effort={short_repr(effort)} is not supported: {why}", "reasoning_effort")
        return ChatTemplateOptions(chat_template_kwargs=variables, continue_final_message=self.continue_final_message)


class CompletionRequest(DecodingRequest):
    """The body of a request for completions."""

    refused: ClassVar[Refusals] = parameters.REFUSED_BY_COMPLETIONS
    in_prompt: ClassVar[tuple[str, ...]] = ("prompt",)
    prompt: str | Several[StrictStr] | Several[StrictInt] | Several[Several[StrictInt]]
    echo: Flag = False
    logprobs: Whole | None = Field(None, ge=0, le=20)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _is_text_or_ids(cls, prompt: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(prompt)
        except ValidationError:  # which has an error for each of the four
            raise ValueError("takes a text, a list of texts, a list of token ids, or a list of such lists") from None

    @property
    def places(self) -> tuple[int, str]:
        """The number of answers to all prompts, and the parameter that asks for them."""
        return self.n * len(self.prompts), "prompt" if self.n == 1 else "n"

    @property
    def top_logprobs(self) -> int | None:
        """The number of most probable tokens that are listed for each token."""
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids."""
        many = isinstance(self.prompt, list) and isinstance(next(iter(self.prompt), None), (str, list))
        return list(self.prompt) if many else [self.prompt]

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is decoded: the prompt alone comes back, with the log-probabilities of its tokens."""
        return self.echo and self.max_tokens == 0

    def check(self, limits: ServerSettings) -> None:
        """Refuse what contradicts itself or is above a limit; see :meth:`DecodingRequest.read`."""
        super().check(limits)
        if not all(self.prompts):
            raise bad_request("the prompt is empty; give some text or at least one token id", "prompt")
        if self.cocoa.source and self.only_echoes:
            message = "cocoa.source has no effect without new tokens; /v1/cocoa/score takes source"
            raise bad_request(message, "cocoa.source")
        if self.logprobs is not None and self.cocoa.given().get("top_logprobs", self.logprobs) != self.logprobs:
            raise bad_request("logprobs and cocoa.top_logprobs differ; give one of them", "logprobs")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens=0 leaves nothing to decode; it needs echo", "max_tokens")

    def _settings(self) -> dict[str, tuple[str, Any]]:
        return self.model_copy(update={"max_tokens": None})._settings() if self.only_echoes else super()._settings()


class ScoreRequest(DecodingRequest):
    """The body of a request for the risk of given texts after one prompt."""

    refused: ClassVar[Refusals] = parameters.REFUSED_BY_SCORE
    without_effect: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "max_risk"), parameters.NOT_DECODED
        ),
        **dict.fromkeys(("report", "top_logprobs"), "the entries of the texts have all of the risk"),
        "source": "give source",
    }
    """Of the object ``cocoa``, and what to do instead."""
    in_prompt: ClassVar[tuple[str, ...]] = ("prompt", "messages", "text", "texts", "chat_template_kwargs")
    prompt: str | Several[Whole] | None = Field(None, description="The prompt, as text or token ids.")
    messages: Several[Message] | None = Field(None, description="The prompt as a conversation; the texts are answers.")
    text: str | None = None
    texts: Several[str] | None = Field(None, description="Several texts, each after the same prompt.")
    source: str | Several[str] | None = Field(
        None, description="Passages that the prompt contains. Each span then has its attention on them."
    )
    divide: Flag = Field(
        True, description="Divide each text at its risk points, so that each part has a risk. Otherwise it is one span."
    )
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def given(self) -> list[str]:
        """The texts."""
        return [self.text] if self.text is not None else self.texts or []

    def check(self, limits: ServerSettings) -> None:
        """Refuse what contradicts itself or is above a limit; see :meth:`DecodingRequest.read`."""
        super().check(limits)
        for first, second in (("prompt", "messages"), ("text", "texts")):
            if (getattr(self, first) is None) == (getattr(self, second) is None):
                raise bad_request(f"give either {first} or {second}", first)
        if self.chat_template_kwargs and self.messages is None:
            raise bad_request("chat_template_kwargs has no effect on a prompt; give messages", "chat_template_kwargs")
        for name in self.without_effect.keys() & self.cocoa.model_fields_set:
            value = getattr(self.cocoa, name)
            if value is not None and value not in (CocoaOptions.model_fields[name].default, "message"):
                raise bad_request(f"cocoa.{name} has no effect here; {self.without_effect[name]}", f"cocoa.{name}")
        if not self.given:
            raise bad_request("there is no text to score; give at least one", "texts")
