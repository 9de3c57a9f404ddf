"""The OpenTelemetry spans that instrumentations of LangChain start for a run.

They start a span in ``on_chat_model_start`` or ``on_llm_start`` and store it by the id of the run. Most do not make it
current, because a callback has no place to end that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, BaseRunManager, CallbackManager
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableConfig, ensure_config
from langchain_core.utils.uuid import uuid7
from pydantic import PrivateAttr
from typing_extensions import Self

from cocoa_integrations._shared.tracing import RiskTrace, is_traced, span_in
from cocoa_integrations.langchain.composed import Composable

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_MAPPINGS = ("_spans", "spans")
"""Attributes in which handlers store spans by the id of the run: langchain-azure-ai, OpenLLMetry."""

_SPAN = ("span",)
"""Attributes that have the span, if the mapping has records."""


class ReceivesSpans:
    """A callback handler that is given the OpenTelemetry spans of a run before the answer of a CoCoA model."""

    def on_run_spans(self, run_id: UUID, spans: Sequence[Span]) -> None:
        """Receive the spans of a run."""


@dataclass(frozen=True)
class Run:
    """A run of a model.

    Attributes:
        run_id: the id of the run.
        handlers: the callback handlers of the run.
    """

    run_id: UUID
    handlers: Sequence[BaseCallbackHandler]

    def trace(self) -> RiskTrace:
        """A trace that writes to the spans of this run, or to the current span if there are none."""
        trace = RiskTrace(self._spans() if is_traced() else ())
        for handler in self.handlers:
            if isinstance(handler, ReceivesSpans):
                handler.on_run_spans(self.run_id, trace.spans)
        return trace

    def _spans(self) -> Iterator[Span]:
        for handler in self.handlers:
            for record in _records(handler, self.run_id):
                if (span := span_in(record, _SPAN)) is not None:
                    yield span
                    break


class KnowsRuns(Composable, BaseLanguageModel[Any]):  # so that LangChain's own initialisation is not replaced
    """A model whose copies are made for the runs of a call, so that the risk is written to their spans."""

    _runs: tuple[Run, ...] = PrivateAttr(default=())
    """The runs of the call that this copy was made for, where they are known: one for each prompt."""

    def _in_runs(self, *runs: BaseRunManager | None) -> Self:
        """The model for a call with these runs; see :meth:`_with_runs`."""
        if self._runs or not is_traced():
            return self
        return self._with_runs(*(Run(run.run_id, run.handlers) for run in runs if run is not None))

    def _with_runs(self, *runs: Run) -> Self:
        """A copy for a call with these runs, one for each prompt. Without runs it is the model itself."""
        if not runs:
            return self
        copy = self.model_copy()
        copy._runs = runs
        return copy

    def _traces(self, count: int) -> list[RiskTrace]:
        """Where the risk of each of the answers of a call is written to."""
        if len(self._runs) == count:
            return [run.trace() for run in self._runs]
        return [RiskTrace()] * count


def _records(handler: BaseCallbackHandler, run_id: UUID) -> Iterator[Any]:
    """What a handler stores for a run."""
    if callable(get_span := getattr(handler, "get_span", None)):  # OpenInference
        with suppress(Exception):  # another handler may have a method of this name
            yield get_span(run_id)
    for name in _MAPPINGS:
        if isinstance(stored := getattr(handler, name, None), Mapping):
            yield stored.get(run_id)
            yield stored.get(str(run_id))


def new_run(config: RunnableConfig | None, callbacks: Any) -> tuple[list[Run], RunnableConfig | None]:
    """The run that a stream will start, and the config to start it with.

    LangChain's chat models do not tell ``_stream`` its run. The id of the run is therefore chosen here.

    Args:
        config: the config of the stream.
        callbacks: the callbacks of the model itself.

    Returns:
        A list with the run, and the config. If nothing is traced, the list is empty and the config unchanged.
    """
    if not is_traced():
        return [], config
    run_id = (config or {}).get("run_id") or uuid7()
    handlers = CallbackManager.configure(ensure_config(config).get("callbacks"), callbacks).handlers
    return [Run(run_id, handlers)], {**(config or {}), "run_id": run_id}
