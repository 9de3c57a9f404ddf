"""The public face of the engine: a model, a tokenizer, and what can be asked of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from cocoa_engine.calibration import CalibrationWarning, RiskCalibrator
from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.batch import decode_batch
from cocoa_engine.decoding.request import Callables, PerPrompt, Request, for_each, make_request
from cocoa_engine.decoding.task import DecodeTask
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.execution.session import Session
from cocoa_engine.info import ModelInfo
from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.model.prompts import Messages, Prompt, Texts, is_chat
from cocoa_engine.results import Generation, LayerCurve
from cocoa_engine.runtime import Runtime
from cocoa_engine.scoring import given_texts, layer_curve
from cocoa_engine.spans import Span
from cocoa_engine.stream import SpanStream

if TYPE_CHECKING:
    from cocoa_engine.decoding.grammar import GrammarProcessor


class CocoaEngine:
    """Decodes a local Hugging Face causal LM with CoCoA-SIG and reports the risk of every span.

    Threads may share one engine. The model and the tokenizer are left unchanged: no hook remains on them, not even
    after an exception or an abandoned stream.

    Args:
        model: a decoder-only ``PreTrainedModel`` with a language-modelling head.
        tokenizer: its tokenizer.
        config: the default settings of the engine.
        runtime: how the model is run. It changes speed and memory, not what is decoded.
        model_name: the name in results. Default: the model's ``name_or_path``.
        calibrator: a calibrator, its JSON file, or ``"embedded"`` for the embedded model's. It gives every span, or the
            answer, or both, a risk in [0, 1], depending on what it was fitted on. Without one, risk is the raw MLDS. A
            calibrator that was fitted for another model or other settings is used with a :class:`CalibrationWarning`.

    Raises:
        UnsupportedModelError: the model is not a causal language model, or has fewer than 3 layers.
        CalibrationError: the calibrator's file cannot be read.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        config: CocoaConfig | None = None,
        runtime: Runtime | None = None,
        model_name: str | None = None,
        calibrator: RiskCalibrator | str | Path | None = None,
    ) -> None:
        self.session = Session(
            model, tokenizer, Runtime() if runtime is None else _checked(runtime, Runtime), model_name
        )
        self.config = CocoaConfig() if config is None else _checked(config, CocoaConfig)
        self.calibrator = _checked_calibrator(calibrator)
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
        calibrator: RiskCalibrator | str | Path | None = None,
        dtype: Any = "auto",
        device_map: Any = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **more_model_kwargs: Any,
    ) -> CocoaEngine:
        """Load a model and its tokenizer.

        Args:
            model_name: a local folder or a hub id; none loads the embedded SmolLM2-135M-Instruct.
            tokenizer_name: where the tokenizer is, if elsewhere.
            config: the engine's default settings.
            runtime: how the model is run.
            calibrator: gives spans and answers a risk in [0, 1], or the JSON file of one; ``"embedded"`` is the
                embedded model's.
            dtype: ``"auto"`` (as stored), a name such as ``"bfloat16"``, or a ``torch.dtype``.
            device_map: as in transformers, e.g. ``"auto"`` or ``"cuda:0"``; none is the CPU.
            trust_remote_code: run code that comes with the checkpoint.
            allow_pickle: read weights stored as pickle, which can run code when read.
            model_kwargs: further options of the model's ``from_pretrained``, as are all other keywords.
            tokenizer_kwargs: options of the tokenizer's ``from_pretrained``.

        Raises:
            ModelLoadError: it cannot be found or read, or was refused.
            UnsupportedModelError: it is not a causal language model.
            CalibrationError: the calibrator's file cannot be read.
        """
        from cocoa_engine.model.loading import load_pretrained

        calibrator = _checked_calibrator(calibrator)
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

    @property
    def model(self) -> Any:
        """The model that was passed in."""
        return self.session.model.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was passed in."""
        return self.session.tokens.tokenizer

    @property
    def runtime(self) -> Runtime:
        """How the model is run."""
        return self.session.runtime

    @property
    def model_name(self) -> str:
        """The model's name, as it stands in results."""
        return self.session.model_name

    @property
    def num_layers(self) -> int:
        """The number of decoder layers, L."""
        return self.session.model.num_layers

    @property
    def context_window(self) -> int | None:
        """The maximum length of prompt and answer together, in tokens; `None` if the model's config does not tell."""
        return self.session.model.context_window

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` can be used."""
        return self.session.tokens.has_chat_template

    def without_calibrator(self) -> CocoaEngine:
        """This engine without its calibrator: itself if it has none, else one that shares everything else."""
        if self.calibrator is None:
            return self
        other = copy.copy(self)
        other.calibrator = None
        return other

    def info(self) -> ModelInfo:
        """What the engine knows of the model; tries once whether branches can share its cache."""
        return ModelInfo.of(self.session)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.session.tokens.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.session.tokens.decode(token_ids)

    def constrain(
        self,
        *,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> GrammarProcessor:
        """A logits processor that holds answers to one of these, with the tokens that end this model's answers.

        It may be given to any number of calls: ``engine.generate(prompt, logits_processor=engine.constrain(...))``.

        Args:
            json_schema: the answer is a JSON value that fits it, on one line.
            regex: the answer as a whole matches it (syntax of Rust's regex crate).
            grammar: in llguidance's dialect of Lark, with a rule ``start``.

        Raises:
            ConfigError: not exactly one is given, it is not valid, or the tokenizer is not fast.
            MissingExtraError: llguidance is not installed (the extra ``tools``).
        """
        from cocoa_engine.decoding.grammar import constraint

        ends = eos_token_ids(self.model, self.tokenizer)
        return constraint(self.tokenizer, ends, json_schema=json_schema, regex=regex, grammar=grammar)

    def generate(
        self,
        prompt: Prompt,
        *,
        config: CocoaConfig | None = None,
        logits_processor: Callables = None,
        stopping_criteria: Callables = None,
        generation_config: Any = None,
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
        generation_config: Any = None,
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
        return SpanStream(self, request, config, self.calibrator)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        config: CocoaConfig | None = None,
        logits_processor: Callables | PerPrompt = None,
        stopping_criteria: Callables | PerPrompt = None,
        generation_config: Any = None,
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
            return_exceptions: return the error of a prompt in its position, instead of raising the first one.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise PromptError("generate_batch takes a list of prompts; for a single one use generate.")
        if batch_size is None:
            batch_size = self.runtime.max_batch_size
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size must be a whole number, at least 1 (got {batch_size!r})")
        config = self._settings(config, settings)
        processors, criteria = (for_each(given, len(prompts)) for given in (logits_processor, stopping_criteria))
        requests = [
            make_request(self.session, *each, generation_config, cancellation)
            for each in zip(prompts, repeat(config), processors, criteria)
        ]
        return self._decode(requests, config, batch_size, keep_errors=return_exceptions)

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
        return given_texts.score(self.session, prompt, text, self._settings(config, settings), self.calibrator)

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

    def render_chat(self, messages: Messages, **template_kwargs: Any) -> str:
        """Chat messages as one text, by the tokenizer's chat template, ending where the answer begins.

        Raises:
            ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
        """
        return self.session.tokens.render_chat(messages, **template_kwargs)

    def encode_chat(self, messages: Messages, **template_kwargs: Any) -> list[int]:
        """Token ids of :meth:`render_chat`; the template brings its own special tokens."""
        return self.encode(self.render_chat(messages, **template_kwargs), add_special_tokens=False)

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

    def _warn_of_mismatch(self, config: CocoaConfig | None) -> None:
        """Warn, once for each difference, that the calibrator was fitted with another model or other settings."""
        if self.calibrator is None:
            return
        found = self.calibrator.mismatches(self.model_name, config, self.num_layers)
        if fresh := [difference for difference in found if difference not in self._warned]:
            self._warned.update(fresh)
            warnings.warn(CalibrationWarning.of(fresh), stacklevel=4)

    def _decode(
        self, requests: Sequence[Request], config: CocoaConfig, batch_size: int, *, keep_errors: bool = False
    ) -> list[Generation | Exception]:
        return decode_batch(
            requests,
            lambda request: DecodeTask(request, config, self.session, self.calibrator),
            self.session.scheduler,
            batch_size,
            keep_errors=keep_errors,
        )


SettingsT = TypeVar("SettingsT", CocoaConfig, Runtime)


def _checked(given: SettingsT, kind: type[SettingsT]) -> SettingsT:
    if not isinstance(given, kind):
        name = "config" if kind is CocoaConfig else "runtime"
        raise ConfigError(f"{name} must be a {kind.__name__}, not {type(given).__name__}.")
    return given


def _checked_calibrator(calibrator: RiskCalibrator | str | Path | None) -> RiskCalibrator | None:
    if calibrator is None or isinstance(calibrator, RiskCalibrator):
        return calibrator
    if not isinstance(calibrator, (str, Path)):
        raise ConfigError(f"calibrator must be a RiskCalibrator or its file, not {type(calibrator).__name__}.")
    return RiskCalibrator.load(calibrator)
