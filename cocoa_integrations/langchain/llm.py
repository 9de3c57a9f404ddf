"""The text model: it continues a prompt as it is, without a chat template."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any, NoReturn, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation as TextGeneration
from langchain_core.outputs import GenerationChunk, LLMResult
from pydantic import Field
from typing_extensions import Self

from cocoa_engine import Generation, Span
from cocoa_engine.errors import PromptError, UnsupportedFeatureError
from cocoa_integrations._shared.metadata import SPANS_KEY, all_spans, span_metadata
from cocoa_integrations._shared.tracing import RiskTrace
from cocoa_integrations.langchain.base import CocoaModel, usage_of
from cocoa_integrations.langchain.detail import reduced_result
from cocoa_integrations.langchain.with_risk import LLMWithRisk


class CocoaLLM(CocoaModel, BaseLLM):
    """A local text model, decoded with CoCoA-SIG, that reports the risk of every span of its answers.

    LangChain returns only the text of an answer. The risk is in the output of :meth:`with_risk`, in the
    ``generation_info`` of ``generate()``, in callbacks (see
    :func:`~cocoa_integrations.langchain.get_risk_callback`), and in each streamed chunk that a callback receives. For
    chat models use :class:`ChatCocoa`. The options are described in :class:`CocoaModel`.

    Example:
        >>> llm = CocoaLLM(model="meta-llama/Llama-3.1-8B", device_map="auto", max_new_tokens=64)
        >>> with get_risk_callback() as risk:
        ...     llm.batch(["The capital of France is", "The capital of Italy is"], alpha=1.0)
        >>> [report["max_risk"] for report in risk.reports]
    """

    batch_size: int | None = Field(default=None, ge=1)
    """Maximum number of prompts of a call that are decoded together. ``None``: ``Runtime.max_batch_size``."""

    _ls_model_type = "llm"

    @property
    def _llm_type(self) -> str:
        return "cocoa"

    def with_risk(self) -> LLMWithRisk:
        """This model as a runnable that returns ``{"text": ..., "risk": ...}`` with the ``cocoa_risk`` report.

        ``invoke``, ``batch`` and their async forms return this dict. A stream yields ``{"text": ...}`` for each span as
        soon as it is decided, then one chunk with the report. The sum of the chunks is the same dict. To bind options
        of a call, bind them to the result (``llm.with_risk().bind(alpha=1.0)``): options bound by ``llm.bind(...)`` do
        not reach it.

        Example:
            >>> chain = llm.with_risk() | risk_gate(0.5) | itemgetter("text")
        """
        return LLMWithRisk(self.model_copy(update={"risk_metadata": None}) if self.risk_metadata == "none" else self)

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

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As in LangChain. The options of the call are applied to the model first, so caches and traces see them."""
        model, framework = self._for_call(stop, kwargs)
        result = super(CocoaLLM, model).generate(prompts, list(model.stop) or None, callbacks, **framework)
        return model._returned(result)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See :meth:`generate`."""
        model, framework = self._for_call(stop, kwargs)
        result = await super(CocoaLLM, model).agenerate(prompts, list(model.stop) or None, callbacks, **framework)
        return model._returned(result)

    def _returned(self, result: LLMResult) -> LLMResult:
        """The result with the detail that the answers of a call have."""
        return reduced_result(result, self.risk_metadata or "full", logprobs=self._keeps_logprobs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        model, framework = self._for_call(stop, kwargs)
        if model._streams(prompts, framework):
            return model._result([_sum(model._stream(prompts[0], run_manager=run_manager))])
        # A batch has one run manager, whose events do not identify the answer they belong to, so none are sent.
        for prompt in prompts:
            _require_text(prompt)
        engine, options = model.load(), model._decode_options()
        generations = model._retrying(lambda: engine.generate_batch(prompts, batch_size=model.batch_size, **options))
        trace = RiskTrace()
        for generation in generations:
            trace.record(generation)
        return model._result(
            [
                TextGeneration(
                    text=one.text, generation_info={SPANS_KEY: all_spans(one), **model._generation_info(one)}
                )
                for one in generations
            ]
        )

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if not self._streams(prompts, kwargs):
            return cast("LLMResult", await super()._agenerate(prompts, stop, **kwargs))
        return self._result([_sum([chunk async for chunk in self._astream(prompts[0], stop, run_manager, **kwargs)])])

    def _streams(self, prompts: list[str], options: Mapping[str, Any]) -> bool:
        return len(prompts) == 1 and bool(options.get("stream", self.streaming))

    def _chunks(self, prompt: str) -> Generator[GenerationChunk, None, None]:
        _require_text(prompt)
        engine, options = self.load(), self._decode_options()

        def to_chunk(number: int, span: Span) -> GenerationChunk:
            return GenerationChunk(text=span.text, generation_info={SPANS_KEY: [span_metadata(span, number)]})

        generation = yield from self._stream_spans(lambda: engine.stream(prompt, **options), to_chunk)
        yield GenerationChunk(text="", generation_info=self._generation_info(generation))

    def _result(self, answers: list[TextGeneration]) -> LLMResult:
        return LLMResult(
            generations=[[answer] for answer in answers],
            llm_output={"model_name": self._name, "token_usage": _total_usage(answers)},
        )

    def _generation_info(self, generation: Generation) -> dict[str, Any]:
        return {**self._metadata(generation), "usage_metadata": usage_of(generation)}


def _require_text(prompt: str) -> None:
    """Refuse an empty prompt before a model is loaded.

    Raises:
        PromptError: the prompt is empty.
    """
    if not prompt:
        raise PromptError("the prompt is empty; give some text.")


def _sum(chunks: Iterable[GenerationChunk]) -> TextGeneration:
    """The sum of streamed chunks."""
    total = GenerationChunk(text="")
    for chunk in chunks:
        total += chunk
    return TextGeneration(text=total.text, generation_info=total.generation_info)


def _total_usage(answers: list[TextGeneration]) -> dict[str, int]:
    """Token counts of a batch, under LangChain's names for text models."""
    usage = [(answer.generation_info or {})["usage_metadata"] for answer in answers]
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
    return {name: sum(one[key] for one in usage) for name, key in names.items()}
