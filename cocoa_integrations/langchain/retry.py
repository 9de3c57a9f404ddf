"""A chain that answers from retrieved documents, and tries again while the answer is too risky."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_integrations._shared.citations import find_in
from cocoa_integrations._shared.limits import Limit
from cocoa_integrations._shared.tries import TRIES_KEY, Measure, Tries, growth_of, limit_of_tries
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.cocoa_chat import CocoaChat
from cocoa_integrations.langchain.composed import called_model
from cocoa_integrations.langchain.context_lift import with_context_lift
from cocoa_integrations.langchain.more_documents import Retriever, top_k_of, with_top_k, without_duplicates
from cocoa_integrations.langchain.runnables import get_risk


def in_prompt_of(chat: CocoaChat, prompt: str, documents: Sequence[Document]) -> dict[str, Any]:
    """The option that names the documents as passages of a prompt; none if the prompt lacks the text of one of them."""
    texts = [document.page_content for document in documents]
    if not texts or chat.source or len(find_in(prompt, texts)) < len(texts):
        return {}
    return {"source": [text.strip() for text in texts]}


def join_documents(documents: Sequence[Document]) -> str:
    """The texts of documents, with an empty line between them."""
    return "\n\n".join(document.page_content for document in documents)


def with_risk_retry(
    retriever: Retriever,
    prompt: Runnable[Any, Any],
    chat: CocoaChat,
    *,
    threshold: float | None = None,
    max_tries: int = 3,
    settings: Sequence[Mapping[str, Any]] | None = None,
    top_k_growth: float | None = None,
    second_retriever: Retriever | None = None,
    measure: Measure | None = None,
    question: str = "question",
    context: str = "context",
    format_documents: Callable[[list[Document]], Any] = join_documents,
    context_lift: bool = False,
    return_documents: bool = False,
) -> Runnable[str | Mapping[str, Any], Any]:
    """A chain that answers from retrieved documents. While the answer is too risky, it retrieves more and asks again::

        prompt = ChatPromptTemplate.from_template("Context: {context}\\n\\nQuestion: {question}")
        chain = with_risk_retry(retriever, prompt, ChatCocoa())
        message = chain.invoke("Who built the lighthouse?")
        message.response_metadata["cocoa_tries"]  # the attempts, and the risk of each answer

    The first answer whose risk is below ``threshold`` is returned, or else the least risky one of those whose risk has
    the same ``risk_source`` as the first: others have no order. Its ``response_metadata["cocoa_tries"]`` has an entry
    for each attempt, in order, with ``settings``, ``alpha``, ``top_k`` (``None`` if the retriever has none),
    ``documents`` (their number), ``answer``, ``cocoa_risk``, ``risk`` and ``chosen``, which is true for the returned
    answer. Where the prompt has the texts of all documents as they are, every span of its report has
    ``passage_attention``, by document.

    Retrievers and model are not changed; each attempt works on copies. The input is a question, or a mapping
    with the question and further variables of the prompt. Options of a call, such as ``max_tokens=64``, apply to every
    attempt; ``settings`` take precedence. The chain returns its answer in one piece, because it must be complete before
    it can be returned.

    Args:
        retriever: the retriever of the first attempt, or another runnable from a question to documents.
        prompt: a prompt template, or another runnable from a dict to a prompt.
        chat: the model, in this process or a remote one. Its settings are those of the first attempt.
        threshold: the value, in [0, 1], from which a risk is too high. Default: the threshold in the answer's report.
        max_tries: maximum number of attempts.
        settings: options of a call of the model for each further attempt, such as ``[{"alpha": 5.0}]``; the last ones
            are used for all remaining attempts. Default: alpha is doubled each time.
        top_k_growth: the factor by which the number of documents grows with each further attempt, for retrievers that
            have one (``k``, or ``search_kwargs`` of a vector store). Default: 2, or 1 with a second retriever.
        second_retriever: its documents are added to those of ``retriever`` from the second attempt on.
        measure: the risk to compare, ``"max_risk"``, ``"mean_risk"`` or ``"answer_risk"`` of the report. Default:
            ``"answer_risk"`` where the report has one, and otherwise ``"max_risk"``; always ``"max_risk"`` with a
            threshold.
        question: the variable of the prompt, and key of the input, that holds the question.
        context: the variable of the prompt that holds the documents.
        format_documents: makes the value of ``context`` from the documents.
        context_lift: also measure the context lift of every span; see :func:`with_context_lift`.
        return_documents: return a dict of the input with the documents of the answer under ``context`` and the message
            under ``"answer"``, as LangChain's retrieval chains do, instead of the message.

    Raises:
        ConfigError: an argument has a wrong type or is out of range, or every attempt would be the same. A call raises
            it if the input has no question.
    """
    if not isinstance(called_model(chat), CocoaChat):
        raise ConfigError(f"with_risk_retry takes a ChatCocoa or a ChatCocoaRemote, not a {type(chat).__name__}.")
    if chat.alpha is None:  # left to the server
        chat = chat.bind(alpha=CocoaConfig().alpha)
    for name, given in (("retriever", retriever), ("prompt", prompt), ("second_retriever", second_retriever)):
        if not isinstance(given, Runnable) and not (given is None and name == "second_retriever"):
            raise ConfigError(f"{name} takes a runnable, not a {type(given).__name__}.")
    limit = limit_of_tries(threshold, max_tries, measure)
    growth = growth_of(top_k_growth, has_second=second_retriever is not None)
    if growth > 1 and max_tries > 1 and top_k_of(retriever) is None:
        raise ConfigError(
            f"a {type(retriever).__name__} has no number of documents to increase; give a second_retriever, or "
            "top_k_growth=1 to change only the settings."
        )
    steps = _settings(chat, settings, max_tries)
    if (
        growth == 1
        and second_retriever is None
        and max_tries > 1
        and all(called_model(chat, options=one).calls_like(called_model(chat)) for one in steps[1:])
    ):
        raise ConfigError(
            "every attempt would be the same: the settings do not change and nothing more is retrieved. Give settings, "
            "a top_k_growth above 1 or a second_retriever."
        )
    answering = None
    if context_lift:
        if not isinstance(called_model(chat), ChatCocoa):
            raise ConfigError("context_lift is measured on a model in this process, with a ChatCocoa; leave it out.")
        answering = with_context_lift(prompt, cast("ChatCocoa", chat), context=context)

    plan = _Plan(
        retriever=retriever,
        second_retriever=second_retriever,
        growth=growth,
        steps=steps,
        limit=limit,
        measure=measure,
        question=question,
        context=context,
        format_documents=format_documents,
        return_documents=return_documents,
    )

    # LangChain finds the runnables of a chain among the variables that these functions name
    def answer(given: str | Mapping[str, Any], config: RunnableConfig, **options: Any) -> Any:
        return _run(_calls(plan, prompt, chat, answering, given, config, options))

    async def aanswer(given: str | Mapping[str, Any], config: RunnableConfig, **options: Any) -> Any:
        return await _arun(_calls(plan, prompt, chat, answering, given, config, options))

    return cast(Runnable[str | Mapping[str, Any], Any], RunnableLambda(answer, aanswer, name="with_risk_retry"))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the attempts of a chain are made of. The fields are arguments of :func:`with_risk_retry`, checked.

    Attributes:
        growth: the factor by which the number of documents grows with each attempt.
        steps: the options of a call for each attempt.
        limit: the value from which a risk is too high.
    """

    retriever: Retriever
    second_retriever: Retriever | None
    growth: float
    steps: list[Mapping[str, Any]]
    limit: Limit
    measure: Measure | None
    question: str
    context: str
    format_documents: Callable[[list[Document]], Any]
    return_documents: bool

    def values(self, given: str | Mapping[str, Any]) -> dict[str, Any]:
        """The variables of the prompt, without the documents.

        Raises:
            ConfigError: the input has no question.
        """
        values = dict(given) if isinstance(given, Mapping) else {self.question: given}
        if not isinstance(values.get(self.question), str):
            raise ConfigError(
                f"the input needs a text under {self.question!r}, the question to retrieve documents for."
            )
        return values

    def attempt(
        self, number: int, chat: CocoaChat, options: Mapping[str, Any]
    ) -> tuple[list[Retriever], dict[str, Any], dict[str, Any]]:
        """The retrievers of an attempt, its options of a call, and what its history says about it."""
        grown = with_top_k(self.retriever, self.growth**number)
        more = [self.second_retriever] if number and self.second_retriever is not None else []
        called = {**options, **self.steps[number]}
        alpha = called_model(chat, options=called).alpha
        return [grown, *more], called, {"settings": dict(self.steps[number]), "alpha": alpha, "top_k": top_k_of(grown)}

    def result(self, tries: Tries[tuple[AIMessage, list[Document]]], values: dict[str, Any]) -> Any:
        """What the chain returns: the best answer, with the history of all attempts."""
        (message, documents), history = tries.best()
        metadata = {**message.response_metadata, TRIES_KEY: history}
        message = message.model_copy(update={"response_metadata": metadata})
        return {**values, self.context: documents, "answer": message} if self.return_documents else message


class _Call(NamedTuple):
    """A call that the chain makes, in both forms."""

    run: Callable[[], Any]
    arun: Callable[[], Awaitable[Any]]


def _invoke(runnable: Runnable[Any, Any], given: Any, config: RunnableConfig, **options: Any) -> _Call:
    return _Call(
        partial(runnable.invoke, given, config, **options), partial(runnable.ainvoke, given, config, **options)
    )


def _calls(
    plan: _Plan,
    prompt: Runnable[Any, Any],
    chat: CocoaChat,
    answering: Runnable[Any, Any] | None,
    given: str | Mapping[str, Any],
    config: RunnableConfig,
    options: Mapping[str, Any],
) -> Generator[_Call, Any, Any]:
    """The calls of one answer, in order. The result of each is sent back; what is returned is the chain's result."""
    values, tries = plan.values(given), Tries[tuple[AIMessage, list[Document]]](plan.limit, plan.measure)
    for number in range(len(plan.steps)):
        retrievers, called, entry = plan.attempt(number, chat, options)
        retrieved = []
        for one in retrievers:
            retrieved.append((yield _invoke(one, values[plan.question], config)))
        found = without_duplicates(*retrieved)
        filled = {**values, plan.context: plan.format_documents(found)}
        if answering is not None:
            message = yield _invoke(answering, filled, config, **called)
        else:
            asked = yield _invoke(prompt, filled, config)
            model = called_model(chat, config, called)
            text = yield _Call(partial(model.prompt_text, asked), partial(model.aprompt_text, asked))
            message = yield _invoke(chat, asked, config, **called, **in_prompt_of(model, text, found))
        if tries.add((message, found), get_risk(message), **entry, documents=len(found), answer=message.text):
            break
    return plan.result(tries, values)


def _run(calls: Generator[_Call, Any, Any]) -> Any:
    """Make calls one after the other, and return the result of the generator."""
    result = None
    while True:
        try:
            call = calls.send(result)
        except StopIteration as end:
            return end.value
        result = call.run()


async def _arun(calls: Generator[_Call, Any, Any]) -> Any:
    """The same, awaited."""
    result = None
    while True:
        try:
            call = calls.send(result)
        except StopIteration as end:
            return end.value
        result = await call.arun()


def _settings(chat: CocoaChat, given: Sequence[Mapping[str, Any]] | None, max_tries: int) -> list[Mapping[str, Any]]:
    """The options of a call for each attempt.

    Raises:
        ConfigError: the list is empty, or an option is unknown or out of range.
    """
    if given is None:
        alpha = chat.alpha
        further: list[Mapping[str, Any]] = [{"alpha": alpha * 2**number} for number in range(1, max_tries)]
    elif isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence) or not given:
        raise ConfigError(
            f"settings takes a list of options of a call, one dict for each further attempt (got {given!r})."
        )
    else:
        further = [*given, *[given[-1]] * max_tries][: max_tries - 1]
    for options in further:
        if not isinstance(options, Mapping):
            raise ConfigError(f"settings takes a dict for each further attempt, not {options!r}.")
        called_model(chat, options=options)
    return [{}, *further]
