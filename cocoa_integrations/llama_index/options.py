"""The options of the LLM: which model answers, here or at a server, and how.

A call takes decode settings, and the keywords of transformers' ``generate`` that are supported. No option is ignored
silently: an unsupported keyword raises an error, unless its value has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, ValidationError
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from typing_extensions import Self

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError
from cocoa_engine.errors import UnsupportedFeatureError
from cocoa_engine.logs import safe_logger
from cocoa_engine.messages import explain
from cocoa_engine.model.callables import Criterion, Processor
from cocoa_engine.model.generation_config import usable
from cocoa_engine.model.load_options import LoadOptions, changed_options, loading_arguments
from cocoa_engine.report import Detail
from cocoa_engine.safe_text import short_repr
from cocoa_integrations._shared.chat_template import OPTIONS, ChatTemplateOptions
from cocoa_integrations._shared.load_options import checked_option, refuse_beside, require_picklable
from cocoa_integrations._shared.loading import LazyEngine, lazy_engine
from cocoa_integrations._shared.settings import FIELD_SYNONYMS, refuse_unknown, split_settings, updated
from cocoa_integrations._shared.unsupported import INSTEAD, is_without_effect, refused
from cocoa_integrations.chat_service import ChatService
from cocoa_integrations.chat_service.options import ServiceOptions
from cocoa_integrations.tool_calling import ToolRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = safe_logger(__name__)


def _checked(name: str, kind: Callable[[Any], Any]) -> Callable[[Any], list[Processor]]:
    """Makes the processor of an option, whose errors name it: some values are checked only when it is called."""
    return lambda value: [usable(name)(kind(value))]


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
    unsupported = {*_INSTEAD, *GenerationConfig().to_dict()} - {*SUPPORTED}
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
    return updated(config, settings)


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


class CallOptions(ChatTemplateOptions):
    """The options besides the settings that both the constructor and a single call take."""

    risk_metadata: Detail | None = Field(
        None,
        description="How much of the risk responses carry: `full`; `compact`, one report in which nothing is written "
        "twice; or `none`. Default: full in streams, compact in other responses and in the `raw` of every complete "
        "answer, which agents keep. Events and collectors always receive everything.",
    )
    candidates: bool = Field(
        False, description="Whether the entries of spans list the candidates that competed in them, as `rivals`."
    )
    logprobs: bool | None = Field(
        None,
        description="Whether responses carry the log-probabilities of their tokens. Default: where the risk is full, "
        "and where `top_logprobs` asks for the most probable tokens at each position.",
    )

    def _of_call(self, options: Mapping[str, Any], *, is_chat: bool) -> tuple[CallOptions, dict[str, Any]]:
        """These options with those of a call, and the rest of the options of the call.

        For options that cannot be ``None``, ``None`` counts as not given.
        """
        names = CallOptions.model_fields.keys() - (() if is_chat else OPTIONS)
        values = {name: getattr(self, name) for name in CallOptions.model_fields}
        for name in names & options.keys():
            if options[name] is not None or name == "enable_thinking":
                values[name] = options[name]
        try:
            called = CallOptions(**values)
        except ValidationError as error:
            raise ConfigError(f"a call of CocoaLLM: {explain(error)}") from None
        return called, {name: value for name, value in options.items() if name not in names}


_OTHERS = ("model_name", "tokenizer_name", "trust_remote_code", "tokenizer_kwargs", "runtime", "calibrator")
WEIGHTS = [name for name in LoadOptions.model_fields if name not in _OTHERS]
"""Options that have no effect on a model that is loaded already."""


class ModelOptions(ServiceOptions):
    """Which model answers: an engine, one that the loading options name, or that of a server.

    LLMs with the same loading options share one engine. LLMs that differ in ``runtime`` or ``calibrator`` share the
    weights. A loading option that is set after construction applies from the next call.
    """

    timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Time limit for an answer in seconds. Default: none."
    )
    _given: CocoaEngine | None = PrivateAttr(default=None)
    _model: PreTrainedModel | None = PrivateAttr(default=None)
    _tokenizer: PreTrainedTokenizerBase | None = PrivateAttr(default=None)
    _lazy: LazyEngine | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Call those of the other base classes too. pydantic defines one for private attributes that does not."""
        super().model_post_init(context)

    @property
    def engine(self) -> CocoaEngine:
        """The engine that decodes. It is loaded again if loading options were changed.

        Raises:
            ModelLoadError: the model cannot be loaded.
            UnsupportedFeatureError: the model is at a server.
        """
        self.require_engine()
        engine = self._engine_or_lazy
        return engine.get() if isinstance(engine, LazyEngine) else engine

    @property
    def service(self) -> ChatService:
        """What answers the calls."""
        return self.service_of(None if self.is_remote else self._engine_or_lazy)

    @property
    def _engine_or_lazy(self) -> CocoaEngine | LazyEngine:
        """The engine that was given, or what will load that of the current options."""
        if self._given is not None:
            return self._given
        self._lazy = lazy_engine(loading_arguments(self), model=self._model, tokenizer=self._tokenizer)
        return self._lazy  # holding it keeps it shared

    def _use(
        self,
        engine: CocoaEngine | None,
        model: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
        named: str,
    ) -> None:
        """Use these objects, and load what is not given; ``model_name`` was given as ``named``.

        As in ``HuggingFaceLLM``, ``model`` and ``tokenizer`` take precedence over their names. ``model_name`` is then
        only a label.
        """
        changed = changed_options(self)
        given = {"model": model, "tokenizer": tokenizer, "engine": engine}
        objects = [name for name, value in given.items() if value is not None]
        if self.base_url is not None:
            refuse_beside("base_url", [*(name for name in changed if name != "model_name"), *objects])
            assert self.service  # reports what is wrong with the address
            return
        if engine is not None:
            others = [named if name == "model_name" else name for name in changed]
            if self.model_name == engine.model_name and named in others:
                others.remove(named)
            refuse_beside("engine", [*others, *objects[:-1]])
        self._given, self._model, self._tokenizer = engine, model, tokenizer
        self._refuse_without_effect(changed)
        if model is not None and tokenizer is None and self.tokenizer_name is None:
            raise ConfigError("model= was given without a tokenizer; give tokenizer= or tokenizer_name= too.")
        name = self.engine.model_name
        if engine is not None or model is not None:
            super().__setattr__("model_name", name)

    def _refuse_without_effect(self, changed: list[str]) -> None:
        if self._tokenizer is not None:
            refuse_beside("tokenizer", [name for name in changed if name == "tokenizer_kwargs"])
        if self._model is not None:
            refuse_beside("model", [name for name in changed if name in WEIGHTS])

    if not TYPE_CHECKING:  # type checkers keep the field-by-field assignment

        def __setattr__(self, name: str, value: Any) -> None:
            field = FIELD_SYNONYMS.get(name, name)
            if field in LoadOptions.model_fields:
                value = checked_option(field, value, what=type(self).__name__)
                changed = changed_options({field: value})
                if self._given is not None:
                    refuse_beside("engine", [name for _ in changed if value != getattr(self, field)])
                self._refuse_without_effect(changed)
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the engine."""
        memo = {} if memo is None else memo
        for shared in (self._given, self._model, self._tokenizer):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        """The options, without the model, which is loaded again by its name when the unpickled object is used.

        Raises:
            UnsupportedFeatureError: a loaded engine, model or tokenizer was given, or an option cannot be pickled.
        """
        what = type(self).__name__
        if any(given is not None for given in (self._given, self._model, self._tokenizer)):
            raise UnsupportedFeatureError(
                f"a {what} with a loaded engine, model or tokenizer cannot be pickled; give model_name= and its "
                f"loading options instead, send its to_dict() and use {what}.from_dict(...), or create one in each "
                "process"
            )
        state = BaseModel.__getstate__(self)  # LlamaIndex's own removes what cannot be pickled, from this object too
        require_picklable(state["__dict__"], what=what)
        return {**state, "__pydantic_private__": {**state["__pydantic_private__"], "_lazy": None}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore the options. The model is loaded when it is needed."""
        BaseModel.__setstate__(self, state)
