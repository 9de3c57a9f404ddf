"""The options of the LLM: which model answers, here or at a server, and how.

A call takes decode settings, and the keywords of transformers' ``generate`` that are supported. No option is ignored
silently: an unsupported keyword raises an error, unless its value has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from cocoa_engine.model.generation_config import OptionProcessor, usable
from cocoa_engine.model.load_options import LoadOptions, changed_options, loading_arguments
from cocoa_engine.safe_text import short_repr
from cocoa_integrations._shared.chat_template import OPTIONS, ChatTemplateOptions, template_options
from cocoa_integrations._shared.load_options import checked_option, refuse_beside, require_picklable
from cocoa_integrations._shared.loading import LazyEngine, lazy_engine
from cocoa_integrations._shared.settings import FIELD_SYNONYMS, refuse_unknown, split_settings, updated
from cocoa_integrations._shared.unsupported import INSTEAD, is_without_effect, refused
from cocoa_integrations._shared.workers import in_worker
from cocoa_integrations.chat_service import ChatService
from cocoa_integrations.chat_service.options import ServiceOptions
from cocoa_integrations.tool_calling import ToolRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


TOOL_OPTIONS = frozenset({"tools", "tool_choice", "strict", "parallel_tool_calls", "response_format"})
"""Options of a chat call that ask for tools or an answer in JSON."""


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
        return replace(self, config=updated(self.config, settings), processors=processors, criteria=criteria)

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

    def logits_processors(self) -> list[Processor]:
        """All processors, in the order of the options."""
        return [processor for each in self.processors.values() for processor in each]

    def stopping_criteria(self) -> list[Criterion]:
        """All criteria, in the order of the options."""
        return [criterion for each in self.criteria.values() for criterion in each]


def split_tools(options: Mapping[str, Any]) -> tuple[ToolRequest, dict[str, Any]]:
    """Split the options of a chat call into a request for tools or structured output, and the rest.

    Raises:
        ConfigError: see :meth:`ToolRequest.of`.
    """
    asked = {name: value for name, value in options.items() if name in TOOL_OPTIONS}
    rest = {name: value for name, value in options.items() if name not in TOOL_OPTIONS}
    return ToolRequest.of(asked.pop("tools", None), **asked), rest


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


_OTHERS = ("model_name", "tokenizer_name", "trust_remote_code", "tokenizer_kwargs", "runtime", "calibrator")
WEIGHTS = [name for name in LoadOptions.model_fields if name not in _OTHERS]
"""Options that have no effect on a model that is loaded already."""


LOADED = ("_engine", "_lazy")
"""Private attributes that hold the loaded model."""


class ModelOptions(ServiceOptions):
    """Which model answers: an engine, one that the loading options name, or that of a server.

    LLMs with the same loading options share one engine. LLMs that differ in ``runtime`` or ``calibrator`` share the
    weights. A loading option that is set after construction applies from the next call.
    """

    timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Time limit for an answer in seconds. Default: none."
    )
    _engine: CocoaEngine = PrivateAttr()
    """The engine of the last call. An unpickled LLM has none before its first."""

    _lazy: LazyEngine | None = PrivateAttr(default=None)
    """What loaded it; ``None`` if it was given."""

    _given: CocoaEngine | None = PrivateAttr(default=None)
    _model: PreTrainedModel | None = PrivateAttr(default=None)
    _tokenizer: PreTrainedTokenizerBase | None = PrivateAttr(default=None)

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
        self._follow_options()
        return self._engine

    @property
    def service(self) -> ChatService:
        """What answers the calls."""
        return self.service_of(None if self.is_remote else self._engine)

    def _follow_options(self) -> None:
        """Use the engine of the current options, which may have been set since the last call.

        Raises:
            ModelLoadError: the model cannot be loaded.
        """
        if self._given is not None or self.is_remote:
            return
        lazy = self._current()
        engine = lazy.get()
        if lazy is not self._lazy:
            self._lazy, self._engine = lazy, engine
            self._adapt_to(engine)

    async def _follow_options_in_worker(self) -> None:
        """Like :meth:`_follow_options`, without blocking the event loop while a model is loaded."""
        if self._given is None and not self.is_remote and (lazy := self._current()) is not self._lazy:
            await in_worker(lazy, self._follow_options)

    def _current(self) -> LazyEngine:
        return lazy_engine(loading_arguments(self), model=self._model, tokenizer=self._tokenizer)

    def _adapt_to(self, engine: CocoaEngine) -> None:
        """Set the options that follow from the model, where they were not given."""

    def _use(
        self,
        engine: CocoaEngine | None,
        model: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
        named: str,
    ) -> None:
        """Use these objects, and load what is not given.

        As in ``HuggingFaceLLM``, ``model`` and ``tokenizer`` take precedence over their names. ``model_name`` is then
        only a label.

        Args:
            engine, model, tokenizer: what is loaded already.
            named: the name under which ``model_name`` was given, for messages.

        Raises:
            ConfigError: two options contradict each other, or a model was given without a tokenizer.
            ModelLoadError: the model or the tokenizer cannot be loaded.
        """
        changed = changed_options(self)
        objects = [name for name, value in (("model", model), ("tokenizer", tokenizer)) if value is not None]
        if self.base_url is not None:
            beside = [*(name for name in changed if name != "model_name"), *objects]
            refuse_beside("base_url", [*beside, *([] if engine is None else ["engine"])])
            assert self.service  # reports what is wrong with the address
            return
        if engine is not None:
            same_name = self.model_name == engine.model_name
            own = {"model_name": None if same_name else named}
            refuse_beside("engine", [name for one in changed if (name := own.get(one, one))] + objects)
        self._given, self._model, self._tokenizer = engine, model, tokenizer
        self._refuse_without_effect(changed)
        if model is not None and tokenizer is None and self.tokenizer_name is None:
            raise ConfigError("model= was given without a tokenizer; give tokenizer= or tokenizer_name= too.")
        if engine is None:
            self._follow_options()
        else:
            self._engine = engine
            self._adapt_to(engine)
        if engine is not None or model is not None:
            super().__setattr__("model_name", self._engine.model_name)

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
        for shared in (self._given, self._model, self._tokenizer, getattr(self, "_engine", None)):
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
        private = {name: value for name, value in state["__pydantic_private__"].items() if name not in LOADED}
        return {**state, "__pydantic_private__": {**private, "_lazy": None}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore the options. The model is loaded when it is needed."""
        BaseModel.__setstate__(self, state)
