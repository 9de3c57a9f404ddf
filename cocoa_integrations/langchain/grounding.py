"""How much the context in a prompt changed each span of the answer: on a message one has, or as a step of a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from cocoa_engine.errors import ConfigError
from cocoa_engine.scoring.context_lift import context_lift_of_text
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.messages import to_chat
from cocoa_integrations.langchain.runnables import get_risk, get_spans
from cocoa_integrations.metadata import RISK_KEY, SPANS_KEY, add_context_lift
from cocoa_integrations.settings import config_of
from cocoa_integrations.workers import in_worker


def context_lift(
    chat: ChatCocoa, message: AIMessage, prompt: LanguageModelInput, prompt_without_context: LanguageModelInput
) -> AIMessage:
    """An answer whose spans also say how much the context changed them, for two forward passes.

    Every entry of ``cocoa_spans``, and of the spans in ``cocoa_risk``, gets ``context_lift`` (log p of the span with
    the context less that without, in nats; near 0 or below: not taken from the context), ``con_mlds_lift`` and
    ``f_mlds_lift``. The answer's text is cut into tokens anew, and its probabilities are the model's own.

    Args:
        chat: the model; one with the same engine will do.
        message: its answer, as ``invoke`` or the sum of a stream's chunks gives it.
        prompt: what it answered: a text, messages or a prompt value.
        prompt_without_context: the same without the context.

    Returns:
        A copy; the message itself stays as it is.

    Raises:
        ConfigError: the message carries no spans, or ``chat`` is not a ChatCocoa.
        PromptError: a prompt does not fit the context window with the answer.
    """
    if not isinstance(chat, ChatCocoa):
        raise ConfigError(f"context lift is measured with a ChatCocoa, not a {type(chat).__name__}.")
    grounded = message.model_copy(deep=True)
    report, spans = get_risk(grounded), get_spans(grounded)
    if not any(span["text"] for span in spans):
        return grounded
    engine = chat.load()
    full, bare = (
        engine.encode_chat(to_chat(chat._convert_input(given).to_messages()))
        for given in (prompt, prompt_without_context)
    )
    lifts = context_lift_of_text(engine, [span["text"] for span in spans], full, bare, config_of(chat))
    add_context_lift(spans, lifts)
    add_context_lift(report["spans"], lifts)
    grounded.additional_kwargs[SPANS_KEY] = spans
    grounded.response_metadata[RISK_KEY] = report
    return grounded


def with_context_lift(
    prompt: Runnable[Any, Any], chat: ChatCocoa, *, context: str | Sequence[str] = "context", empty: Any = ""
) -> Runnable[Mapping[str, Any], AIMessage]:
    """``prompt | chat`` as one step whose answers carry the context lift of every span.

    The prompt is formatted a second time with its context left empty::

        prompt = ChatPromptTemplate.from_template("Context: {context}\\n\\nQuestion: {question}")
        chain = {"context": retriever | join, "question": RunnablePassthrough()} | with_context_lift(prompt, chat)
        get_spans(chain.invoke("Who built the lighthouse?"))[0]["context_lift"]

    The step gives its message whole: the lift is only known at the end. Options of a call (``alpha=1.0``) are the
    model's.

    Args:
        prompt: a prompt template, or anything that makes a prompt of a dict.
        chat: the model.
        context: the variable, or variables, of the prompt that hold the context.
        empty: what they are without it; for a ``MessagesPlaceholder`` that is ``[]``.

    Raises:
        ConfigError: ``chat`` is not a ChatCocoa (give its options to it, not to ``bind``), or, at a call, the input
            lacks a variable of the context.
    """
    if not isinstance(chat, ChatCocoa):
        raise ConfigError(f"with_context_lift takes a ChatCocoa, not a {type(chat).__name__}.")
    names = (context,) if isinstance(context, str) else tuple(context)

    def emptied(values: Mapping[str, Any]) -> dict[str, Any]:
        missing = [name for name in names if not isinstance(values, Mapping) or name not in values]
        if missing:
            raise ConfigError(f"the input has no {', '.join(missing)}, which should hold the context.")
        return {**values, **dict.fromkeys(names, empty)}

    def answered(values: Mapping[str, Any], config: RunnableConfig, **options: Any) -> AIMessage:
        without = emptied(values)
        full, bare = prompt.invoke(values, config), prompt.invoke(without, config)
        called, _ = chat._for_call(None, options)
        return context_lift(called, chat.invoke(full, config, **options), full, bare)

    async def aanswered(values: Mapping[str, Any], config: RunnableConfig, **options: Any) -> AIMessage:
        without = emptied(values)
        full, bare = await prompt.ainvoke(values, config), await prompt.ainvoke(without, config)
        called, _ = chat._for_call(None, options)
        message = await chat.ainvoke(full, config, **options)
        return await in_worker(called._runs, context_lift, called, message, full, bare)

    return RunnableLambda(answered, aanswered, name="with_context_lift")
