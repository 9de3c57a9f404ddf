"""The text model: it continues a prompt as it is, without a chat template."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation as TextGeneration
from langchain_core.outputs import LLMResult
from langchain_core.runnables.utils import add
from pydantic import Field
from typing_extensions import Self

from cocoa_engine.errors import UnsupportedFeatureError
from cocoa_engine.report import SPANS_KEY
from cocoa_integrations.chat_service import Answer, ChatCall
from cocoa_integrations.langchain.base import CocoaModel
from cocoa_integrations.langchain.composed import LLMWithRisk
from cocoa_integrations.langchain.messages import answer_metadata, usage_metadata
from cocoa_integrations.tracing import RiskTrace


class CocoaLLM(CocoaModel, BaseLLM):
    """A text model, decoded with CoCoA-SIG, that reports the risk of every span of its answers.

    The model is in this process, or at a server (``cocoa serve``) whose address is ``base_url``.

    LangChain returns only the text of an answer. The risk is in the output of :meth:`with_risk`, in the
    ``generation_info`` of ``generate()``, in callbacks (see
    :func:`~cocoa_integrations.langchain.get_risk_callback`), and in each streamed chunk that a callback receives. For
    chat models use :class:`ChatCocoa`. The options are described in :class:`CocoaModel`.

    Example:
        >>> llm = CocoaLLM(device_map="auto", max_new_tokens=64)  # or model="meta-llama/Llama-3.1-8B"
        >>> with get_risk_callback() as risk:
        ...     llm.batch(["The capital of France is", "The capital of Italy is"], alpha=1.0)
        >>> [report.max_risk for report in risk.reports]
    """

    batch_size: int | None = Field(default=None, ge=1)
    """Maximum number of prompts of a call that are decoded together. ``None``: ``Runtime.max_batch_size``."""

    _ls_model_type = "llm"
    _detail = "full"
    _batches_prompts = True

    @property
    def _llm_type(self) -> str:
        return "cocoa"

    def with_risk(self) -> LLMWithRisk:
        """This model as a runnable that returns ``{"text": ..., "risk": ...}`` with the ``cocoa_risk`` report.

        The report is always full, whatever ``risk_metadata`` is.

        ``invoke``, ``batch`` and their async forms return this dict. A stream yields ``{"text": ...}`` for each span as
        soon as it is decided, then one chunk with the report. The sum of the chunks is the same dict.

        Example:
            >>> chain = llm.with_risk() | risk_gate(0.5) | itemgetter("text")
        """
        return LLMWithRisk(self)

    def bind_tools(self, tools: Any, **kwargs: Any) -> Self:
        """The model itself, if there are no tools to bind.

        Raises:
            UnsupportedFeatureError: there are tools. They are never dropped silently.
        """
        return self._with_tools({"tools": tools, **kwargs})

    def with_structured_output(self, schema: Any, **kwargs: Any) -> NoReturn:
        """Not supported.

        Raises:
            UnsupportedFeatureError: always.
        """
        raise UnsupportedFeatureError(
            "CocoaLLM does not enforce a schema; use ChatCocoa, or logits_processor=engine.constrain(json_schema=...)"
        )

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self._streams(prompts, kwargs):  # generate() has applied the other options of the call
            whole: Any = add(self._stream(prompts[0], run_manager=run_manager))
            return self._result([whole])
        # A batch has one run manager, whose events do not identify the answer they belong to, so none are sent.
        trace, requests = RiskTrace(), [self._request(prompt) for prompt in prompts]
        return self._made(self.service.answers(requests, self.batch_size), trace)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self._streams(prompts, kwargs):
            whole: Any = add([chunk async for chunk in self._astream(prompts[0], None, run_manager)])
            return self._result([whole])
        trace, requests = RiskTrace(), [self._request(prompt) for prompt in prompts]
        return self._made(await self.service.aanswers(requests, self.batch_size), trace)

    def _streams(self, prompts: list[str], options: Mapping[str, Any]) -> bool:
        return len(prompts) == 1 and bool(options.get("stream", self.streaming))

    def _request(self, prompt: str) -> ChatCall:
        return self._call(prompt=prompt)

    def _made(self, answers: Sequence[Answer], trace: RiskTrace) -> LLMResult:
        generations = []
        for answer in answers:
            trace.record(answer)
            spans = [span.to_dict() for span in answer.spans]
            info = {SPANS_KEY: spans, **answer_metadata(answer), "usage_metadata": usage_metadata(answer)}
            generations.append(TextGeneration(text=answer.text, generation_info=info))
        return self._result(generations)

    def _result(self, answers: Sequence[TextGeneration]) -> LLMResult:
        infos = [answer.generation_info or {} for answer in answers]
        usage = [info["usage_metadata"] for info in infos if "usage_metadata" in info]
        keys = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
        output = {
            "model_name": next((info["model_name"] for info in infos if info.get("model_name")), self._name),
            "token_usage": {name: sum(counts[key] for counts in usage) for name, key in keys.items()},
        }
        generations = [[TextGeneration(text=answer.text, generation_info=answer.generation_info)] for answer in answers]
        return LLMResult(generations=generations, llm_output=output)
