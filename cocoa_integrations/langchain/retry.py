"""A chain that answers from retrieved documents, and tries again while the answer is too risky."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStoreRetriever

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_integrations._shared.citations import find_in
from cocoa_integrations._shared.limits import ABSTENTION, MARK, Mark
from cocoa_integrations._shared.tries import TRIES_KEY, Measure, OnRisk, RetryPlan, Tries
from cocoa_integrations.langchain import answers
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.citations import AFTER_A_RETRY, Asker, chain_of, join_documents
from cocoa_integrations.langchain.composed import called_model
from cocoa_integrations.reports import get_risk

Retriever = Runnable[str, list[Document]]  # from a question to documents
_FIELDS = ("k", "top_k", "top_k_results", "max_results", "similarity_top_k")  # the number of documents of a retriever
_FETCH_K = 20  # LangChain's default of ``fetch_k`` of max marginal relevance


def with_risk_retry(
    retriever: Retriever,
    prompt: Runnable[Any, Any],
    chat: ChatCocoa,
    *,
    threshold: float | None = None,
    max_tries: int = 3,
    settings: Sequence[Mapping[str, Any]] | None = None,
    alphas: Sequence[float] | None = None,
    top_k_growth: float | None = None,
    second_retriever: Retriever | None = None,
    measure: Measure | None = None,
    on_risk: OnRisk = "keep",
    mark: Mark = MARK,
    answer: str = ABSTENTION,
    question: str = "question",
    context: str = "context",
    format_documents: Callable[[list[Document]], Any] = join_documents,
    return_documents: bool = False,
) -> Runnable[str | Mapping[str, Any], Any]:
    """A chain that answers from retrieved documents. While the answer is too risky, it retrieves more and asks again::

        prompt = ChatPromptTemplate.from_template("Context: {context}\\n\\nQuestion: {question}")
        chain = with_risk_retry(retriever, prompt, ChatCocoa())
        message = chain.invoke("Who built the lighthouse?")
        message.response_metadata["cocoa_tries"]  # the attempts, and the risk of each answer

    The first answer whose risk is below ``threshold`` is returned, or else the least risky one of those whose risk has
    the same ``risk_source`` as the first: others have no order. ``response_metadata["cocoa_tries"]`` has an entry for
    each attempt, in order, with ``settings``, ``alpha``, ``top_k`` (``None`` if the retriever has none), ``documents``
    (their number), ``answer``, ``cocoa_risk``, ``risk`` and ``chosen``, which is true for the returned answer. Where
    the prompt has the texts of all documents as they are, every span has ``passage_attention``, by document.

    Each attempt works on copies of retrievers and model. The input is a question, or a mapping with the question and
    further variables of the prompt. Options of a call, such as ``max_tokens=64``, apply to every attempt; ``settings``
    take precedence. The chain returns its answer in one piece.

    An answer that a gate after the chat (``chat | risk_gate()``) raises an error for, or replaces, counts as too risky.
    If all are, the gate's error is raised where ``on_risk`` is not ``abstain``. To cite the documents, put
    :func:`with_citations` after the chain, with ``return_documents=True``.

    Args:
        retriever: the retriever of the first attempt, or another runnable from a question to documents.
        prompt: a prompt template, or another runnable from a dict to a prompt.
        chat: the model, in this process or a remote one. Its settings are those of the first attempt.
        threshold: the value, in [0, 1], from which a risk is too high. Default: the threshold in the answer's report.
        max_tries: maximum number of attempts.
        settings: options of a call of the model for each further attempt, such as ``[{"alpha": 5.0}]``; the last ones
            are used for all remaining attempts. Default: alpha is doubled each time.
        alphas: short for settings that change alpha only: ``alphas=[5.0]`` is ``settings=[{"alpha": 5.0}]``.
        top_k_growth: the factor by which the number of documents grows with each further attempt, for retrievers that
            have one (``k``, or ``search_kwargs`` of a vector store). Default: 2, or 1 with a second retriever.
        second_retriever: its documents are added to those of ``retriever`` from the second attempt on.
        measure: the risk to compare, ``"max_risk"``, ``"mean_risk"`` or ``"answer_risk"`` of the report. Default:
            ``"answer_risk"`` where the report has one, and otherwise ``"max_risk"``; always ``"max_risk"`` with a
            threshold.
        on_risk: what happens if every attempt is too risky. ``keep``: the least risky answer is returned. ``raise`` a
            ``HallucinationRiskError``. ``mark`` the spans of that answer that reach the threshold, or with a threshold
            for another ``measure`` than ``"max_risk"`` those that are flagged. ``abstain``: the text is ``answer``, and
            tool calls are dropped. The report then has ``gate``, as after a :func:`risk_gate`.
        mark: how to mark a span, as in :func:`risk_gate`.
        answer: the text that replaces the answer with ``abstain``.
        question: the variable of the prompt, and key of the input, that holds the question.
        context: the variable of the prompt that holds the documents.
        format_documents: makes the value of ``context`` from the documents.
        return_documents: return a dict of the input with the documents of the answer under ``context`` and the message
            under ``"answer"``, as LangChain's retrieval chains do, instead of the message.

    Raises:
        ConfigError: an argument has a wrong type or is out of range, or every attempt would be the same. A call raises
            it if the input has no question.
        HallucinationRiskError: a call raises it if every attempt is too risky, with ``on_risk="raise"``.
    """
    if not isinstance(called_model(chat), ChatCocoa):
        raise ConfigError(f"with_risk_retry takes a ChatCocoa, not a {type(chat).__name__}. {AFTER_A_RETRY}")
    if called_model(chat).alpha is None:  # left to the server
        chat = chat.bind(alpha=CocoaConfig().alpha)
    for name, runnable in (("retriever", retriever), ("prompt", prompt), ("second_retriever", second_retriever)):
        if not isinstance(runnable, Runnable) and not (runnable is None and name == "second_retriever"):
            raise ConfigError(f"{name} takes a runnable, not a {type(runnable).__name__}.")
    model = called_model(chat)
    plan = RetryPlan(
        alpha=model.alpha,
        retriever=retriever,
        top_k=top_k_of(retriever),
        has_second=second_retriever is not None,
        is_same=lambda step: called_model(chat, options=step).calls_like(model),
        threshold=threshold,
        max_tries=max_tries,
        settings=settings,
        alphas=alphas,
        top_k_growth=top_k_growth,
        measure=measure,
        on_risk=on_risk,
        mark=mark,
        answer=answer,
    )

    async def calls(prompt: Any, chat: Any, inputs: Any, asker: Asker, options: Mapping[str, Any]) -> Any:
        values = dict(inputs) if isinstance(inputs, Mapping) else {question: inputs}
        if not isinstance(values.get(question), str):
            raise ConfigError(f"the input needs a text under {question!r}, the question to retrieve documents for.")
        tries = Tries[tuple[AIMessage, list[Document]]](plan)
        for number, step in enumerate(plan.steps):
            grown = with_top_k(retriever, plan.growth**number)
            retrieved = [await asker.ask(grown, values[question])]
            if number and second_retriever is not None:
                retrieved.append(await asker.ask(second_retriever, values[question]))
            documents = without_duplicates(*retrieved)
            filled = await asker.ask(prompt, {**values, context: format_documents(documents)})
            called = {**options, **step}
            model = called_model(chat, asker.config, called)
            texts = [document.page_content for document in documents]
            if texts and not model.source:
                in_prompt = find_in(await asker.prompt_text(model, filled), texts)
                if len(in_prompt) == len(texts):  # not if the prompt lacks the text of one of them
                    called["source"] = [text.strip() for text in texts]
            try:
                message = await asker.ask(chat, filled, **called)
            except HallucinationRiskError as error:  # of a gate after the chat
                if error.answer is None:
                    raise
                message = error.answer
            message = answers.require_message(message, "with_risk_retry")
            entry = {"settings": dict(step), "alpha": model.alpha, "top_k": top_k_of(grown)}
            entry |= {"documents": len(documents), "answer": message.text}
            if tries.add((message, documents), get_risk(message), **entry):
                break
        (message, documents), history = tries.best()
        if (gate := tries.gate()) is not None:
            if gate.action == "abstain":
                message = answers.without_tool_calls(message)
            if not answers.calls_tools(message):
                change = plan.change(gate, message.text, get_risk(message))
                message = answers.with_change(message, change)
            message = answers.with_report(message, get_risk(message).with_values(gate=gate))
        metadata = {**message.response_metadata, TRIES_KEY: history}
        message = message.model_copy(update={"response_metadata": metadata})
        return {**values, context: documents, "answer": message} if return_documents else message

    return chain_of("with_risk_retry", calls, prompt, chat)


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
