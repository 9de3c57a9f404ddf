"""Options that adapters share: decode settings, those of the chat template, and those that are refused."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, create_model, field_validator

from cocoa_engine import METHODS, CocoaConfig, CocoaEngine, PromptError
from cocoa_engine.errors import ChatTemplateError, ConfigError, unknown
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
        role: its role. A developer is the system: templates do not know developers.
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
        "role": "system" if role == "developer" else role,
        "content": "\n".join(filter(None, texts)),
        **{key: value for key, value in optional.items() if value},
        **({} if answers is None else {"tool_call_id": answers}),
    }


def require_text(chat: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a conversation without text, or with a lone surrogate or a value that JSON cannot hold."""
    for number, entry in enumerate(chat):
        where = f"message {number} ({entry['role']})"
        require_unicode(entry["content"], f"content of {where}")
        try:
            json.dumps(entry, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:  # of the arguments of calls
            raise PromptError(f"{where} cannot be written as JSON: {error}; give plain values, such as texts") from None
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


Refusals = dict[str, tuple[tuple[Any, ...], str]]
"""By the name of an option: the values that ask for what happens anyway, besides ``None``, and what to do instead."""


def refusals(names: Mapping[str, str]) -> Refusals:
    """The table of some options, whose names, separated by spaces, are given by what to do instead.

    What is false, zero or empty asks for nothing. With ``!`` after the name every value is refused, and with ``=`` all
    but those that follow as JSON, separated by ``|``.
    """
    table: Refusals = {}
    for instead, listed in names.items():
        for entry in listed.split():
            name, _, values = entry.partition("=")
            neutral: list[Any] = [False, 0, "", [], {}]
            if values or name.endswith("!"):
                neutral = [json.loads(value) for value in values.split("|") if value]
            table[name.removesuffix("!")] = tuple(neutral), instead
    return table


_COMPETE = "gamma and max_candidates set which tokens compete"

REFUSALS = refusals(
    {
        f"{_COMPETE}; only method='sample' takes it": "top_k top_p=1",
        "gamma is such a threshold: a token competes if its probability is at least gamma times the highest": "min_p",
        _COMPETE: "typical_p=1",
        "give temperature: 0 decodes greedily, and a value above 0 samples": "do_sample!",
        "call again with a temperature above 0": "n=1 num_return_sequences=1",
        "it compares candidate spans instead, see max_candidates": "best_of=1",
        "it searches candidate spans instead, see max_candidates and max_span_tokens": "num_beams=1",
        "give repetition_penalty": "presence_penalty frequency_penalty",
        "give logits_processor": "logit_bias no_repeat_ngram_size! bad_words_ids! suppress_tokens!",
        "give max_new_tokens": "max_length! max_completion_tokens! max_output_tokens!",
        "give stop": "stop_sequences! stop_strings!",
        "give stopping_criteria, or stop with the text of the token": "eos_token_id!",
        "give tools and tool_choice": "functions! function_call!",
        "give model": "model_id!",
        "give engine=CocoaEngine(pipeline.model, pipeline.tokenizer), or model and its loading options": "pipeline!",
        "give the decode settings themselves, such as max_new_tokens": "pipeline_kwargs!",
        "the key-value cache is always used": "use_cache=true",
    }
)
"""Options of other models. An adapter may support some of them."""


def is_without_effect(name: str, value: Any) -> bool:
    """Whether an option asks for what happens anyway."""
    return value is None or (name in REFUSALS and value in REFUSALS[name][0])


def refused(options: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """The message that refuses options; ``reasons`` says for each of them what to do instead."""
    by_reason: dict[str, list[str]] = {}
    for name, value in options.items():
        by_reason.setdefault(reasons[name], []).append(f"{name}={value!r}")
    listed = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return f"not supported by CoCoA decoding, leave out: {listed}."


def refuse_unsupported(options: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """The options without those of other models, which are refused unless they have no effect."""
    foreign = {name: value for name, value in options.items() if name in REFUSALS}
    if effective := {name: value for name, value in foreign.items() if not is_without_effect(name, value)}:
        raise ConfigError(f"{what}: {refused(effective, {name: REFUSALS[name][1] for name in effective})}")
    return {name: value for name, value in options.items() if name not in foreign}


OF_SAMPLING = ("top_k", "top_p")
"""Settings that are options of other models unless the method samples tokens."""

SYNONYMS = {"max_tokens": "max_new_tokens"}
"""Other names of settings, from the frameworks."""

FIELD_SYNONYMS = {"model": "model_name", **SYNONYMS}
"""Other names of fields."""


def split_settings(options: Mapping[str, Any], method: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into decode settings, with synonyms resolved, and the rest.

    A setting that is ``None`` is dropped, unless ``None`` is its default. If the current method is given, ``top_k``
    and ``top_p`` belong to the rest unless that method, or the one that the arguments name, samples tokens.
    """
    used = METHODS.get(str(options.get("method") or method))
    refused = () if method is None or (used is not None and used.samples) else OF_SAMPLING
    settings: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in options.items():
        setting = SYNONYMS.get(name, name)
        if setting not in CocoaConfig.model_fields or setting in refused:
            rest[name] = value
        elif value is None and CocoaConfig.model_fields[setting].default is not None:
            continue
        elif setting in settings and settings[setting] != value:
            raise ConfigError(f"{setting} is given twice: {settings[setting]!r} and, as {name}, {value!r}")
        else:
            settings[setting] = value
    return settings, rest


def refuse_unknown(options: Iterable[str], names: Iterable[str], *, what: str) -> None:
    """Refuse names that are neither known options nor settings, and name the closest known one."""
    names = sorted({*names, *CocoaConfig.model_fields, *SYNONYMS})
    if not_known := [name for name in options if name not in names]:
        raise ConfigError(f"{what}: {unknown(not_known, names, what='option')}")


if TYPE_CHECKING:  # type checkers and editors see the fields themselves

    class DecodeSettings(CocoaConfig):
        """The settings of :class:`~cocoa_engine.CocoaConfig` as fields of an adapter."""

        model_config = ConfigDict(frozen=False)

else:
    DecodeSettings = create_model(
        "DecodeSettings",
        __doc__="The settings of CocoaConfig as fields of an adapter. CocoaConfig validates their values.",
        __base__=BaseModel,
        **{
            name: (SkipValidation[field.annotation], Field(default=field.default, description=field.description))
            for name, field in CocoaConfig.model_fields.items()
        },
    )


def fields_of(source: DecodeSettings | CocoaConfig) -> dict[str, Any]:
    """The decode settings of an adapter, or those that were set in a config, by name."""
    names = source.model_fields_set if isinstance(source, CocoaConfig) else CocoaConfig.model_fields
    return {name: getattr(source, name) for name in CocoaConfig.model_fields if name in names}


def config_of(adapter: DecodeSettings) -> CocoaConfig:
    """The decode settings of an adapter, validated. With a model at a server, those that are ``None`` are not set."""
    fields = fields_of(adapter)
    if getattr(adapter, "base_url", None) is not None:
        fields = {name: value for name, value in fields.items() if value is not None}
    return CocoaConfig(**fields)


def set_config(adapter: DecodeSettings, config: CocoaConfig) -> None:
    """Set all decode settings of an adapter."""
    if not isinstance(config, CocoaConfig):
        raise ConfigError(f"config takes a CocoaConfig, not {type(config).__name__}")
    for name in CocoaConfig.model_fields:
        setattr(adapter, name, getattr(config, name))
