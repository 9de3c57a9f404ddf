"""What LangChain puts around a model: it keeps the options that were set before, and answers for what will be sent."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Set
from contextlib import aclosing, closing
from typing import Any, ClassVar

from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableConfig,
    RunnableSequence,
    RunnableWithFallbacks,
    ensure_config,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableSerializable
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.configurable import DynamicRunnable, RunnableConfigurableAlternatives
from langchain_core.runnables.configurable import RunnableConfigurableFields as _Fields
from typing_extensions import Self

from cocoa_engine.errors import ConfigError
from cocoa_engine.report import require_detail
from cocoa_integrations._shared.options import FIELD_SYNONYMS
from cocoa_integrations.langchain.answers import text_and_risk
from cocoa_integrations.langchain.callbacks import RiskCallbackHandler
from cocoa_integrations.reports import get_risk

BUILDERS = frozenset({"bind_tools", "with_structured_output", "with_risk"})  # they make a runnable of a model
_STRUCTURED = frozenset({"response_format", "ls_structured_output_format"})
SUPERSEDES: Mapping[str, frozenset[str]] = {  # the options that a method, or one of structured output, sets itself
    "bind_tools": frozenset({"tools"}),
    "with_structured_output": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "json_mode": _STRUCTURED,
    "function_calling": _STRUCTURED | {"tools", "tool_choice"},
}


def _composed(method: Callable[..., Any]) -> Any:
    """A method of LangChain's whose result is :class:`Composed`."""
    return lambda model, *args, **kwargs: Composed(bound=method(model, *args, **kwargs))


class Composable(Runnable[Any, Any]):
    """Base of the models. LangChain's methods that wrap a model return a :class:`Composed` one."""

    @abstractmethod
    def with_options(self, options: Mapping[str, Any]) -> Self:
        """The model with the options of one call applied."""

    def bind(self, **kwargs: Any) -> Any:
        return Composed(bound=self, kwargs=kwargs)

    def configurable_fields(self, **kwargs: Any) -> Any:
        """As in LangChain, with the synonyms of fields. One that is given under two names is a ``ConfigError``."""
        fields: dict[str, Any] = {}
        for name, field in kwargs.items():
            if _setting(name) in fields:
                raise ConfigError(f"{_setting(name)} is given under two names; give one of them")
            fields[_setting(name)] = field
        return Composed(bound=super().configurable_fields(**fields))  # type: ignore[misc]

    with_config = _composed(Runnable.with_config)
    with_listeners = _composed(Runnable.with_listeners)
    with_alisteners = _composed(Runnable.with_alisteners)
    with_types = _composed(Runnable.with_types)
    with_retry = _composed(Runnable.with_retry)
    with_fallbacks = _composed(Runnable.with_fallbacks)
    configurable_alternatives = _composed(RunnableSerializable.configurable_alternatives)


class Composed(RunnableBinding[Any, Any]):  # type: ignore[no-redef]
    """A model with what LangChain has put around it, which LangChain's own wrappers would leave out."""

    def bind(self, **kwargs: Any) -> Any:
        settings = {_setting(name) for name in kwargs}
        before = {name: value for name, value in self.kwargs.items() if _setting(name) not in settings}
        return self.model_copy(update={"kwargs": {**before, **kwargs}})

    with_alisteners: ClassVar[Any] = _composed(Runnable.with_alisteners)
    with_retry: ClassVar[Any] = _composed(Runnable.with_retry)
    with_fallbacks: ClassVar[Any] = _composed(Runnable.with_fallbacks)
    configurable_alternatives: ClassVar[Any] = _composed(RunnableSerializable.configurable_alternatives)

    def configurable_fields(self, **kwargs: Any) -> Any:
        """As of the model. An option of the same name that was bound before is the value of the field by default."""

        def change(model: Any, bound: Mapping[str, Any]) -> Any:
            before, fields = (model.default, model.fields) if isinstance(model, _Fields) else (model, {})
            return called_model(before, options=bound).configurable_fields(**{**fields, **kwargs})

        return _rebuilt(self, change, {_setting(name) for name in kwargs}, changes_fields=True)

    def __getattr__(self, name: str) -> Any:
        model = called_model(self)
        if name not in BUILDERS:
            try:
                return getattr(model, name)
            except AttributeError:
                return super().__getattr__(name)

        def build(*args: Any, **kwargs: Any) -> Runnable[Any, Any]:
            superseded = {*map(_setting, kwargs)} | SUPERSEDES.get(kwargs.get("method", name), frozenset())
            built = _rebuilt(self, lambda inner, _: getattr(inner, name)(*args, **kwargs), superseded)
            called_model(built)  # reports options that contradict each other now
            return built

        return build


def called_model(runnable: Any, config: RunnableConfig | None = None, options: Mapping[str, Any] = {}) -> Any:
    """The model that a call of a runnable asks, with the options that reach it."""
    if isinstance(runnable, RunnableBindingBase):
        return called_model(runnable.bound, merge_configs(runnable.config, config), {**runnable.kwargs, **options})
    if isinstance(runnable, DynamicRunnable):
        prepared, config = runnable.prepare(config)
        return called_model(prepared, config, options)
    for kind, name in ((RunnableWithFallbacks, "runnable"), (RunnableSequence, "first"), (LLMWithRisk, "llm")):
        if isinstance(runnable, kind):
            return called_model(getattr(runnable, name), config, options)
    return runnable.with_options(options) if options and isinstance(runnable, Composable) else runnable


def _rebuilt(
    runnable: Runnable[Any, Any],
    change: Callable[[Any, Mapping[str, Any]], Any],
    superseded: Set[str],
    bound: Mapping[str, Any] = {},
    *,
    changes_fields: bool = False,
) -> Any:
    """The runnable with each model changed; ``change`` takes the model and the bound options that are superseded."""

    def inner(part: Any) -> Any:
        return _rebuilt(part, change, superseded, bound, changes_fields=changes_fields)

    if isinstance(runnable, _Fields) and not changes_fields:  # the change wraps it as it is
        model = runnable.default
        return _rebuilt(change(model, bound), lambda part, _: runnable if part is model else part, set())
    if isinstance(runnable, RunnableBindingBase):
        replaced = {name: value for name, value in runnable.kwargs.items() if _setting(name) in superseded}
        rest = {name: value for name, value in runnable.kwargs.items() if name not in replaced}
        made = _rebuilt(runnable.bound, change, superseded, {**replaced, **bound}, changes_fields=changes_fields)
        return runnable.model_copy(update={"bound": made, "kwargs": rest})
    if isinstance(runnable, RunnableWithFallbacks):
        fallbacks = [inner(part) for part in runnable.fallbacks]
        return runnable.model_copy(update={"runnable": inner(runnable.runnable), "fallbacks": fallbacks})
    if isinstance(runnable, RunnableConfigurableAlternatives):
        others = {
            name: inner(part) if isinstance(part, Runnable) else lambda make=part: inner(make())
            for name, part in runnable.alternatives.items()
        }
        return runnable.model_copy(update={"default": inner(runnable.default), "alternatives": others})
    if isinstance(runnable, RunnableSequence):
        return runnable.model_copy(update={"first": inner(runnable.first)})
    if isinstance(runnable, LLMWithRisk):
        return LLMWithRisk(inner(runnable.llm))
    return change(runnable, bound)


def _setting(name: str) -> str:
    return FIELD_SYNONYMS.get(name, name)


class LLMWithRisk(Runnable[LanguageModelInput, dict[str, Any]]):
    """The runnable that :meth:`CocoaLLM.with_risk` returns; it is described there."""

    # `_convert_input`, as `invoke` calls it, has no public name; `generate_prompt` returns the report, unlike `invoke`

    def __init__(self, llm: BaseLLM | _Fields[LanguageModelInput, str]) -> None:
        self.llm = llm

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        llm, prompt, options = self._asked(input, config, kwargs)
        [[answer]] = llm.generate_prompt([prompt], **options).generations
        return dict(text_and_risk(answer.text, get_risk(answer)))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        llm, prompt, options = self._asked(input, config, kwargs)
        [[answer]] = (await llm.agenerate_prompt([prompt], **options)).generations
        return dict(text_and_risk(answer.text, get_risk(answer)))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        handler, config = _heard(config)
        with closing(self.llm.stream(input, config, **_with_report(kwargs))) as texts:  # type: ignore[type-var]
            for text in texts:
                yield text_and_risk(text)
        yield text_and_risk("", handler.reports[-1].without("run_id"))

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        handler, config = _heard(config)
        async with aclosing(self.llm.astream(input, config, **_with_report(kwargs))) as texts:  # type: ignore[type-var]
            async for text in texts:
                yield text_and_risk(text)
        yield text_and_risk("", handler.reports[-1].without("run_id"))

    def _asked(self, prompt: LanguageModelInput, config: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
        llm: Any = self.llm
        if isinstance(llm, _Fields):
            llm, config = llm.prepare(config)
        config = ensure_config(config)
        of_run = {name: config.get(name) for name in ("callbacks", "tags", "metadata", "run_name", "run_id")}
        return llm, llm._convert_input(prompt), {**of_run, **_with_report(options)}


def _with_report(options: dict[str, Any]) -> dict[str, Any]:
    require_detail(options.get("risk_metadata"))
    return {**options, "risk_metadata": None}


def _heard(config: RunnableConfig | None) -> tuple[RiskCallbackHandler, RunnableConfig]:
    handler = RiskCallbackHandler()
    return handler, merge_configs(ensure_config(config), {"callbacks": [handler]})
