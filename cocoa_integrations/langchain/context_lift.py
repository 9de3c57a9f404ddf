"""Context lift: how much the context in a prompt changed each span of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from cocoa_engine import context_lift_of_text
from cocoa_engine.errors import ConfigError
from cocoa_integrations._shared.metadata import add_context_lift
from cocoa_integrations._shared.settings import config_of
from cocoa_integrations.langchain.base import in_worker_of
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.composed import called_model
from cocoa_integrations.langchain.detail import set_report
from cocoa_integrations.langchain.runnables import get_risk, get_spans, require_message


def context_lift(
    chat: ChatCocoa, message: AIMessage, prompt: LanguageModelInput, prompt_without_context: LanguageModelInput
) -> AIMessage:
    """Measure how much the context changed each span of an answer. Takes two forward passes.

    Every entry of the spans in ``cocoa_risk``, and of ``cocoa_spans`` if the message has them, gets ``context_lift``,
    ``con_mlds_lift`` and ``f_mlds_lift``. ``context_lift`` is log p of the span with the context minus log p without
    it, in nats. A value near or below 0 means that the span does not come from the context. The text of the answer is
    tokenized again, and its probabilities are those of the model without logits processors.

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
    measured = message.model_copy(deep=True)
    report, spans = get_risk(measured), get_spans(measured)
    if any("text" not in span for span in spans):
        raise ConfigError("the text of the message was changed after it was generated, so its spans are not known.")
    if not any(span["text"] for span in spans):
        return measured
    engine = chat.load()
    with_context, without_context = chat.prompt_ids(prompt), chat.prompt_ids(prompt_without_context)
    texts = [span["text"] for span in spans]
    lifts = context_lift_of_text(engine, texts, with_context, without_context, config_of(chat))
    add_context_lift(spans, lifts)
    add_context_lift(report["spans"], lifts)
    set_report(measured, report, spans)
    return measured


def with_context_lift(
    prompt: Runnable[Any, Any], chat: ChatCocoa, *, context: str | Sequence[str] = "context", empty: Any = ""
) -> Runnable[Mapping[str, Any], AIMessage]:
    """``prompt | chat`` as one runnable whose answers have the context lift of every span.

    The prompt is formatted a second time with an empty context::

        prompt = ChatPromptTemplate.from_template("Context: {context}\\n\\nQuestion: {question}")
        chain = {"context": retriever | join, "question": RunnablePassthrough()} | with_context_lift(prompt, chat)
        get_spans(chain.invoke("Who built the lighthouse?"))[0]["context_lift"]

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

    def without_context(values: Mapping[str, Any]) -> dict[str, Any]:
        missing = [name for name in names if not isinstance(values, Mapping) or name not in values]
        if missing:
            raise ConfigError(f"the input has no {', '.join(missing)}, which should hold the context.")
        return {**values, **dict.fromkeys(names, empty)}

    def answer(values: Mapping[str, Any], config: RunnableConfig, **options: Any) -> AIMessage:
        no_context = without_context(values)
        full, without_source = prompt.invoke(values, config), prompt.invoke(no_context, config)
        called = called_model(chat, config, options)
        message = require_message(chat.invoke(full, config, **options), "with_context_lift")
        return context_lift(called, message, full, without_source)

    async def aanswer(values: Mapping[str, Any], config: RunnableConfig, **options: Any) -> AIMessage:
        no_context = without_context(values)
        full, without_source = await prompt.ainvoke(values, config), await prompt.ainvoke(no_context, config)
        called = called_model(chat, config, options)
        message = require_message(await chat.ainvoke(full, config, **options), "with_context_lift")
        return await in_worker_of(called, context_lift, called, message, full, without_source)

    return RunnableLambda(answer, aanswer, name="with_context_lift")
