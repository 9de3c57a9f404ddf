"""Refusing, before any work, the response modes whose risk cannot be reported."""

from __future__ import annotations

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.prompts.mixin import PromptMixin
from llama_index.core.response_synthesizers import (
    Accumulate,
    BaseSynthesizer,
    ResponseMode,
)
from llama_index.core.response_synthesizers.compact_and_accumulate import CompactAndAccumulate
from llama_index.core.response_synthesizers.context_only import ContextOnly
from llama_index.core.response_synthesizers.no_text import NoText

from cocoa_engine import ConfigError

_INNER = ("query_engine", "inner")
"""The names under which engines list the engine whose response they return."""


def require_reportable(engine: BaseQueryEngine) -> None:
    """Refuse a query engine whose response has no risk, or one whose spans cannot be found in its text.

    Raises:
        ConfigError: the response mode is ``no_text`` or ``context_only``, or it is ``accumulate`` or
            ``compact_accumulate`` with streaming or with an ``output_cls``.
    """
    synthesizer = _synthesizer_of(engine)
    if isinstance(synthesizer, NoText):
        require_llm(ResponseMode.NO_TEXT)
    if isinstance(synthesizer, ContextOnly):
        require_llm(ResponseMode.CONTEXT_ONLY)
    if not isinstance(synthesizer, Accumulate):
        return
    # private: LlamaIndex has no public names for what a synthesizer was made with, nor for the modules of an engine
    compact = isinstance(synthesizer, CompactAndAccumulate)
    mode = ResponseMode.COMPACT_ACCUMULATE if compact else ResponseMode.ACCUMULATE
    if synthesizer._streaming:
        raise ConfigError(
            f"response_mode={mode.value!r} cannot stream: LlamaIndex joins its answers when all are complete. Leave "
            "streaming out, or use another response_mode."
        )
    if synthesizer._output_cls is not None:
        raise ConfigError(
            f"response_mode={mode.value!r} with an output_cls shows the parsed objects, in which the spans of the "
            "answers cannot be found. Leave output_cls out, or use response_mode='tree_summarize'."
        )


def require_llm(mode: ResponseMode | str | None) -> None:
    """Refuse a response mode that calls no LLM.

    Raises:
        ConfigError: the mode is ``no_text`` or ``context_only``.
    """
    if mode in (ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY):
        raise ConfigError(
            f"response_mode={ResponseMode(mode).value!r} calls no LLM, so its response has no risk. Use the query "
            "engine by itself, or another response_mode."
        )


def _synthesizer_of(engine: PromptMixin) -> BaseSynthesizer | None:
    """The synthesizer that writes the response of an engine, or ``None`` if the engine lists none."""
    modules = engine._get_prompt_modules()  # its public `get_prompts` returns the prompts alone
    if isinstance(synthesizer := modules.get("response_synthesizer"), BaseSynthesizer):
        return synthesizer
    inner = next((modules[name] for name in _INNER if name in modules), None)
    return None if inner is None else _synthesizer_of(inner)
