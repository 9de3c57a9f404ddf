"""The risk of given answers as a LlamaIndex evaluator."""

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.evaluation import BaseEvaluator, EvaluationResult
from llama_index.core.prompts.mixin import PromptDictType

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_integrations._shared.engines import in_worker
from cocoa_integrations._shared.options import config_of
from cocoa_integrations.judging import AnswerJudge, judge_of
from cocoa_integrations.llama_index.llm import CocoaLLM


class RiskEvaluator(BaseEvaluator):
    """Measures the risk of answers, whichever model wrote them, as a LlamaIndex evaluator::

        evaluator = RiskEvaluator(llm, threshold=0.6)
        result = evaluator.evaluate_response(query="Who wrote Dune?", response=response)
        result.score, result.passing, result.feedback

    ``score`` is the risk: lower is better. ``passing`` is whether it is below the threshold, and ``feedback`` names the
    riskiest sentence. It can be used with ``BatchEvalRunner``. See :class:`~cocoa_integrations.judging.AnswerJudge` for
    how far it goes.

    Args:
        model: a :class:`CocoaLLM`, an engine, or an ``AnswerJudge``. Options of a ``CocoaLLM`` that are set later apply
            from the next call.
        **options: options of ``AnswerJudge``: ``threshold``, ``measure``, ``prompt``, ``config``. Default of
            ``config``: the settings of the ``CocoaLLM``, otherwise those of the engine.

    Raises:
        ConfigError: an argument has a wrong type or is out of range. A call raises it without a query and a response.
    """

    def __init__(self, model: CocoaLLM | CocoaEngine | AnswerJudge, **options: Any) -> None:
        self._llm = model if isinstance(model, CocoaLLM) else None
        self._options = options
        self._judge = judge_of(model.engine if isinstance(model, CocoaLLM) else model, options)

    def _current(self) -> AnswerJudge:
        """The judge with the engine and the settings that the LLM has now."""
        if self._llm is None:
            return self._judge
        config = self._options.get("config") or config_of(self._llm)
        self._judge = AnswerJudge(self._llm.engine, **{**self._options, "config": config})  # keeps no other engine
        return self._judge

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts_dict: PromptDictType) -> None:
        """There are none."""

    async def aevaluate(
        self,
        query: str | None = None,
        response: str | None = None,
        contexts: Sequence[str] | None = None,
        sleep_time_in_seconds: int = 0,
        **kwargs: Any,
    ) -> EvaluationResult:
        """The risk of a response to a query, which was written from the contexts if there are any."""
        if query is None or response is None:
            raise ConfigError("RiskEvaluator needs both query and response.")
        await asyncio.sleep(sleep_time_in_seconds)
        if not response.strip():
            values: dict[str, Any] = {"invalid_result": True, "invalid_reason": "the response is empty"}
        else:
            judge = await in_worker(self._judge.engine, self._current)  # it may load another model
            judged = await judge.ajudge(query, response, contexts)
            values = {"score": judged.risk, "passing": judged.passing, "feedback": judged.comment}
        return EvaluationResult(query=query, response=response, contexts=contexts, **values)
