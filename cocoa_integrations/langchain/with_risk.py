"""The text model as a runnable that returns text and risk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.outputs import Generation, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.configurable import RunnableConfigurableFields

from cocoa_integrations._shared.detail import require_detail
from cocoa_integrations.langchain.parsers import text_and_risk
from cocoa_integrations.langchain.runnables import get_risk


class LLMWithRisk(Runnable[LanguageModelInput, dict[str, Any]]):
    """The runnable that :meth:`CocoaLLM.with_risk` returns; it is described there.

    Args:
        llm: the model that answers.
    """

    # `invoke` of LangChain's models calls `_convert_input`, which has no public name. `generate_prompt` takes its
    # result and, unlike `invoke`, returns the report.

    def __init__(self, llm: BaseLLM | RunnableConfigurableFields[LanguageModelInput, str]) -> None:
        self.llm = llm

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """The text and the report of the answer."""
        (llm, config), kwargs = self._prepared(config), _with_report(kwargs)
        return _only_answer(llm.generate_prompt([llm._convert_input(input)], **_of_run(config), **kwargs))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """See :meth:`invoke`."""
        (llm, config), kwargs = self._prepared(config), _with_report(kwargs)
        return _only_answer(await llm.agenerate_prompt([llm._convert_input(input)], **_of_run(config), **kwargs))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        """One ``{"text": ...}`` per span, then one chunk with the report."""
        answer, kwargs = _ReportHandler(), _with_report(kwargs)
        with closing(self.llm.stream(input, answer.added_to(config), **kwargs)) as texts:  # type: ignore[type-var]
            for text in texts:
                yield text_and_risk(text)
        yield text_and_risk("", answer.report)

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """See :meth:`stream`."""
        answer, kwargs = _ReportHandler(), _with_report(kwargs)
        async with aclosing(self.llm.astream(input, answer.added_to(config), **kwargs)) as texts:  # type: ignore[type-var]
            async for text in texts:
                yield text_and_risk(text)
        yield text_and_risk("", answer.report)

    def _prepared(self, config: RunnableConfig | None) -> tuple[Any, RunnableConfig | None]:
        """The model that a config chooses, and the config for it."""
        return self.llm.prepare(config) if isinstance(self.llm, RunnableConfigurableFields) else (self.llm, config)


class _ReportHandler(BaseCallbackHandler):
    """Receives the report of a streamed answer, of which LangChain returns only the text."""

    run_inline = True
    report: dict[str, Any]

    def added_to(self, config: RunnableConfig | None) -> RunnableConfig:
        return merge_configs(ensure_config(config), {"callbacks": [self]})

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.report = get_risk(_only(response))


def _only(result: LLMResult) -> Generation:
    [[answer]] = result.generations
    return answer


def _only_answer(result: LLMResult) -> dict[str, Any]:
    return dict(text_and_risk(_only(result).text, get_risk(_only(result))))


def _with_report(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call whose report is full, whatever ``risk_metadata`` is.

    Raises:
        ConfigError: its value is unknown.
    """
    require_detail(options.get("risk_metadata"))
    return {**options, "risk_metadata": None}


def _of_run(config: RunnableConfig | None) -> dict[str, Any]:
    """The entries of a config that LangChain's models take as arguments."""
    config = ensure_config(config)
    return {name: config.get(name) for name in ("callbacks", "tags", "metadata", "run_name", "run_id")}
