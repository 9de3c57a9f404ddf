"""Answers from documents: how much each changed an answer, and the document that each part was taken from."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from cocoa_engine import ContextLift, context_lift_of_text
from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import safe_logger
from cocoa_engine.report import SpanReport
from cocoa_integrations._shared import citations as shared
from cocoa_integrations._shared.citations import CITATIONS_KEY, CitedBy
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.options import config_of
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

    async def run(self, chat: ChatCocoa, work: Callable[[], Any]) -> Any:
        return work() if self._blocks or chat.is_remote else await chat.in_worker(work)


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
    by: CitedBy | None = None,
    min_lift: float | None = None,
    min_attention: float | None = None,
    markers: bool = True,
) -> Runnable[Mapping[str, Any], AIMessage]:
    """``prompt | chat`` as one runnable whose answers cite the document that each part was taken from::

        prompt = ChatPromptTemplate.from_template("Context: {context}\\n\\nQuestion: {question}")
        chain = {"context": retriever, "question": RunnablePassthrough()} | with_citations(prompt, chat)
        message = chain.invoke("Who built the lighthouse?")
        print(message.text)  # It was built by Marta Lindqvist [1].
        message.response_metadata["cocoa_citations"]

    By attention, the source of a part is the document that the model's retrieval heads attend to most while it is
    written; by lift, the document without which the answer, fed again, gives the part the lowest log p. ``[n]`` is the
    n-th document of the input.

    ``cocoa_citations`` has an entry for each citation with ``source`` (from 1), ``id`` (of the document, or ``None``),
    ``metadata`` (of the document), ``start``, ``end``, ``text``, ``lift`` (in nats) or ``attention``, and ``spans``.
    Each entry of the spans in ``cocoa_risk``, and of ``cocoa_spans`` if the message has them, has ``source``, and
    ``source_lifts`` or ``source_attentions``, by document. All offsets refer to the text with markers. If the model
    reasoned, its reasoning is not cited, and the offsets of spans count from the beginning of the generated text.

    If two documents say the same, leaving out one of them changes little, and neither may be cited. A high lift shows
    that the text depends on the document, not that it is true.

    An input that has a message under ``"answer"``, as from ``with_risk_retry(..., return_documents=True)``, is cited as
    it is, and the model is not asked. Gates, marks and citations can follow each other in any order.

    Cost: by attention none: it is measured while the answer is written. By lift two forward passes over prompt and
    answer for each document. The message is returned in one piece.

    Args:
        prompt: a prompt template, or another runnable from a dict to a prompt.
        chat: the model, in this process or, by attention, a remote one.
        context: the variable of the input that holds the list of documents.
        format_documents: makes the value of that variable in the prompt.
        by: what finds the source of a part, ``"attention"`` or ``"lift"``. Attention needs a model whose attention can
            be seen, and the text of each document in the prompt as it is. Default: attention, and where that is not so
            lift with a model in this process (a warning is logged); lift if ``min_lift`` alone is given.
        min_lift: the lowest lift of a cited part, in nats. Default: 1.
        min_attention: the lowest attention of a part on the document it cites, in [0, 1]. Default: 0.05.
        markers: whether the text of the message gets the markers, at the end of its sentences and clauses. A message
            with tool calls gets none.

    Raises:
        ConfigError: ``chat`` is another model, ``by`` is unknown, or a limit is not a finite number. A call raises it
            if the input has no list of documents, or if ``by="attention"`` cannot be measured.
    """
    if not isinstance(called_model(chat), ChatCocoa):
        raise ConfigError(f"with_citations takes a ChatCocoa, not a {type(chat).__name__}. {AFTER_A_RETRY}")
    cite = shared.citing(by, min_lift, min_attention)
    if cite.by == "lift" and called_model(chat).is_remote:
        raise ConfigError("by='lift' feeds the answer again, which needs a model in this process; give by='attention'.")

    def filled(values: Mapping[str, Any], left_out: Document | None = None) -> dict[str, Any]:
        return {**values, context: format_documents([part for part in values[context] if part is not left_out])}

    async def calls(prompt: Any, chat: Any, values: Any, asker: Asker, options: Mapping[str, Any]) -> AIMessage:
        documents = values.get(context) if isinstance(values, Mapping) else None
        if not isinstance(documents, Sequence) or not all(isinstance(document, Document) for document in documents):
            raise ConfigError(f"the input needs a list of documents under {context!r}.")
        called = called_model(chat, asker.config, options)
        texts = [document.page_content for document in documents]
        full = await asker.ask(prompt, filled(values))
        in_prompt: list[int] = []
        if cite.by != "lift":
            most = shared.MOST_PASSAGES if called.is_remote else None
            in_prompt = shared.find_in(await asker.run(called, partial(called.prompt_text, full)), texts)[:most]
        message = values.get("answer")
        if isinstance(message, AIMessage):
            in_prompt = in_prompt if len(in_prompt) == len(texts) else []  # else its passages are not known
        else:
            attended = {} if cite.by == "lift" else {"source": [texts[number].strip() for number in in_prompt]}
            try:
                message = await asker.ask(chat, full, **options, **attended)
            except Exception as error:
                # a server's chat template can change or drop the text of a message
                if cite.by is not None or getattr(error, "param", None) not in ("cocoa.source", "source"):
                    raise
                in_prompt, message = [], await asker.ask(chat, full, **options, source=[])
        spans = get_spans(message := require_message(message, "with_citations"))
        if any(len(span.passage_attention or in_prompt) != len(in_prompt) for span in spans):
            in_prompt = []  # it was written with other passages
        by: CitedBy = cite.by or "attention"
        why = None
        if in_prompt and spans and not any(span.passage_attention for span in spans):
            why = shared.NOT_SEEN
        elif any(text.strip() for number, text in enumerate(texts) if number not in in_prompt):
            why = shared.NOT_FOUND
        if why == shared.NOT_SEEN and cite.by == "attention":
            raise ConfigError(shared.CANNOT_ATTEND)
        if why is not None and cite.by is None:
            by = "attention" if called.is_remote else "lift"
            what = "some sources are not cited" if called.is_remote else "citations are by lift"
            logger.warning("%s, because %s", what, why)
        if by == "attention":
            values_of = [shared.spread(span.passage_attention, in_prompt, len(documents)) for span in spans]
        else:
            rest = [await asker.ask(prompt, filled(values, document)) for document in documents]
            lifts = await asker.run(called, partial(_lifts, called, spans, full, *rest))
            values_of = [[shared.lift_in_nats(lift[number]) for lift in lifts] for number in range(len(spans))]
        return cited(message, values_of, documents, lowest=cite.lowest[by], by=by, markers=markers)

    return chain_of("with_citations", calls, prompt, chat)


def _lifts(
    chat: ChatCocoa, spans: Sequence[SpanReport], full: LanguageModelInput, *without: LanguageModelInput
) -> list[list[ContextLift | None]]:
    """For each prompt without a context, how this context changed each span."""
    texts = [span.text or "" for span in spans]
    if not any(texts):
        return [[None] * len(texts) for _ in without]
    engine, config, full_ids = chat.load(), config_of(chat), chat.prompt_ids(full)
    return [context_lift_of_text(engine, texts, full_ids, chat.prompt_ids(prompt), config) for prompt in without]


def cited(
    message: AIMessage,
    values: Sequence[Sequence[float | None]],
    documents: Sequence[Document],
    *,
    lowest: float,
    by: CitedBy,
    markers: bool = True,
) -> AIMessage:
    """A copy of an answer that cites documents; ``values`` are the lift or the attention of each span, by document."""
    report, spans = get_risk(message), get_spans(message)
    edited = EditedText.find(message.text, report)
    # in a message with tool calls, which the text lacks, offsets are those in the generated text
    text = edited or EditedText("".join(span.text or "" for span in spans))
    shown = text.spans(spans)
    citations, sourced = shared.citations_of(shown, [values[span.span] for span in shown], lowest, by)
    for number, citation in enumerate(citations):
        document, numbers = documents[citation.source - 1], [shown[index].span for index in citation.spans]
        citations[number] = citation.with_values(id=document.id, metadata=dict(document.metadata), spans=numbers)
    sources = {span.span: span.source for span in sourced}
    for number, (span, of_span) in enumerate(zip(spans, values, strict=True)):
        spans[number] = span.with_values(source=sources.get(span.span), **{shared.VALUES[by]: list(of_span)})
    message = with_spans(message, report, spans)
    placed = [citation.to_dict() for citation in text.placed(citations, text.begin)]
    message = message.model_copy(update={"response_metadata": {**message.response_metadata, CITATIONS_KEY: placed}})
    return with_change(message, shared.with_markers(text, citations, report)) if markers and edited else message


def context_lift(
    chat: ChatCocoa, message: AIMessage, prompt: LanguageModelInput, prompt_without_context: LanguageModelInput
) -> AIMessage:
    """Measure how much the context changed each span of an answer. Takes two forward passes.

    Every entry of the spans in ``cocoa_risk``, and of ``cocoa_spans`` if the message has them, gets ``context_lift``
    (log p with the context minus log p without it, in nats; near or below 0: not from the context), ``con_mlds_lift``
    and ``f_mlds_lift``. The text is tokenized again, and its probabilities are those without logits processors.

    Args:
        chat: the model that answered, or one with the same engine.
        message: the answer, from ``invoke`` or as the sum of the chunks of a stream.
        prompt: the prompt that was answered: a text, messages or a prompt value.
        prompt_without_context: the same prompt without the context.

    Returns:
        A copy of the message with the added values.

    Raises:
        ConfigError: the message carries no spans, or ``chat`` is not a ChatCocoa.
        PromptError: a prompt and the answer together do not fit the context window.
    """
    chat = called_model(chat)
    if not isinstance(chat, ChatCocoa) or chat.is_remote:
        raise ConfigError(f"context lift is measured with a ChatCocoa in this process, not a {type(chat).__name__}.")
    report, spans = get_risk(message), get_spans(message)
    if any(span.text is None for span in spans):
        raise ConfigError("the text of the message was changed after it was generated, so its spans are not known.")
    if not any(span.text for span in spans):
        return message.model_copy(deep=True)
    [lifts] = _lifts(chat, spans, prompt, prompt_without_context)
    return with_spans(message, report, shared.with_lifts(spans, lifts))


def with_context_lift(
    prompt: Runnable[Any, Any], chat: ChatCocoa, *, context: str | Sequence[str] = "context", empty: Any = ""
) -> Runnable[Mapping[str, Any], AIMessage]:
    """``prompt | chat`` as one runnable whose answers have the context lift of every span.

    The prompt is formatted a second time with an empty context::

        prompt = ChatPromptTemplate.from_template("Context: {context}\\n\\nQuestion: {question}")
        chain = {"context": retriever | join, "question": RunnablePassthrough()} | with_context_lift(prompt, chat)
        get_spans(chain.invoke("Who built the lighthouse?"))[0].context_lift

    The runnable returns its message in one piece, because the lift is only known at the end. Options of a call, such as
    ``alpha=1.0``, are passed to the model.

    Args:
        prompt: a prompt template, or another runnable from a dict to a prompt.
        chat: the model.
        context: the variable, or variables, of the prompt that contain the context.
        empty: the value of these variables without the context; for a ``MessagesPlaceholder`` it is ``[]``.

    Raises:
        ConfigError: ``chat`` is not a ChatCocoa. A call raises it if a variable of the context is missing from the
            input.
    """
    if not isinstance(called := called_model(chat), ChatCocoa) or called.is_remote:
        raise ConfigError(f"with_context_lift takes a ChatCocoa in this process, not a {type(chat).__name__}.")
    names = (context,) if isinstance(context, str) else tuple(context)

    async def calls(prompt: Any, chat: Any, values: Any, asker: Asker, options: Mapping[str, Any]) -> AIMessage:
        missing = [name for name in names if not isinstance(values, Mapping) or name not in values]
        if missing:
            raise ConfigError(f"the input has no {', '.join(missing)}, which should hold the context.")
        full = await asker.ask(prompt, values)
        without_source = await asker.ask(prompt, {**values, **dict.fromkeys(names, empty)})
        called = called_model(chat, asker.config, options)
        message = require_message(await asker.ask(chat, full, **options), "with_context_lift")
        return await asker.run(called, partial(context_lift, called, message, full, without_source))

    return chain_of("with_context_lift", calls, prompt, chat)
