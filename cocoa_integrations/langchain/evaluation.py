"""The risk of given answers as an evaluator of LangSmith."""

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_integrations.judging import AnswerJudge, judge_of
from cocoa_integrations.langchain.chat import ChatCocoa
from cocoa_integrations.langchain.composed import called_model

KEYS = {
    "question": ("question", "query", "input", "user_input", "messages"),
    "answer": ("answer", "response", "output", "text", "result", "messages"),
    "context": ("context", "contexts", "documents", "retrieved_contexts", "source_documents"),
}  # where each is looked for by default


def risk_evaluator(
    model: ChatCocoa | CocoaEngine | AnswerJudge,
    *,
    key: str = "cocoa_risk",
    question: str | None = None,
    answer: str | None = None,
    context: str | None = None,
    **options: Any,
) -> Callable[[Any, Any], dict[str, Any]]:
    """An evaluator function for LangSmith that measures the risk of answers, whichever model wrote them::

        evaluator = risk_evaluator(chat, threshold=0.6)
        client.evaluate(target, data="questions", evaluators=[evaluator])
        evaluator({"question": "Who wrote Dune?"}, {"answer": "Frank Herbert."})

    It takes the dicts ``inputs`` and ``outputs``, or a ``Run`` and its ``Example``, and returns ``key``, ``score`` (the
    risk: lower is better), ``comment`` (the riskiest sentence) and, with a threshold, ``value`` (``"pass"`` or
    ``"fail"``). An empty answer has the score ``None``. See :class:`~cocoa_integrations.judging.AnswerJudge` for how
    far it goes.

    Args:
        model: a :class:`ChatCocoa`, an engine, or an ``AnswerJudge``.
        key: the name of the feedback.
        question: the key of the question in the inputs. Default: ``question``, ``query``, ``input``, ``user_input`` or
            ``messages``, or the only key.
        answer: the key of the answer in the outputs. Default: ``answer``, ``response``, ``output``, ``text``,
            ``result`` or ``messages``, or the only key.
        context: the key of the contexts in the outputs or inputs: a text, or a list of texts or documents. Default:
            ``context``, ``contexts``, ``documents``, ``retrieved_contexts`` or ``source_documents``, if there is one.
        **options: options of ``AnswerJudge``: ``threshold``, ``measure``, ``prompt``, ``config``.

    Raises:
        ConfigError: an argument has a wrong type or is out of range. A call raises it if there is no question or no
            answer, or none of the contexts that ``context`` names.
    """
    asked = called_model(model)
    judge = judge_of(asked.load() if isinstance(asked, ChatCocoa) else asked, options)

    def cocoa_risk(inputs: Any, outputs: Any) -> dict[str, Any]:
        if not isinstance(inputs, Mapping) and hasattr(inputs, "outputs"):  # a run and its example
            run, example = inputs, outputs
            inputs, outputs = getattr(example, "inputs", None) or run.inputs, run.outputs
        inputs, outputs = inputs or {}, outputs or {}
        asked = _text(_value(inputs, question, "question"))
        answered = _text(_value(outputs, answer, "answer"))
        both, contexts = {**inputs, **outputs}, []
        if context is not None or not both.keys().isdisjoint(KEYS["context"]):
            value = _value(both, context, "context")
            contexts = [_text(text) for text in ([value] if isinstance(value, str) else value or ())]
        if not answered.strip():
            return {"key": key, "score": None, "comment": "the answer is empty"}
        judged = judge.judge(asked, answered, contexts)
        result = {"key": key, "score": judged.risk, "comment": judged.comment}
        return result if judged.passing is None else {**result, "value": "pass" if judged.passing else "fail"}

    return cocoa_risk


def _value(values: Mapping[str, Any], key: str | None, what: str) -> Any:
    names = [key] if key is not None else [*KEYS[what], *(values if len(values) == 1 else ())]
    name = next((name for name in names if name in values), None)
    if name is None:
        raise ConfigError(f"no {what} found under {', '.join(map(repr, values)) or 'no key'}; name its key: {what}=.")
    return values[name]


def _text(value: Any) -> str:
    """The text of a document or a message, of the last one of a list, or of a prompt or chunk."""
    if isinstance(value, (list, tuple)) and value:
        value = value[-1]
    if isinstance(value, Mapping) and "content" in value:  # a message, and below a document, as LangSmith stores them
        value = AIMessage(value["content"] or "")
    if isinstance(value, Mapping) and "page_content" in value:
        value = value["page_content"]
    if isinstance(value, Document):
        return value.page_content
    if isinstance(value, BaseMessage):
        return str(value.text)
    if not isinstance(value, str):
        raise ConfigError(f"an evaluator takes texts or messages, not {type(value).__name__}.")
    return value
