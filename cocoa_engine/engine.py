"""The public face of the engine: a model, a tokenizer, and what can be asked of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from cocoa_engine.calibration import CalibrationWarning, RiskCalibrator, embedded_calibrator
from cocoa_engine.calibration.risk_measure import RiskMeasure, risk_measure
from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.batch import decode_batch
from cocoa_engine.decoding.request import Callables, PerPrompt, Request, make_request, make_requests
from cocoa_engine.decoding.task import DecodeTask
from cocoa_engine.errors import ConfigError
from cocoa_engine.execution.session import Session
from cocoa_engine.loaded_model import LoadedModel
from cocoa_engine.model.load_options import DeviceMap
from cocoa_engine.model.prompts import Messages, Prompt, Texts, is_chat
from cocoa_engine.results import Generation, LayerCurve
from cocoa_engine.runtime import Runtime
from cocoa_engine.scoring import given_texts, layer_curve
from cocoa_engine.spans import Span
from cocoa_engine.stream import SpanStream

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


class CocoaEngine(LoadedModel):
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

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        config: CocoaConfig | None = None,
        runtime: Runtime | None = None,
        model_name: str | None = None,
        calibrator: RiskCalibrator | str | Path | None = "auto",
    ) -> None:
        runtime = Runtime() if runtime is None else _checked(runtime, Runtime)
        super().__init__(Session(model, tokenizer, runtime, model_name))
        self.config = CocoaConfig() if config is None else _checked(config, CocoaConfig)
        self._automatic = calibrator == "auto"
        self.calibrator = self._embedded() if calibrator == "auto" else RiskCalibrator.of(calibrator)
        self._warned: set[str] = set()
        self._warn_of_mismatch(config)  # default settings are checked with each call, which may replace them

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | None = None,
        *,
        tokenizer_name: str | None = None,
        config: CocoaConfig | None = None,
        runtime: Runtime | None = None,
        calibrator: RiskCalibrator | str | Path | None = "auto",
        dtype: str | torch.dtype = "auto",
        device_map: DeviceMap = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **more_model_kwargs: Any,
    ) -> CocoaEngine:
        """Load a model and its tokenizer.

        Args:
            model_name: a local folder or a Hub id. `None` loads the embedded SmolLM2-135M-Instruct.
            tokenizer_name: folder or Hub id of the tokenizer. Default: that of the model.
            config: the engine's default settings.
            runtime: how the model is run.
            calibrator: as for the constructor.
            dtype: ``"auto"`` (as stored), a name such as ``"bfloat16"``, or a ``torch.dtype``.
            device_map: as in transformers, e.g. ``"auto"`` or ``"cuda:0"``. `None` is the CPU.
            trust_remote_code: run code that comes with the checkpoint.
            allow_pickle: read weights stored as pickle, which can run code when read.
            model_kwargs: further options of the model's ``from_pretrained``, as are all other keywords.
            tokenizer_kwargs: options of the tokenizer's ``from_pretrained``.

        Raises:
            ModelLoadError: the model cannot be found or read, or was refused.
            UnsupportedModelError: the model is not a causal language model.
            CalibrationError: the calibrator's file cannot be read.
        """
        from cocoa_engine.model.loading import load_pretrained

        calibrator = "auto" if calibrator == "auto" else RiskCalibrator.of(calibrator)  # before the weights are read
        model, tokenizer, name = load_pretrained(
            model_name,
            tokenizer_name=tokenizer_name,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            model_kwargs=dict(model_kwargs or {}),
            tokenizer_kwargs=dict(tokenizer_kwargs or {}),
            **more_model_kwargs,
        )
        return cls(model, tokenizer, config=config, runtime=runtime, model_name=name, calibrator=calibrator)

    def with_calibrator(self, calibrator: RiskCalibrator | str | Path) -> CocoaEngine:
        """This engine with another calibrator; everything else is shared, the running batch included.

        Args:
            calibrator: as for the constructor.

        Raises:
            CalibrationError: the calibrator's file cannot be read.
        """
        other = copy.copy(self)
        other.calibrator, other._automatic, other._warned = RiskCalibrator.of(calibrator), False, set()
        other._warn_of_mismatch(None)
        return other

    def without_calibrator(self) -> CocoaEngine:
        """This engine without its calibrator; everything else is shared. Without one, returns the engine itself."""
        if self.calibrator is None:
            return self
        other = copy.copy(self)
        other.calibrator = None
        return other

    def generate(
        self,
        prompt: Prompt,
        *,
        config: CocoaConfig | None = None,
        logits_processor: Callables = None,
        stopping_criteria: Callables = None,
        generation_config: GenerationConfig | None = None,
        cancellation: Cancellation | None = None,
        **settings: Any,
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: text (the tokenizer adds its special tokens) or token ids (taken as they are).
            config: settings to use instead of the engine's.
            logits_processor: transformers processors, called on every branch before its next distribution is formed.
            stopping_criteria: transformers criteria, called on every branch after each token.
            generation_config: a transformers ``GenerationConfig`` whose end tokens, penalties and banned words apply
                instead of those of the model's own.
            cancellation: lets another thread end the call.
            **settings: fields of :class:`CocoaConfig` that override the settings.

        Raises:
            ConfigError: a setting is unknown, out of range or does not fit the model.
            PromptError: the prompt is empty or leaves no room in the context window.
            NonFiniteLogitsError: the model's logits are NaN.
            EngineBusyError: ``Runtime.max_queue`` calls are waiting already.
            ForkedProcessError: the process has forked since the engine was loaded, and this is the child.
            RequestCancelledError: the call was cancelled by ``cancellation``.
        """
        config = self._settings(config, settings)
        request = make_request(
            self.session, prompt, config, logits_processor, stopping_criteria, generation_config, cancellation
        )
        (generation,) = self._decode([request], config, 1)
        assert isinstance(generation, Generation)
        return generation

    def stream(
        self,
        prompt: Prompt,
        *,
        config: CocoaConfig | None = None,
        logits_processor: Callables = None,
        stopping_criteria: Callables = None,
        generation_config: GenerationConfig | None = None,
        cancellation: Cancellation | None = None,
        **settings: Any,
    ) -> SpanStream[CocoaEngine]:
        """Answer one prompt span by span; arguments and errors as for :meth:`generate`, raised at once.

        A span is decoded when it is requested. Closing the stream stops the work. A suspended stream blocks no other
        call.
        """
        config = self._settings(config, settings)
        request = make_request(
            self.session, prompt, config, logits_processor, stopping_criteria, generation_config, cancellation
        )
        return SpanStream(self, request, config, self._measure(config))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        config: CocoaConfig | None = None,
        logits_processor: Callables | PerPrompt = None,
        stopping_criteria: Callables | PerPrompt = None,
        generation_config: GenerationConfig | None = None,
        cancellation: Cancellation | None = None,
        batch_size: int | None = None,
        return_exceptions: bool = False,
        **settings: Any,
    ) -> list[Any]:
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
        """
        config = self._settings(config, settings)
        requests = make_requests(
            self.session,
            prompts,
            config,
            logits_processor,
            stopping_criteria,
            generation_config,
            cancellation,
            keep_errors=return_exceptions,
        )
        valid = [request for request in requests if isinstance(request, Request)]
        answers = iter(self._decode(valid, config, batch_size, keep_errors=return_exceptions))
        return [next(answers) if isinstance(request, Request) else request for request in requests]

    @overload
    def score(
        self, prompt: Prompt, text: str | Sequence[int], *, config: CocoaConfig | None = None, **settings: Any
    ) -> Generation: ...

    @overload
    def score(
        self, prompt: Prompt, text: Texts, *, config: CocoaConfig | None = None, **settings: Any
    ) -> list[Generation]: ...

    def score(
        self, prompt: Prompt, text: str | Sequence[int] | Texts, *, config: CocoaConfig | None = None, **settings: Any
    ) -> Generation | list[Generation]:
        """Measure log-probability and disagreement of a given text after a prompt, by teacher forcing.

        The text is one span of kind ``"given"``. Its calibrated risk is computed as if no other token competed where it
        begins. Probabilities are the model's own: no processor applies. If the engine has a calibrator of answers, the
        candidates at the text's risk points are grown for the answer's risk; the usage does not count that.

        Args:
            prompt: text or token ids.
            text: a text or its token ids, or a list of these, such as the options of a question. Each is scored as it
                would be alone, but the prompt is encoded once (by ``dola``, ``decore`` and ``diver`` twice).
            config: settings to use instead of the engine's.
            **settings: as for :meth:`generate`.

        Returns:
            One result, or for a list of texts a list in the same order. A forward pass over tokens of several texts
            counts in the usage of each, and so do the prompt's passes; ``fed_tokens`` is the length of the text.

        Raises:
            ConfigError: as for :meth:`generate`.
            PromptError: prompt or text is empty, or the two do not fit the context window.
            NonFiniteLogitsError: the model's logits are NaN.
        """
        settled = self._settings(config, settings)
        return given_texts.score(self.session, prompt, text, settled, self._measure(settled, given=True))

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
        self, messages: Messages, *, template_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Generation:
        """Answer chat messages; options and errors are those of :meth:`generate` and :meth:`render_chat`."""
        return self.generate(self.encode_chat(messages, **(template_kwargs or {})), **options)

    def stream_chat(
        self, messages: Messages, *, template_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> SpanStream[CocoaEngine]:
        """Answer chat messages span by span; see :meth:`stream` and :meth:`chat`."""
        return self.stream(self.encode_chat(messages, **(template_kwargs or {})), **options)

    def _settings(self, config: CocoaConfig | None, settings: dict[str, Any]) -> CocoaConfig:
        base = self.config if config is None else _checked(config, CocoaConfig)
        config = base.replace(**settings) if settings else base
        self._warn_of_mismatch(config)
        return config

    def calibrator_for(self, config: CocoaConfig) -> RiskCalibrator | None:
        """The calibrator that applies to a call with these settings, if any.

        The default calibrator applies only to the settings that it was fitted for.
        """
        found = self.calibrator
        if found is None or not self._automatic:
            return found
        return None if found.mismatches(self.model_name, config, self.num_layers) else found

    def _embedded(self) -> RiskCalibrator | None:
        """The embedded model's calibrator, if this is that model."""
        found = embedded_calibrator()
        return found if found.model_name == self.model_name else None

    def _measure(self, config: CocoaConfig, *, given: bool = False) -> RiskMeasure:
        """How the risks of a call are computed. The embedded risk of answers is not used for given texts."""
        calibrator = self.calibrator_for(config)
        if given and self._automatic and calibrator is not None:
            calibrator = calibrator.spans_only()
        return risk_measure(config, calibrator)

    def _warn_of_mismatch(self, config: CocoaConfig | None) -> None:
        """Warn, once for each difference, that the calibrator was fitted with another model or other settings."""
        if self.calibrator is None or self._automatic:
            return
        found = self.calibrator.mismatches(self.model_name, config, self.num_layers)
        if fresh := [difference for difference in found if difference not in self._warned]:
            self._warned.update(fresh)
            warnings.warn(CalibrationWarning.of(fresh), stacklevel=4)

    def _decode(
        self, requests: Sequence[Request], config: CocoaConfig, batch_size: int | None, *, keep_errors: bool = False
    ) -> list[Generation | Exception]:
        measure = self._measure(config)
        return decode_batch(
            requests,
            lambda request: DecodeTask(request, config, self.session, measure),
            self.session.scheduler,
            self.runtime.max_batch_size if batch_size is None else batch_size,
            keep_errors=keep_errors,
        )


SettingsT = TypeVar("SettingsT", CocoaConfig, Runtime)


def _checked(given: SettingsT, kind: type[SettingsT]) -> SettingsT:
    if not isinstance(given, kind):
        name = "config" if kind is CocoaConfig else "runtime"
        raise ConfigError(f"{name} must be a {kind.__name__}, not {type(given).__name__}.")
    return given
