"""The public face of the engine: a model, a tokenizer, and what can be asked of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.consistency import Consistency, Match
from cocoa_engine.decoding.request import Controls, PerPrompt, Request, make_requests
from cocoa_engine.decoding.sampled_consistency import sampled_consistency
from cocoa_engine.decoding_model import DecodingModel
from cocoa_engine.model.callables import Criteria, Processors
from cocoa_engine.model.passages import Source
from cocoa_engine.model.prompts import Messages, Prompt, Texts, is_chat
from cocoa_engine.results import Generation, LayerCurve
from cocoa_engine.scoring import given_texts, layer_curve
from cocoa_engine.spans import Span
from cocoa_engine.stream import SpanStream
from cocoa_engine.timeline import Timeline

if TYPE_CHECKING:
    from transformers import GenerationConfig


class CocoaEngine(DecodingModel):
    """Decodes a local Hugging Face causal LM with CoCoA-SIG and reports the risk of every span.

    Threads may share one engine; forked processes may not. The model and the tokenizer are left unchanged: no hook
    remains on them, not even after an exception or an abandoned stream.

    Args:
        model: a decoder-only ``PreTrainedModel`` with a language-modelling head.
        tokenizer: its tokenizer.
        config: the default settings of the engine.
        runtime: how the model is run. It changes speed and memory, not what is decoded.
        model_name: the name in results. Default: the model's ``name_or_path``.
        calibrator: a calibrator, its JSON file, or ``"embedded"`` for the embedded model's. It gives every span, or the
            answer, or both, a probability, depending on what it was fitted on. A calibrator that was fitted for another
            model or other settings is used with a :class:`CalibrationWarning`. ``"auto"`` is the embedded model's
            calibrator, used only for that model, and only with the settings that it was fitted for. `None` is no
            calibrator.

    Raises:
        UnsupportedModelError: the model is not a causal language model, or has fewer than 3 layers.
        CalibrationError: the calibrator's file cannot be read.
    """

    def generate(
        self,
        prompt: Prompt,
        *,
        config: CocoaConfig | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        generation_config: GenerationConfig | None = None,
        cancellation: Cancellation | None = None,
        source: Source | None = None,
        timeline: Timeline | None = None,
        **settings: Any,
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: text (the tokenizer adds its special tokens) or token ids (taken as they are).
            config: settings to use instead of the engine's.
            logits_processor: transformers processors, called on every branch before its next distribution is formed.
            stopping_criteria: transformers criteria, called after each token of the answer. They only cut it.
            generation_config: a transformers ``GenerationConfig`` whose end tokens, penalties and banned words apply
                instead of those of the model's own. The end tokens of the tokenizer and of its chat template stay.
            cancellation: lets another thread end the call.
            source: passages of the prompt, as texts that it contains or as (start, end) ranges of its characters. Every
                span then has ``passage_attention``. The characters of token ids are those of their decoded text,
                special tokens included.
            timeline: records when the call got its batch slot, had read its prompt and ended.
            **settings: fields of :class:`CocoaConfig` that override the settings.

        Raises:
            ConfigError: a setting is unknown, out of range or does not fit the model, or a passage is not in the
                prompt.
            PromptError: the prompt is empty or leaves no tokens for the answer in the context window.
            NonFiniteLogitsError: the model's logits are NaN.
            EngineBusyError: ``Runtime.max_queue`` calls are waiting already.
            ForkedProcessError: the process has forked since the engine was loaded, and this is the child.
            RequestCancelledError: the call was cancelled by ``cancellation``.
        """
        config = self._settings(config, settings)
        controls = Controls(logits_processor, stopping_criteria, generation_config, cancellation)
        request = self._request(prompt, config, controls, source, timeline)
        (generation,) = self._generations([request], [config])
        self._risk.warn_of_domain(generation)
        return generation

    def stream(
        self,
        prompt: Prompt,
        *,
        config: CocoaConfig | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        generation_config: GenerationConfig | None = None,
        cancellation: Cancellation | None = None,
        source: Source | None = None,
        timeline: Timeline | None = None,
        **settings: Any,
    ) -> SpanStream[CocoaEngine]:
        """Answer one prompt span by span; arguments and errors as for :meth:`generate`, raised at once.

        A span is decoded when it is requested. Closing the stream stops the work. A suspended stream blocks no other
        call.
        """
        config = self._settings(config, settings)
        controls = Controls(logits_processor, stopping_criteria, generation_config, cancellation)
        request = self._request(prompt, config, controls, source, timeline)
        self._risk.check(config)
        measure = partial(self._risk.measure, config, request.passages)
        return SpanStream(self, request, config, measure, self._risk.warn_of_domain)

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        config: CocoaConfig | None = None,
        logits_processor: Processors | PerPrompt[Processors] = None,
        stopping_criteria: Criteria | PerPrompt[Criteria] = None,
        generation_config: GenerationConfig | None = None,
        cancellation: Cancellation | None = None,
        batch_size: int | None = None,
        return_exceptions: Literal[False] = False,
        source: Sequence[Source | None] | None = None,
        **settings: Any,
    ) -> list[Generation]: ...

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        config: CocoaConfig | None = None,
        logits_processor: Processors | PerPrompt[Processors] = None,
        stopping_criteria: Criteria | PerPrompt[Criteria] = None,
        generation_config: GenerationConfig | None = None,
        cancellation: Cancellation | None = None,
        batch_size: int | None = None,
        return_exceptions: bool,
        source: Sequence[Source | None] | None = None,
        **settings: Any,
    ) -> list[Generation | Exception]: ...

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        config: CocoaConfig | None = None,
        logits_processor: Processors | PerPrompt[Processors] = None,
        stopping_criteria: Criteria | PerPrompt[Criteria] = None,
        generation_config: GenerationConfig | None = None,
        cancellation: Cancellation | None = None,
        batch_size: int | None = None,
        return_exceptions: bool = False,
        source: Sequence[Source | None] | None = None,
        **settings: Any,
    ) -> list[Generation] | list[Generation | Exception]:
        """Answer several prompts together.

        The results are those of :meth:`generate` for each prompt, in order. See there for the other arguments and the
        errors. Every prompt is checked before any work is done. A prompt joins the batch when another one has ended.
        Calls of other threads share the forward passes.

        Args:
            logits_processor: for all prompts, or a :class:`PerPrompt`.
            stopping_criteria: for all prompts, or a :class:`PerPrompt`.
            batch_size: the maximum number of prompts at a time. Default and limit: ``Runtime.max_batch_size``.
            return_exceptions: return the error of a prompt in its position, instead of raising the first one. This
                includes the error of a prompt that is not valid.
            source: for each prompt its passages, or `None`.
        """
        config = self._settings(config, settings)
        requests = make_requests(
            self.session,
            prompts,
            config,
            processors=logits_processor,
            criteria=stopping_criteria,
            generation_config=generation_config,
            cancellation=cancellation,
            source=source,
            calibrator=self._risk.fitting(config),
            keep_errors=return_exceptions,
        )
        valid = [request for request in requests if isinstance(request, Request)]
        answers = self._decode(valid, [config] * len(valid), batch_size, keep_errors=return_exceptions)
        self._risk.warn_of_domain(*answers)
        of_valid = iter(answers)
        return [next(of_valid) if isinstance(request, Request) else request for request in requests]

    @overload
    def score(
        self,
        prompt: Prompt,
        text: str | Sequence[int],
        *,
        config: CocoaConfig | None = None,
        source: Source | None = None,
        divide: bool = False,
        cancellation: Cancellation | None = None,
        **settings: Any,
    ) -> Generation: ...

    @overload
    def score(
        self,
        prompt: Prompt,
        text: Texts,
        *,
        config: CocoaConfig | None = None,
        source: Source | None = None,
        divide: bool = False,
        cancellation: Cancellation | None = None,
        **settings: Any,
    ) -> list[Generation]: ...

    def score(
        self,
        prompt: Prompt,
        text: str | Sequence[int] | Texts,
        *,
        config: CocoaConfig | None = None,
        source: Source | None = None,
        divide: bool = False,
        cancellation: Cancellation | None = None,
        **settings: Any,
    ) -> Generation | list[Generation]:
        """Measure log-probability and disagreement of a given text after a prompt, by teacher forcing.

        The text is one span of kind ``"given"``, unless ``divide`` is set. Its calibrated risk is computed as if its
        first token had no competing tokens. Probabilities are the model's own: no processor applies.

        Args:
            prompt: text or token ids.
            text: a text or its token ids, or a list of these, such as the options of a question. Each is scored as it
                would be alone, but the prompt is encoded once (by ``dola``, ``decore`` and ``diver`` twice).
            config: settings to use instead of the engine's.
            source: passages of the prompt, as for :meth:`generate`.
            divide: divide the text at its risk points, as decoding divides an answer, so that each part has a risk of
                its own. With a calibrator of spans, the candidates at the risk points are grown for it; the usage does
                not count that.
            cancellation: lets another thread end the call; see :class:`~cocoa_engine.Cancellation`.
            **settings: as for :meth:`generate`.

        Returns:
            One result, or for a list of texts a list in the same order. A forward pass over tokens of several texts
            counts in the usage of each, and so do the prompt's passes; ``fed_tokens`` is the length of the text.

        Raises:
            ConfigError: as for :meth:`generate`; or ``divide`` with a method that reads a text several times.
            PromptError: prompt or text is empty, or the two do not fit the context window.
            NonFiniteLogitsError: the model's logits are NaN.
            RequestCancelledError: the call was cancelled by ``cancellation``.
        """
        settled = self._settings(config, settings)
        measure = partial(self._risk.measure, settled, source, given=True)
        scored = given_texts.score(
            self.session, prompt, text, settled, measure, source, divide=divide, cancellation=cancellation
        )
        self._risk.warn_of_domain(*(scored if isinstance(scored, list) else [scored]))
        return scored

    def consistency(
        self,
        prompt: Prompt | Messages,
        answer: str | Generation | None = None,
        n: int = 5,
        *,
        temperature: float = 0.8,
        match: Match | None = None,
        config: CocoaConfig | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        generation_config: GenerationConfig | None = None,
        cancellation: Cancellation | None = None,
        **settings: Any,
    ) -> Consistency:
        """Sample answers to a prompt in one batch, and compare an answer with them.

        A model that knows an answer tends to repeat it (self-consistency; SelfCheckGPT, Manakul et al., 2023). A low
        agreement suggests an error. It costs ``n`` further answers.

        Args:
            prompt: text, token ids or chat messages.
            answer: the answer to compare with. `None` generates it with the given settings.
            n: number of samples, from 1 to 10,000.
            temperature: temperature of the samples, above 0. ``top_k`` and ``top_p`` among the settings apply to them
                too.
            match: compares the text of a sample with the text of the answer, and returns a bool or a number in [0, 1].
                Default: their normalised texts are equal, or the F1 score of their words is at least 0.5.
            config: settings to use instead of the engine's.
            logits_processor, stopping_criteria, generation_config, cancellation: as for :meth:`generate`.
            **settings: fields of :class:`CocoaConfig`. Samples have the method ``"sample"``; with a ``seed``, sample i
                has the seed ``seed + i``.

        Raises:
            ConfigError: ``n`` is out of range, ``temperature`` is not above 0, the samples would all be greedy,
                ``match`` returns something else, or as for :meth:`generate`.
            PromptError, NonFiniteLogitsError, EngineBusyError, RequestCancelledError: as for :meth:`generate`.
            ChatTemplateError: as for :meth:`chat`.
        """
        config = self._settings(config, settings)
        ids = self.encode_chat(prompt) if is_chat(prompt) else prompt
        controls = Controls(logits_processor, stopping_criteria, generation_config, cancellation)
        request_of = partial(self._request, ids, controls=controls)
        return sampled_consistency(
            request_of, self._generations, config, answer, n, temperature=temperature, match=match
        )

    def layer_profile(self, prompt: Prompt | Messages, generation: Generation, span: Span | int) -> LayerCurve:
        """How the layers disagree about one span of an answer, layer by layer. Both MLDS are means of these values.

        The answer is fed once more, up to the end of the span, with its own settings.

        Args:
            prompt: the prompt of the answer. For :meth:`chat` its messages, or with ``template_kwargs`` the result of
                :meth:`encode_chat`.
            generation: the answer, generated or scored by a model like this one.
            span: one of the answer's spans, or its index.

        Raises:
            ConfigError: the answer has no such span.
            PromptError: the prompt is not as long as the one of the answer.
            ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
            UnsupportedModelError: the model's final state is not as wide as its layers.
        """
        token_ids = self.encode_chat(prompt) if is_chat(prompt) else prompt
        return layer_curve.of_generation(self.session, token_ids, generation, span)

    def chat(
        self,
        messages: Messages,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        source: Source | None = None,
        **options: Any,
    ) -> Generation:
        """Answer chat messages; options and errors are those of :meth:`generate` and :meth:`render_chat`.

        The ranges of ``source`` are those of the text that :meth:`render_chat` returns.
        """
        token_ids, passages = self._encoded_chat(messages, template_kwargs, source, options.get("cancellation"))
        return self.generate(token_ids, source=passages, **options)

    def stream_chat(
        self,
        messages: Messages,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        source: Source | None = None,
        **options: Any,
    ) -> SpanStream[CocoaEngine]:
        """Answer chat messages span by span; see :meth:`stream` and :meth:`chat`."""
        token_ids, passages = self._encoded_chat(messages, template_kwargs, source, options.get("cancellation"))
        return self.stream(token_ids, source=passages, **options)
