"""What LangChain puts around a model: it keeps the options that were set before, and answers for what will be sent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import Any

from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableConfig,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.configurable import (
    DynamicRunnable,
    RunnableConfigurableAlternatives,
)
from langchain_core.runnables.configurable import RunnableConfigurableFields as _Fields
from typing_extensions import Self

from cocoa_integrations._shared.settings import FIELD_SYNONYMS
from cocoa_integrations.langchain.with_risk import LLMWithRisk

BUILDERS = frozenset({"bind_tools", "with_structured_output", "with_risk"})
"""The methods of a model that make a runnable of it."""

_STRUCTURED = frozenset({"response_format", "ls_structured_output_format"})
SUPERSEDES: Mapping[str, frozenset[str]] = {
    "bind_tools": frozenset({"tools"}),
    "with_structured_output": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "json_mode": _STRUCTURED,
    "function_calling": _STRUCTURED | {"tools", "tool_choice"},
}
"""The options that a method, or a method of structured output, sets itself."""


class Composable(Runnable[Any, Any]):
    """Base of the models. LangChain's methods that wrap a model return a :class:`Composed` one."""

    @abstractmethod
    def with_options(self, options: Mapping[str, Any]) -> Self:
        """The model with the options of one call applied.

        Raises:
            ConfigError: an option is unknown or out of range.
        """

    def bind(self, **kwargs: Any) -> Any:
        """The model with options of every call."""
        return Composed(bound=self, kwargs=kwargs)

    def configurable_fields(self, **kwargs: Any) -> Any:
        """As in LangChain. ``max_tokens`` and ``model`` are accepted for ``max_new_tokens`` and ``model_name``."""
        return Composed(bound=super().configurable_fields(**kwargs))  # type: ignore[misc]

    def with_config(self, *args: Any, **kwargs: Any) -> Any:
        """As in LangChain."""
        return self.bind().with_config(*args, **kwargs)

    def with_listeners(self, **kwargs: Any) -> Any:
        """As in LangChain."""
        return self.bind().with_listeners(**kwargs)

    def with_alisteners(self, **kwargs: Any) -> Any:
        """As in LangChain."""
        return self.bind().with_alisteners(**kwargs)

    def with_types(self, *args: Any, **kwargs: Any) -> Any:
        """As in LangChain."""
        return self.bind().with_types(*args, **kwargs)

    def with_retry(self, **kwargs: Any) -> Any:
        """As in LangChain."""
        return self.bind().with_retry(**kwargs)

    def with_fallbacks(self, *args: Any, **kwargs: Any) -> Any:
        """As in LangChain."""
        return self.bind().with_fallbacks(*args, **kwargs)

    def configurable_alternatives(self, *args: Any, **kwargs: Any) -> Any:
        """As in LangChain."""
        return self.bind().configurable_alternatives(*args, **kwargs)


class Composed(RunnableBinding[Any, Any]):  # type: ignore[no-redef]
    """A model with what LangChain has put around it.

    LangChain's own wrappers take the methods and the attributes that they do not have themselves from the model, and so
    without what is around it.
    """

    def bind(self, **kwargs: Any) -> Any:
        """As in LangChain."""
        given = {_setting(name) for name in kwargs}
        before = {name: value for name, value in self.kwargs.items() if _setting(name) not in given}
        return self.model_copy(update={"kwargs": {**before, **kwargs}})

    def with_alisteners(self, **kwargs: Any) -> Any:
        """As in LangChain."""
        return Composed(bound=super().with_alisteners(**kwargs))

    def with_retry(self, **kwargs: Any) -> Any:
        """As in LangChain."""
        return Composed(bound=super(RunnableBinding, self).with_retry(**kwargs))

    def with_fallbacks(self, *args: Any, **kwargs: Any) -> Any:
        """As in LangChain."""
        return Composed(bound=super().with_fallbacks(*args, **kwargs))

    def configurable_alternatives(self, *args: Any, **kwargs: Any) -> Any:
        """As in LangChain."""
        return Composed(bound=super().configurable_alternatives(*args, **kwargs))

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
            superseded = {_setting(each) for each in kwargs} | SUPERSEDES.get(kwargs.get("method", name), frozenset())
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
    if isinstance(runnable, RunnableWithFallbacks):
        return called_model(runnable.runnable, config, options)
    if isinstance(runnable, RunnableSequence):
        return called_model(runnable.first, config, options)
    if isinstance(runnable, LLMWithRisk):
        return called_model(runnable.llm, config, options)
    return runnable.with_options(options) if options and isinstance(runnable, Composable) else runnable


def _rebuilt(
    runnable: Runnable[Any, Any],
    change: Callable[[Any, Mapping[str, Any]], Any],
    superseded: Set[str],
    bound: Mapping[str, Any] = {},
    *,
    changes_fields: bool = False,
) -> Any:
    """The runnable with each model in it changed.

    Args:
        change: makes a runnable of a model and of the superseded options that were bound to it.
        superseded: the options that the change replaces.
        bound: those that are bound outside of the runnable.
        changes_fields: whether the change takes a model with configurable fields, too.
    """

    def inner(each: Any) -> Any:
        return _rebuilt(each, change, superseded, bound, changes_fields=changes_fields)

    if isinstance(runnable, _Fields) and not changes_fields:  # the change wraps it as it is
        model = runnable.default
        return _rebuilt(change(model, bound), lambda each, _: runnable if each is model else each, set())
    if isinstance(runnable, RunnableBindingBase):
        replaced = {name: value for name, value in runnable.kwargs.items() if _setting(name) in superseded}
        rest = {name: value for name, value in runnable.kwargs.items() if name not in replaced}
        made = _rebuilt(runnable.bound, change, superseded, {**replaced, **bound}, changes_fields=changes_fields)
        return runnable.model_copy(update={"bound": made, "kwargs": rest})
    if isinstance(runnable, RunnableWithFallbacks):
        fallbacks = [inner(each) for each in runnable.fallbacks]
        return runnable.model_copy(update={"runnable": inner(runnable.runnable), "fallbacks": fallbacks})
    if isinstance(runnable, RunnableConfigurableAlternatives):
        others = {
            name: inner(each) if isinstance(each, Runnable) else lambda make=each: inner(make())
            for name, each in runnable.alternatives.items()
        }
        return runnable.model_copy(update={"default": inner(runnable.default), "alternatives": others})
    if isinstance(runnable, RunnableSequence):
        return runnable.model_copy(update={"first": inner(runnable.first)})
    if isinstance(runnable, LLMWithRisk):
        return LLMWithRisk(inner(runnable.llm))
    return change(runnable, bound)


def _setting(name: str) -> str:
    return FIELD_SYNONYMS.get(name, name)
