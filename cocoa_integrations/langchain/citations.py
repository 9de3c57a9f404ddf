"""Answers from documents that cite the document that each part was taken from."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import safe_logger
from cocoa_integrations._shared import citations as shared
from cocoa_integrations._shared.citations import CITATIONS_KEY, MIN_ATTENTION
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.limits import require_finite
from cocoa_integrations._shared.tries import run_blocking
from cocoa_integrations.langchain.answers import require_message, with_change, with_spans
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.composed import called_model
from cocoa_integrations.reports import get_risk, get_spans

logger = safe_logger(__name__)

AFTER_A_RETRY = "Citations follow a retry: with_risk_retry(..., return_documents=True) | with_citations(prompt, chat)."


class Asker:
    """Asks the runnables of a chain. In the synchronous form of a call it blocks, and suspends nothing."""

    def __init__(self, config: RunnableConfig, *, blocks: bool) -> None:
        self.config, self._blocks = config, blocks

    async def ask(self, runnable: Runnable[Any, Any], inputs: Any, **options: Any) -> Any:
        if self._blocks:
            return runnable.invoke(inputs, self.config, **options)
        return await runnable.ainvoke(inputs, self.config, **options)

    async def prompt_text(self, chat: ChatCocoa, prompt: LanguageModelInput) -> str:
        if self._blocks or chat.is_remote:
            return chat.prompt_text(prompt)
        text: str = await chat.in_worker(chat.prompt_text, prompt)
        return text


def chain_of(
    name: str, calls: Callable[..., Coroutine[Any, Any, Any]], prompt: Any, chat: Any
) -> RunnableLambda[Any, Any]:
    """A runnable that calls a function with the prompt, the chat, an input, an :class:`Asker` and options of a call."""

    # LangChain finds the runnables of a chain among the variables that these functions name
    def run(inputs: Any, config: RunnableConfig, **options: Any) -> Any:
        return run_blocking(calls(prompt, chat, inputs, Asker(config, blocks=True), options))

    async def arun(inputs: Any, config: RunnableConfig, **options: Any) -> Any:
        return await calls(prompt, chat, inputs, Asker(config, blocks=False), options)

    return RunnableLambda(run, arun, name=name)


def join_documents(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def with_citations(
    prompt: Runnable[Any, Any],
    chat: ChatCocoa,
    *,
    context: str = "context",
    format_documents: Callable[[list[Document]], Any] = join_documents,
    min_attention: float = MIN_ATTENTION,
    markers: bool = True,
) -> Runnable[Mapping[str, Any], AIMessage]:
    """``prompt | chat`` as one runnable whose answers cite the document that each part was taken from::

        prompt = ChatPromptTemplate.from_template("Context: {context}\\n\\nQuestion: {question}")
        chain = {"context": retriever, "question": RunnablePassthrough()} | with_citations(prompt, chat)
        message = chain.invoke("Who built the lighthouse?")
        print(message.text)  # It was built by Marta Lindqvist [1].
        message.response_metadata["cocoa_citations"]

    The source of a part is the document that the model's retrieval heads attend to most while it is written. ``[n]`` is
    the n-th document of the input. A document is cited only if its text is in the prompt as it is, and none if
    the model's attention cannot be measured. A warning is logged then.

    ``cocoa_citations`` has an entry for each citation with ``source`` (from 1), ``id`` (of the document, or ``None``),
    ``metadata`` (of the document), ``start``, ``end``, ``text``, ``attention`` and ``spans``. Each entry of the spans
    in ``cocoa_risk``, and of ``cocoa_spans`` if the message has them, has ``source``, and ``source_attentions`` by
    document. All offsets refer to the text with markers. If the model reasoned, its reasoning is not cited, and the
    offsets of spans count from the beginning of the generated text.

    An input that has a message under ``"answer"``, as from ``with_risk_retry(..., return_documents=True)``, is cited as
    it is, and the model is not asked. Gates, marks and citations can follow each other in any order.

    The attention is measured while the answer is written, and costs no forward pass. The message is returned in one
    piece.

    Args:
        prompt: a prompt template, or another runnable from a dict to a prompt.
        chat: the model, in this process or a remote one.
        context: the variable of the input that holds the list of documents.
        format_documents: makes the value of that variable in the prompt.
        min_attention: the lowest attention of a part on the document it cites, in [0, 1].
        markers: whether the text of the message gets the markers, at the end of its sentences and clauses. A message
            with tool calls gets none.

    Raises:
        ConfigError: ``chat`` is another model, or ``min_attention`` is not a finite number. A call raises it if the
            input has no list of documents.
    """
    if not isinstance(called_model(chat), ChatCocoa):
        raise ConfigError(f"with_citations takes a ChatCocoa, not a {type(chat).__name__}. {AFTER_A_RETRY}")
    require_finite("min_attention", min_attention)

    async def calls(prompt: Any, chat: Any, values: Any, asker: Asker, options: Mapping[str, Any]) -> AIMessage:
        documents = values.get(context) if isinstance(values, Mapping) else None
        if not isinstance(documents, Sequence) or not all(isinstance(document, Document) for document in documents):
            raise ConfigError(f"the input needs a list of documents under {context!r}.")
        called = called_model(chat, asker.config, options)
        texts = [document.page_content for document in documents]
        filled = await asker.ask(prompt, {**values, context: format_documents([*documents])})
        most = shared.MOST_PASSAGES if called.is_remote else None
        in_prompt = shared.find_in(await asker.prompt_text(called, filled), texts)[:most]
        message = values.get("answer")
        if isinstance(message, AIMessage):
            in_prompt = in_prompt if len(in_prompt) == len(texts) else []  # else its passages are not known
        else:
            source = [texts[number].strip() for number in in_prompt]
            try:
                message = await asker.ask(chat, filled, **{**options, "source": source})
            except Exception as error:
                # a server's chat template can change or drop the text of a message
                if getattr(error, "param", None) not in ("cocoa.source", "source"):
                    raise
                in_prompt, message = [], await asker.ask(chat, filled, **{**options, "source": []})
        spans = get_spans(message := require_message(message, "with_citations"))
        measured = [span.passage_attention or [] for span in spans]
        if spans and {len(values) for values in measured if values} != {len(in_prompt)}:
            in_prompt = []  # the answer was written with other passages, or its model's attention cannot be seen
        if any(text.strip() for number, text in enumerate(texts) if number not in in_prompt):
            logger.warning(shared.NOT_CITED)
        attentions = [shared.spread(values if in_prompt else [], in_prompt, len(documents)) for values in measured]
        return cited(message, attentions, documents, min_attention=min_attention, markers=markers)

    return chain_of("with_citations", calls, prompt, chat)


def cited(
    message: AIMessage,
    attentions: Sequence[Sequence[float | None]],
    documents: Sequence[Document],
    *,
    min_attention: float,
    markers: bool = True,
) -> AIMessage:
    """A copy of an answer that cites documents; ``attentions`` are those of each span, by document."""
    report, spans = get_risk(message), get_spans(message)
    edited = EditedText.find(message.text, report)
    # in a message with tool calls, which the text lacks, offsets are those in the generated text
    text = edited or EditedText("".join(span.text or "" for span in spans))
    shown = text.spans(spans)
    citations, sourced = shared.citations_of(shown, [attentions[span.span] for span in shown], min_attention)
    for number, citation in enumerate(citations):
        document, numbers = documents[citation.source - 1], [shown[index].span for index in citation.spans]
        citations[number] = citation.with_values(id=document.id, metadata=dict(document.metadata), spans=numbers)
    sources = {span.span: span.source for span in sourced}
    for number, (span, of_span) in enumerate(zip(spans, attentions, strict=True)):
        spans[number] = span.with_values(source=sources.get(span.span), source_attentions=list(of_span))
    message = with_spans(message, report, spans)
    placed = [citation.to_dict() for citation in text.placed(citations, text.begin)]
    message = message.model_copy(update={"response_metadata": {**message.response_metadata, CITATIONS_KEY: placed}})
    return with_change(message, shared.with_markers(text, citations, report)) if markers and edited else message
