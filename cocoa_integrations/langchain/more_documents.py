"""Asking a retriever for more documents than it is set to, whatever its class."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStoreRetriever

Retriever = Runnable[str, list[Document]]
"""A retriever, or any other runnable from a question to documents."""

_FIELDS = ("k", "top_k", "top_k_results", "max_results", "similarity_top_k")
"""The names under which retrievers keep the number of documents."""

_FETCH_K = 20
"""LangChain's default of ``fetch_k`` of max marginal relevance."""


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
    name = _field_of(retriever)
    assert name is not None
    return retriever.model_copy(update={name: wanted})


def without_duplicates(*found: Iterable[Document]) -> list[Document]:
    """The documents of all lists, in order. Equal ids, or equal texts with equal metadata, count as one."""
    documents: dict[Any, Document] = {}
    for document in (one for of_one in found for one in of_one):
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
