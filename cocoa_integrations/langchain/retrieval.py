"""What chains over retrieved documents share: their calls in both forms, and the number of documents."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.vectorstores import VectorStoreRetriever

from cocoa_integrations.langchain.chat import ChatCocoa

Retriever = Runnable[str, list[Document]]
"""A retriever, or any other runnable from a question to documents."""

_FIELDS = ("k", "top_k", "top_k_results", "max_results", "similarity_top_k")
"""The names under which retrievers keep the number of documents."""

_FETCH_K = 20
"""LangChain's default of ``fetch_k`` of max marginal relevance."""


class Asker:
    """Asks the runnables of a chain, blocking in the synchronous form of a call.

    Args:
        config: the config of the call.
        blocks: whether the call is synchronous. Nothing that is awaited here is then suspended.
    """

    def __init__(self, config: RunnableConfig, *, blocks: bool) -> None:
        self.config, self._blocks = config, blocks

    async def ask(self, runnable: Runnable[Any, Any], given: Any, **options: Any) -> Any:
        """The output of a runnable."""
        if self._blocks:
            return runnable.invoke(given, self.config, **options)
        return await runnable.ainvoke(given, self.config, **options)

    async def prompt_text(self, chat: ChatCocoa, prompt: Any) -> str:
        """The text of a prompt."""
        return chat.prompt_text(prompt) if self._blocks else await chat.aprompt_text(prompt)

    async def measure(self, chat: ChatCocoa, work: Callable[[], Any]) -> Any:
        """The result of work for the engine of a model."""
        return work() if self._blocks else await chat.in_worker(work)


def chain_of(name: str, calls: Callable[..., Coroutine[Any, Any, Any]], prompt: Any, chat: Any) -> Any:
    """A runnable that asks others.

    Args:
        name: its name in traces.
        calls: what it does with the prompt, the model, an input, an :class:`Asker` and the options of a call.
        prompt: the prompt of the chain.
        chat: the model of the chain.
    """

    # LangChain finds the runnables of a chain among the variables that these functions name
    def run(given: Any, config: RunnableConfig, **options: Any) -> Any:
        try:
            calls(prompt, chat, given, Asker(config, blocks=True), options).send(None)
        except StopIteration as end:
            return end.value

    async def arun(given: Any, config: RunnableConfig, **options: Any) -> Any:
        return await calls(prompt, chat, given, Asker(config, blocks=False), options)

    return RunnableLambda(run, arun, name=name)


def join_documents(documents: Sequence[Document]) -> str:
    """The texts of documents, with an empty line between them."""
    return "\n\n".join(document.page_content for document in documents)


def top_k_of(retriever: Retriever) -> int | None:
    """The number of documents that a retriever is set to return, or ``None`` if it has no such setting."""
    if isinstance(retriever, VectorStoreRetriever):
        k = retriever.search_kwargs.get("k")
        if k is None:  # the vector store has a default
            parameter = inspect.signature(retriever.vectorstore.similarity_search).parameters.get("k")
            k = None if parameter is None else parameter.default
        return k if isinstance(k, int) else None
    name = _field_of(retriever)
    return None if name is None else getattr(retriever, name)


def with_top_k(retriever: Retriever, factor: float) -> Retriever:
    """A copy of a retriever that returns ``factor`` times as many documents.

    Returns the retriever itself if ``factor`` is 1 or it has no number of documents.
    """
    top_k = top_k_of(retriever)
    if factor == 1 or top_k is None or not isinstance(retriever, BaseRetriever):
        return retriever
    wanted = round(top_k * factor)
    if isinstance(retriever, VectorStoreRetriever):
        kwargs = {**retriever.search_kwargs, "k": wanted}
        if retriever.search_type == "mmr":  # chooses among fetch_k documents
            kwargs["fetch_k"] = max(kwargs.get("fetch_k", _FETCH_K), wanted)
        return retriever.model_copy(update={"search_kwargs": kwargs})
    return retriever.model_copy(update={str(_field_of(retriever)): wanted})


def without_duplicates(*lists: Iterable[Document]) -> list[Document]:
    """The documents of all lists, in order. Equal ids, or equal texts with equal metadata, count as one."""
    documents: dict[Any, Document] = {}
    for document in (document for retrieved in lists for document in retrieved):
        key = document.id or (document.page_content, repr(sorted(document.metadata.items(), key=repr)))
        documents.setdefault(key, document)
    return list(documents.values())


def _field_of(retriever: Retriever) -> str | None:
    """The field that holds the number of documents."""
    if not isinstance(retriever, BaseRetriever):
        return None
    for name in _FIELDS:
        value = getattr(retriever, name, None)
        if name in type(retriever).model_fields and isinstance(value, int) and not isinstance(value, bool):
            return name
    return None
