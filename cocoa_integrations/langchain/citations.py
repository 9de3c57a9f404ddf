"""Answers from documents that cite, for each part, the document that it was taken from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from cocoa_engine import context_lift_of_text
from cocoa_engine.errors import ConfigError
from cocoa_integrations._shared.citations import (
    CANNOT_ATTEND,
    CITATIONS_KEY,
    MIN_ATTENTION,
    MIN_LIFT,
    VALUES,
    CitedBy,
    citations_of,
    find_in,
    lift_in_nats,
    require_limits,
    spread,
    with_markers,
)
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.settings import config_of
from cocoa_integrations.langchain.base import in_worker_of
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.cocoa_chat import CocoaChat
from cocoa_integrations.langchain.composed import called_model
from cocoa_integrations.langchain.detail import set_report
from cocoa_integrations.langchain.edits import with_change
from cocoa_integrations.langchain.retry import join_documents
from cocoa_integrations.langchain.runnables import get_risk, get_spans


def with_citations(
    prompt: Runnable[Any, Any],
    chat: CocoaChat,
    *,
    context: str = "context",
    format_documents: Callable[[list[Document]], Any] = join_documents,
    by: CitedBy = "lift",
    min_lift: float = MIN_LIFT,
    min_attention: float = MIN_ATTENTION,
    markers: bool = True,
) -> Runnable[Mapping[str, Any], AIMessage]:
    """``prompt | chat`` as one runnable whose answers cite the document that each part was taken from::

        prompt = ChatPromptTemplate.from_template("Context: {context}\\n\\nQuestion: {question}")
        chain = {"context": retriever, "question": RunnablePassthrough()} | with_citations(prompt, chat)
        message = chain.invoke("Who built the lighthouse?")
        print(message.text)  # It was built by Marta Lindqvist [1].
        message.response_metadata["cocoa_citations"]

    With ``by="lift"`` each document is left out of the prompt in turn, and the answer is fed again. The source of a
    part is the document whose absence lowers the part's log p most. With ``by="attention"`` it is the document that the
    model's retrieval heads attend to most while the part is written. ``[n]`` is the n-th document of the input.

    ``cocoa_citations`` has an entry for each citation with ``source`` (from 1), ``id`` (of the document, or ``None``),
    ``metadata`` (of the document), ``start``, ``end``, ``text``, ``lift`` (in nats) or ``attention``, and ``spans``.
    Each entry of the spans in ``cocoa_risk``, and of ``cocoa_spans`` if the message has them, has ``source``, and
    ``source_lifts`` or ``source_attentions``, by document. All offsets refer to the text with markers. If the model
    reasoned, its reasoning is not cited, and the offsets of spans count from the beginning of the generated text.

    A low lift does not mean that no document supports a part. If two documents say the same, leaving out one of them
    changes little, and neither may be cited. A high lift shows that the text depends on the document, not that it is
    true.

    Cost: by lift two forward passes over prompt and answer for each document, by attention none: it is measured while
    the answer is written. The message is returned in one piece.

    Args:
        prompt: a prompt template, or another runnable from a dict to a prompt.
        chat: the model, in this process or, with ``by="attention"``, a remote one.
        context: the variable of the input that holds the list of documents.
        format_documents: makes the value of that variable in the prompt.
        by: what finds the source of a part. ``"attention"`` needs a model whose attention can be seen, and the text
            of each document in the prompt as it is. It was measured with the model's retrieval heads (``cocoa heads``).
        min_lift: the lowest lift of a cited part, in nats.
        min_attention: the lowest attention of a part on the document it cites, in [0, 1].
        markers: whether the text of the message gets the markers. A message with tool calls gets none.

    Raises:
        ConfigError: ``chat`` is another model, ``by`` is unknown, or a limit is not a finite number. A call raises it
            if the input has no list of documents, or if citations by attention cannot be measured.
    """
    if not isinstance(called_model(chat), CocoaChat):
        raise ConfigError(f"with_citations takes a ChatCocoa or a ChatCocoaRemote, not a {type(chat).__name__}.")
    lowest = require_limits(by, min_lift, min_attention)
    if by == "lift" and not isinstance(called_model(chat), ChatCocoa):
        raise ConfigError(
            "by='lift' feeds the answer again, which needs a model in this process, a ChatCocoa; give by='attention'."
        )

    def values_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The values of the prompt with all documents, then, for citations by lift, without each."""
        documents = values.get(context) if isinstance(values, Mapping) else None
        if not isinstance(documents, Sequence) or not all(isinstance(one, Document) for one in documents):
            raise ConfigError(f"the input needs a list of documents under {context!r}.")
        left_out_in_turn = documents if by == "lift" else ()
        without = [[one for one in documents if one is not left_out] for left_out in left_out_in_turn]
        return [{**values, context: format_documents(kept)} for kept in (list(documents), *without)]

    def measured(
        called: CocoaChat,
        message: AIMessage,
        prompts: Sequence[Any],
        documents: Sequence[Document],
        in_prompt: Sequence[int],
    ) -> AIMessage:
        spans = get_spans(message)
        lifts: list[list[float | None]] = [[None] * len(documents) for _ in spans]
        if by == "attention":
            attention = [span.get("passage_attention", []) for span in spans]
            if in_prompt and spans and not any(attention):
                raise ConfigError(CANNOT_ATTEND)
            lifts = [spread(of_span, in_prompt, len(documents)) for of_span in attention]
        elif isinstance(called, ChatCocoa) and any(span["text"] for span in spans):
            engine, config = called.load(), config_of(called)
            full, *without_sources = (called.prompt_ids(one) for one in prompts)
            texts = [span["text"] for span in spans]
            columns = [context_lift_of_text(engine, texts, full, without, config) for without in without_sources]
            lifts = [[lift_in_nats(column[number]) for column in columns] for number in range(len(spans))]
        return cited(message, lifts, documents, lowest=lowest, by=by, markers=markers)

    def attending(prompt_text: str, documents: Sequence[Document]) -> tuple[list[int], dict[str, Any]]:
        """The numbers of the documents to attend to, and the option of a call that names them."""
        if by == "lift":
            return [], {}
        texts = [one.page_content for one in documents]
        in_prompt = find_in(prompt_text, texts)
        return in_prompt, {"source": [texts[number].strip() for number in in_prompt]}

    def answer(values: Mapping[str, Any], config: RunnableConfig, **options: Any) -> AIMessage:
        filled = values_of(values)
        prompts = [prompt.invoke(one, config) for one in filled]
        called = called_model(chat, config, options)
        in_prompt, more = attending(called.prompt_text(prompts[0]), values[context])
        message = chat.invoke(prompts[0], config, **options, **more)
        return measured(called, message, prompts, values[context], in_prompt)

    async def aanswer(values: Mapping[str, Any], config: RunnableConfig, **options: Any) -> AIMessage:
        filled = values_of(values)
        prompts = [await prompt.ainvoke(one, config) for one in filled]
        called = called_model(chat, config, options)
        in_prompt, more = (
            ([], {}) if by == "lift" else attending(await called.aprompt_text(prompts[0]), values[context])
        )
        message = await chat.ainvoke(prompts[0], config, **options, **more)
        if not isinstance(called, ChatCocoa):
            return measured(called, message, prompts, values[context], in_prompt)
        return await in_worker_of(called, measured, called, message, prompts, values[context], in_prompt)

    return RunnableLambda(answer, aanswer, name="with_citations")


def cited(
    message: AIMessage,
    values: Sequence[Sequence[float | None]],
    documents: Sequence[Document],
    *,
    lowest: float,
    by: CitedBy,
    markers: bool = True,
) -> AIMessage:
    """A copy of an answer that cites documents.

    Args:
        message: the answer.
        values: for each span, the lift or the attention by each document.
        documents: the documents.
        lowest: the lowest value of a cited part.
        by: what the values are.
        markers: whether the text gets the markers.
    """
    message = message.model_copy(deep=True)
    report, spans = get_risk(message), get_spans(message)
    found = EditedText.find(message.text, report)
    # in a message with tool calls, which the text lacks, offsets are those in the generated text
    text = EditedText("".join(span["text"] for span in spans)) if found is None else found
    shown = text.spans(spans)
    citations = citations_of(shown, [values[span["span"]] for span in shown], lowest, by)
    for citation in citations:
        document = documents[citation["source"] - 1]
        citation |= {"id": document.id, "metadata": dict(document.metadata)}
        citation["spans"] = [shown[number]["span"] for number in citation["spans"]]
    for span, of_span in zip(spans, values, strict=True):
        span |= {"source": None, VALUES[by]: list(of_span)}
    for span in shown:
        spans[span["span"]]["source"] = span["source"]
    report["spans"] = [dict(span) for span in spans]
    set_report(message, report, spans)
    message.response_metadata[CITATIONS_KEY] = text.placed(citations, text.begin)
    return with_change(message, with_markers(text, citations)) if markers and citations and found else message
