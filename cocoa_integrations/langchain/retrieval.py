"""What chains over retrieved documents share: their calls in both forms, and the number of documents."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import chain
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.vectorstores import VectorStoreRetriever

from cocoa_integrations._shared.tries import run_blocking
from cocoa_integrations.langchain.chat import ChatCocoa

Retriever = Runnable[str, list[Document]]
"""A retriever, or any other runnable from a question to documents."""

_FIELDS = ("k", "top_k", "top_k_results", "max_results", "similarity_top_k")
"""The names under which retrievers keep the number of documents."""

_FETCH_K = 20
"""LangChain's default of ``fetch_k`` of max marginal relevance."""


class Asker:
    """Asks the runnables of a chain. In the synchronous form of a call it blocks, and suspends nothing."""

    def __init__(self, config: RunnableConfig, *, blocks: bool) -> None:
        self.config, self._blocks = config, blocks

    async def ask(self, runnable: Runnable[Any, Any], given: Any, **options: Any) -> Any:
        """The output of a runnable."""
        if self._blocks:
            return runnable.invoke(given, self.config, **options)
        return await runnable.ainvoke(given, self.config, **options)

    async def run(self, chat: ChatCocoa, work: Callable[[], Any]) -> Any:
        """The result of work for the engine of a model, if it has one in this process."""
        return work() if self._blocks or chat.is_remote else await chat.in_worker(work)


def chain_of(name: str, calls: Callable[..., Coroutine[Any, Any, Any]], prompt: Any, chat: Any) -> Any:
    """A runnable with a name in traces that calls a function with ``prompt`` and ``chat``, an input, an :class:`Asker`
    and the options of a call.
    """

    # LangChain finds the runnables of a chain among the variables that these functions name
    def run(given: Any, config: RunnableConfig, **options: Any) -> Any:
        return run_blocking(calls(prompt, chat, given, Asker(config, blocks=True), options))

    async def arun(given: Any, config: RunnableConfig, **options: Any) -> Any:
        return await calls(prompt, chat, given, Asker(config, blocks=False), options)

    return RunnableLambda(run, arun, name=name)


def join_documents(documents: Sequence[Document]) -> str:
    """The texts of documents, with an empty line between them."""
    return "\n\n".join(document.page_content for document in documents)


def _place_of(retriever: Retriever) -> tuple[str, int] | None:
    """The field that holds the number of documents of a retriever, and this number; ``None`` if there is none."""
    if isinstance(retriever, VectorStoreRetriever):
        k = retriever.search_kwargs.get("k")
        if k is None:  # the vector store has a default
            parameter = inspect.signature(retriever.vectorstore.similarity_search).parameters.get("k")
            k = None if parameter is None else parameter.default
        return ("search_kwargs", k) if isinstance(k, int) else None
    fields = [name for name in _FIELDS if isinstance(retriever, BaseRetriever) and name in type(retriever).model_fields]
    numbers = [(name, getattr(retriever, name)) for name in fields]
    return next(((name, k) for name, k in numbers if isinstance(k, int) and not isinstance(k, bool)), None)


def top_k_of(retriever: Retriever) -> int | None:
    """The number of documents that a retriever is set to return, or ``None`` if it has no such setting."""
    place = _place_of(retriever)
    return None if place is None else place[1]


def with_top_k(retriever: Retriever, factor: float) -> Retriever:
    """A copy of a retriever that returns ``factor`` times as many documents, if it has a number of documents."""
    place = _place_of(retriever)
    if factor == 1 or place is None or not isinstance(retriever, BaseRetriever):
        return retriever
    field, wanted = place[0], round(place[1] * factor)
    if not isinstance(retriever, VectorStoreRetriever):
        return retriever.model_copy(update={field: wanted})
    kwargs = {**retriever.search_kwargs, "k": wanted}
    if retriever.search_type == "mmr":  # chooses among fetch_k documents
        kwargs["fetch_k"] = max(kwargs.get("fetch_k", _FETCH_K), wanted)
    return retriever.model_copy(update={field: kwargs})


def without_duplicates(*lists: Iterable[Document]) -> list[Document]:
    """The documents of all lists, in order. Equal ids, or equal texts with equal metadata, count as one."""
    documents: dict[Any, Document] = {}
    for document in chain.from_iterable(lists):
        key = document.id or (document.page_content, repr(sorted(document.metadata.items(), key=repr)))
        documents.setdefault(key, document)
    return list(documents.values())
