"""A chain that answers from retrieved documents, and tries again while the answer is too risky."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_integrations._shared.citations import find_in
from cocoa_integrations._shared.limits import ABSTENTION, MARK, Limit, Mark
from cocoa_integrations._shared.tries import (
    TRIES_KEY,
    IfRisky,
    Measure,
    OnRisk,
    Tries,
    growth_of,
    limit_of_tries,
    settings_of_tries,
)
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.composed import called_model
from cocoa_integrations.langchain.context_lift import with_context_lift
from cocoa_integrations.langchain.edits import calls_tools, replaced, with_change, with_report, without_tool_calls
from cocoa_integrations.langchain.more_documents import Retriever, top_k_of, with_top_k, without_duplicates
from cocoa_integrations.langchain.runnables import (
    Calls,
    arun_calls,
    get_risk,
    invocation,
    prompt_text_of,
    require_message,
    run_calls,
)

AFTER_A_RETRY = "Citations follow a retry: with_risk_retry(..., return_documents=True) | with_citations(prompt, chat)."


def in_prompt_of(chat: ChatCocoa, prompt: str, documents: Sequence[Document]) -> dict[str, Any]:
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
    context_lift: bool = False,
    return_documents: bool = False,
) -> Runnable[str | Mapping[str, Any], Any]:
    """A chain that answers from retrieved documents. While the answer is too risky, it retrieves more and asks again::

        prompt = ChatPromptTemplate.from_template("Context: {context}\\n\\nQuestion: {question}")
        chain = with_risk_retry(retriever, prompt, ChatCocoa())
        message = chain.invoke("Who built the lighthouse?")
        message.response_metadata["cocoa_tries"]  # the attempts, and the risk of each answer

    The first answer whose risk is below ``threshold`` is returned, or else the least risky one of those whose risk has
    the same ``risk_source`` as the first: others have no order. ``on_risk="abstain"`` replaces that one by "I don't
    know.". The message's ``response_metadata["cocoa_tries"]`` has an entry
    for each attempt, in order, with ``settings``, ``alpha``, ``top_k`` (``None`` if the retriever has none),
    ``documents`` (their number), ``answer``, ``cocoa_risk``, ``risk`` and ``chosen``, which is true for the returned
    answer. Where the prompt has the texts of all documents as they are, every span of its report has
    ``passage_attention``, by document.

    Retrievers and model are not changed; each attempt works on copies. The input is a question, or a mapping
    with the question and further variables of the prompt. Options of a call, such as ``max_tokens=64``, apply to every
    attempt; ``settings`` take precedence. The chain returns its answer in one piece, because it must be complete before
    it can be returned.

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
        context_lift: also measure the context lift of every span; see :func:`with_context_lift`.
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
    for name, given in (("retriever", retriever), ("prompt", prompt), ("second_retriever", second_retriever)):
        if not isinstance(given, Runnable) and not (given is None and name == "second_retriever"):
            raise ConfigError(f"{name} takes a runnable, not a {type(given).__name__}.")
    limit = limit_of_tries(threshold, max_tries, measure)
    if_risky = IfRisky(on_risk=on_risk, mark=mark, answer=answer)
    growth = growth_of(top_k_growth, has_second=second_retriever is not None)
    if growth > 1 and max_tries > 1 and top_k_of(retriever) is None:
        raise ConfigError(
            f"a {type(retriever).__name__} has no number of documents to increase; give a second_retriever, or "
            "top_k_growth=1 to change only the settings."
        )
    steps = [{}, *settings_of_tries(called_model(chat).alpha, settings, alphas, max_tries)]
    for options in steps[1:]:
        called_model(chat, options=options)  # refuses unknown ones
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
        if called_model(chat).is_remote:
            raise ConfigError("context_lift is measured on a model in this process; leave it out.")
        answering = with_context_lift(prompt, cast("ChatCocoa", chat), context=context)

    plan = _Plan(
        retriever=retriever,
        second_retriever=second_retriever,
        growth=growth,
        steps=steps,
        limit=limit,
        measure=measure,
        if_risky=if_risky,
        question=question,
        context=context,
        format_documents=format_documents,
        return_documents=return_documents,
    )

    # LangChain finds the runnables of a chain among the variables that these functions name
    def ask(given: str | Mapping[str, Any], config: RunnableConfig, **options: Any) -> Any:
        return run_calls(_calls(plan, prompt, chat, answering, given, config, options))

    async def aask(given: str | Mapping[str, Any], config: RunnableConfig, **options: Any) -> Any:
        return await arun_calls(_calls(plan, prompt, chat, answering, given, config, options))

    return cast(Runnable[str | Mapping[str, Any], Any], RunnableLambda(ask, aask, name="with_risk_retry"))


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
    if_risky: IfRisky
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
        self, number: int, chat: ChatCocoa, options: Mapping[str, Any]
    ) -> tuple[list[Retriever], dict[str, Any], dict[str, Any]]:
        """The retrievers of an attempt, its options of a call, and what its history says about it."""
        grown = with_top_k(self.retriever, self.growth**number)
        more = [self.second_retriever] if number and self.second_retriever is not None else []
        called = {**options, **self.steps[number]}
        alpha = called_model(chat, options=called).alpha
        return [grown, *more], called, {"settings": dict(self.steps[number]), "alpha": alpha, "top_k": top_k_of(grown)}

    def result(self, tries: Tries[tuple[AIMessage, list[Document]]], values: dict[str, Any]) -> Any:
        """What the chain returns: the best answer, with the history of all attempts.

        Raises:
            HallucinationRiskError: every attempt is too risky, and ``on_risk`` is ``raise``.
        """
        (message, documents), history = tries.best()
        if (gate := tries.gate(self.if_risky.on_risk)) is not None:
            if gate["action"] == "abstain":
                message = replaced(without_tool_calls(message), self.if_risky.answer)
            elif not calls_tools(message):
                change = tries.limit_of_spans.with_marks(message.text, get_risk(message), self.if_risky.mark)
                message = with_change(message, change)
            message = with_report(message, {**get_risk(message), "gate": gate})
        message = message.model_copy(update={"response_metadata": {**message.response_metadata, TRIES_KEY: history}})
        return {**values, self.context: documents, "answer": message} if self.return_documents else message


def _calls(
    plan: _Plan,
    prompt: Runnable[Any, Any],
    chat: ChatCocoa,
    answering: Runnable[Any, Any] | None,
    given: str | Mapping[str, Any],
    config: RunnableConfig,
    options: Mapping[str, Any],
) -> Calls:
    """The calls of one answer, in order. The result of each is sent back; what is returned is the chain's result."""
    values, tries = plan.values(given), Tries[tuple[AIMessage, list[Document]]](plan.limit, plan.measure)
    for number in range(len(plan.steps)):
        retrievers, called, entry = plan.attempt(number, chat, options)
        retrieved = []
        for one in retrievers:
            retrieved.append((yield invocation(one, values[plan.question], config)))
        found = without_duplicates(*retrieved)
        filled = {**values, plan.context: plan.format_documents(found)}
        asked = yield invocation(prompt, filled, config)
        model = called_model(chat, config, called)
        called |= in_prompt_of(model, (yield prompt_text_of(model, asked)), found)
        try:
            message = yield invocation(answering or chat, filled if answering else asked, config, **called)
        except HallucinationRiskError as error:  # of a gate after the chat
            if error.answer is None:
                raise
            message = error.answer
        message = require_message(message, "with_risk_retry")
        if tries.add((message, found), get_risk(message), **entry, documents=len(found), answer=message.text):
            break
    return plan.result(tries, values)
