"""The text model: it goes on from a prompt as it is, without a chat template."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation as TextGeneration
from langchain_core.outputs import GenerationChunk, LLMResult
from pydantic import Field

from cocoa_engine import Generation, Span
from cocoa_integrations.langchain.base import CocoaModel, usage_of
from cocoa_integrations.metadata import SPANS_KEY, all_spans, span_metadata


class CocoaLLM(CocoaModel, BaseLLM):
    """A local text model decoded with CoCoA-SIG, every span of its answers with its risk.

    LangChain hands on only the text of an answer; risk is in ``generate()``'s ``generation_info``, in callbacks (see
    :func:`~cocoa_integrations.langchain.get_risk_callback`) and in each streamed chunk a callback sees. A chat model is
    better served by :class:`ChatCocoa`. The options are described at :class:`CocoaModel`.

    Example:
        >>> llm = CocoaLLM(model="meta-llama/Llama-3.1-8B", device_map="auto", max_new_tokens=64)
        >>> with get_risk_callback() as risk:
        ...     llm.batch(["The capital of France is", "The capital of Italy is"], alpha=1.0)
        >>> [report["max_risk"] for report in risk.reports]
    """

    batch_size: int = Field(default=8, ge=1)
    """At most this many prompts are decoded together."""

    @property
    def _llm_type(self) -> str:
        return "cocoa"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(**{**super()._get_ls_params(stop, **kwargs), "ls_model_type": "llm"})

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As in LangChain, the options of the call being part of the model: caches and traces see what applies."""
        model, framework = self._for_call(stop, kwargs)
        return super(CocoaLLM, model).generate(prompts, list(model.stop) or None, callbacks, **framework)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See :meth:`generate`."""
        model, framework = self._for_call(stop, kwargs)
        return await super(CocoaLLM, model).agenerate(prompts, list(model.stop) or None, callbacks, **framework)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        model, framework = self._for_call(stop, kwargs)
        if len(prompts) == 1 and framework.get("stream", model.streaming):
            answers = [_whole(model._stream(prompts[0], run_manager=run_manager))]
        else:
            # A batch comes with one run manager, whose events could not say which answer they belong to: none are sent.
            engine, options = model.load(), model._decode_options()
            generations = model._retrying(
                lambda: engine.generate_batch(prompts, batch_size=model.batch_size, **options)
            )
            answers = [
                TextGeneration(
                    text=one.text, generation_info={SPANS_KEY: all_spans(one), **model._generation_info(one)}
                )
                for one in generations
            ]
        return LLMResult(
            generations=[[answer] for answer in answers],
            llm_output={"model_name": model._name, "token_usage": _total_usage(answers)},
        )

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Generator[GenerationChunk, None, None]:
        model, _ = self._for_call(stop, kwargs)
        engine, options = model.load(), model._decode_options()

        def emit(text: str, info: dict[str, Any]) -> GenerationChunk:
            chunk = GenerationChunk(text=text, generation_info=info)
            if run_manager is not None:
                run_manager.on_llm_new_token(text, chunk=chunk)
            return chunk

        def of_span(number: int, span: Span) -> GenerationChunk:
            return emit(span.text, {SPANS_KEY: [span_metadata(span, number)]})

        generation = yield from model._decided(lambda: engine.stream(prompt, **options), of_span)
        yield emit("", model._generation_info(generation))

    def _generation_info(self, generation: Generation) -> dict[str, Any]:
        return {**self._metadata(generation), "usage_metadata": usage_of(generation)}


def _whole(chunks: Iterable[GenerationChunk]) -> TextGeneration:
    """Streamed chunks added up."""
    whole = GenerationChunk(text="")
    for chunk in chunks:
        whole += chunk
    return TextGeneration(text=whole.text, generation_info=whole.generation_info)


def _total_usage(answers: list[TextGeneration]) -> dict[str, int]:
    """Token counts of a batch, under the names that text models use."""
    usage = [(answer.generation_info or {})["usage_metadata"] for answer in answers]
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
    return {name: sum(one[key] for one in usage) for name, key in names.items()}
