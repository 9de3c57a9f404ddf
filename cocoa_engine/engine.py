"""The public face of the engine: a model, a tokenizer, and questions put to them."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from cocoa_engine.assembly import make_span
from cocoa_engine.backends import Chosen, choose, state_of
from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.contrast_scoring import needs_more, rescored
from cocoa_engine.decoding import Decoding, require_ability
from cocoa_engine.errors import ConfigError, PromptError, RequestCancelledError
from cocoa_engine.generation_config import eos_token_ids
from cocoa_engine.grower import Grower, risk_points
from cocoa_engine.hidden_states import Wanted
from cocoa_engine.info import ModelInfo
from cocoa_engine.layer_curve import layer_curve
from cocoa_engine.methods import METHODS
from cocoa_engine.model import LanguageModel
from cocoa_engine.request import (
    Callables,
    PerPrompt,
    Request,
    is_many,
    make_request,
    prompt_ids,
    require_tokens,
    wanted_states,
)
from cocoa_engine.results import Competition, Generation, LayerCurve, Span, Usage
from cocoa_engine.risk import CalibrationWarning, RiskCalibrator
from cocoa_engine.risk.features import competition
from cocoa_engine.runtime import Runtime
from cocoa_engine.scheduler import Scheduler
from cocoa_engine.shared_prompt import GivenText, ScoredText, score_texts
from cocoa_engine.so_far import AnswerSoFar
from cocoa_engine.teacher_forcing import score_text
from cocoa_engine.tokens import Tokens

if TYPE_CHECKING:
    from cocoa_engine.grammar import GrammarProcessor

Prompt = str | Sequence[int]
Texts = list[str] | tuple[str, ...] | Sequence[Sequence[int]]  # not Sequence[str]: a str is one
Messages = Sequence[Mapping[str, Any]]


class CocoaEngine:
    """Decodes a local Hugging Face causal LM with CoCoA-SIG and reports the risk of every span.

    Threads may share one engine. The model and tokenizer are left as they were: nothing stays hooked onto them, also
    after an exception or an abandoned stream.

    Args:
        model: a decoder-only ``PreTrainedModel`` with a language-modelling head.
        tokenizer: its tokenizer.
        config: this engine's default settings.
        runtime: how the model is run: speed and memory, not what is decoded.
        model_name: for the record; by default the model's own ``name_or_path``.
        calibrator: gives every span a risk in [0, 1], or the answer, or both, as it was fitted; or the JSON file of
            one; or ``"embedded"``, the embedded model's. None leaves the raw MLDS. It is used as it is, with a
            :class:`CalibrationWarning`, where the model or the settings are not those of its fit.

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
        self._language_model = LanguageModel(model)
        self.runtime = Runtime() if runtime is None else _checked_runtime(runtime)
        self._tokens = Tokens(tokenizer)
        self.config = CocoaConfig() if config is None else _checked(config)
        self._scheduler = Scheduler(self.runtime.max_batch_size, self.runtime.max_queue)
        self._chosen: tuple[Any, Chosen] | None = None
        self.model_name = model_name or getattr(model, "name_or_path", "") or type(model).__name__
        self.calibrator = _checked_calibrator(calibrator)
        self._warned: set[str] = set()
        self._warn_of_mismatch(config)  # settings that nobody gave may be replaced at every call

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
        from cocoa_engine.loading import load_pretrained

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
        """The model, as given."""
        return self._language_model.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, as given."""
        return self._tokens.tokenizer

    @property
    def num_layers(self) -> int:
        """L, the number of decoder layers."""
        return self._language_model.num_layers

    @property
    def context_window(self) -> int | None:
        """The most tokens that prompt and answer may have together, if the model says."""
        return self._language_model.context_window

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` can be used."""
        return self._tokens.has_chat_template

    def without_calibrator(self) -> CocoaEngine:
        """This engine without its calibrator: itself if it has none, else one that shares everything else."""
        if self.calibrator is None:
            return self
        self._backend()  # chosen once for both
        other = copy.copy(self)
        other.calibrator = None
        return other

    def info(self) -> ModelInfo:
        """What the engine knows of the model; tries once whether branches can share its cache."""
        return ModelInfo.of(self._language_model, self._tokens, self.model_name, self._backend())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokens.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokens.decode(token_ids)

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
        from cocoa_engine.grammar import GrammarProcessor, json_schema_grammar, regex_grammar

        grammars = [
            json_schema_grammar(json_schema) if json_schema is not None else None,
            regex_grammar(regex) if regex is not None else None,
            grammar,
        ]
        given = [each for each in grammars if each is not None]
        if len(given) != 1:
            raise ConfigError("constrain takes exactly one of json_schema, regex and grammar")
        ends = eos_token_ids(self.model, self.tokenizer)
        return GrammarProcessor(given[0], self.tokenizer, eos_token_ids=ends)

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
            config: settings instead of the engine's.
            logits_processor: transformers processors, called on every branch before its next distribution is formed.
            stopping_criteria: transformers criteria, called on every branch after each token.
            generation_config: a transformers ``GenerationConfig`` whose end tokens, penalties and bans are honoured
                instead of the model's own.
            cancellation: lets another thread end the call.
            **settings: single fields of :class:`CocoaConfig` that override the settings.

        Raises:
            ConfigError: a setting is unknown, out of range or does not fit the model.
            PromptError: the prompt is empty or leaves no room in the context window.
            NonFiniteLogitsError: the model's logits are NaN.
            EngineBusyError: ``Runtime.max_queue`` requests wait already.
            RequestCancelledError: by ``cancellation``.
        """
        config = self._settings(config, settings)
        request = self._request(prompt, config, logits_processor, stopping_criteria, generation_config, cancellation)
        (generation,) = self._decode_all([request], config, 1)
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
    ) -> SpanStream:
        """Answer one prompt span by span; arguments and errors as for :meth:`generate`, raised at once.

        The work is done as spans are asked for. Closing the stream stops it; a suspended one blocks nobody.
        """
        config = self._settings(config, settings)
        request = self._request(prompt, config, logits_processor, stopping_criteria, generation_config, cancellation)
        return SpanStream(self, request, config)

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

        The results are those of :meth:`generate` on each, in order; see there for the other arguments and the errors.
        Every prompt is checked before any work is done. A prompt joins the batch when another has ended, and calls of
        other threads share its forward passes.

        Args:
            logits_processor: for all prompts, or a :class:`PerPrompt`.
            stopping_criteria: for all prompts, or a :class:`PerPrompt`.
            batch_size: at most this many at a time; none is ``Runtime.max_batch_size``, which it cannot exceed.
            return_exceptions: put the error of a prompt in its place, instead of raising the first one.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise PromptError("generate_batch takes a list of prompts; for a single one use generate.")
        if batch_size is None:
            batch_size = self.runtime.max_batch_size
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size must be a whole number, at least 1 (got {batch_size!r})")
        config = self._settings(config, settings)
        processors, criteria = (_of_each(given, len(prompts)) for given in (logits_processor, stopping_criteria))
        requests = [
            self._request(prompt, config, own_processors, own_criteria, generation_config, cancellation)
            for prompt, own_processors, own_criteria in zip(prompts, processors, criteria, strict=True)
        ]
        return self._decode_all(requests, config, batch_size, keep_errors=return_exceptions)

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
        """Log-probability and disagreement of a given text after a prompt, by teacher forcing; nothing is generated.

        The text is one span of kind ``"given"``; a calibrated risk of it is worked out as if nothing competed where it
        begins. Probabilities are the model's own: no processor applies. Where the engine has a calibrator of answers,
        the candidates of the text's risk points are grown for the answer's risk; the usage leaves that out.

        Args:
            prompt: text or token ids.
            text: a text or its token ids; or a list of such (the options of a question, say), each scored as it would
                be alone, but the prompt is encoded once (by ``dola``, ``decore`` and ``diver`` twice).
            config: settings instead of the engine's.
            **settings: as for :meth:`generate`.

        Returns:
            One result; of a list of texts, a list in its order. A forward pass over tokens of several texts counts in
            the usage of each, and so do the prompt's passes; ``fed_tokens`` is the length of the text.

        Raises:
            ConfigError: as for :meth:`generate`.
            PromptError: prompt or text is empty, or the two do not fit the context window.
            NonFiniteLogitsError: the model's logits are NaN.
        """
        config = self._settings(config, settings)
        model = self._language_model
        wanted = wanted_states(model, config)
        plain = wanted._replace(early=(), masked=())
        before = prompt_ids(model, self._tokens, prompt)
        if not is_many(text):
            ids, shown = self._given(prompt, before, text, "text to score")
            self._must_fit(before, ids, config)
            alone = ScoredText(score_text(model, before, ids, config, plain, len(shown)), 1)
            (one,) = self._by_method(before, [alone], config, wanted)
            (among,) = self._competition(before, [ids], config)
            return self._scored(before, shown, one, config, among)
        given = [self._given(prompt, before, one, f"text to score at index {n}") for n, one in enumerate(text)]
        for ids, _ in given:
            self._must_fit(before, ids, config)
        texts = [GivenText(ids, len(shown)) for ids, shown in given]
        scored = score_texts(self._backend().backend, before, texts, config, plain)
        scored = self._by_method(before, scored, config, wanted)
        competed = self._competition(before, [ids for ids, _ in given], config)
        return [
            self._scored(before, shown, one, config, among)
            for (_, shown), one, among in zip(given, scored, competed, strict=True)
        ]

    def layer_profile(self, prompt: Prompt | Messages, generation: Generation, span: Span | int) -> LayerCurve:
        """How the layers disagree about one span of an answer, layer by layer: what its MLDS are means of.

        The answer is fed once more, up to the end of the span, with the settings it was made with.

        Args:
            prompt: what the answer was made after; for :meth:`chat` its messages, or with ``template_kwargs`` their
                :meth:`encode_chat`.
            generation: the answer, generated or scored by a model like this one.
            span: one of its spans, or the number of one, counted from 0.

        Raises:
            ConfigError: the answer has no such span.
            PromptError: the prompt is not as long as the one of the answer.
            ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
            UnsupportedModelError: the model's final state is not as wide as its layers.
        """
        spans = generation.spans
        number = span if isinstance(span, int) else spans.index(span) if span in spans else len(spans)
        if not -len(spans) <= number < len(spans):
            raise ConfigError(f"the answer has no such span: give one of its spans, or a number below {len(spans)}.")
        given = self.encode_chat(cast("Messages", prompt)) if _is_chat(prompt) else prompt
        before = prompt_ids(self._language_model, self._tokens, given)
        if len(before) != generation.usage.prompt_tokens:
            raise PromptError(
                f"the answer was made after a prompt of {generation.usage.prompt_tokens} tokens, not of {len(before)}; "
                "give the same one (after a chat its messages, or engine.encode_chat of them with its template_kwargs)."
            )
        number %= len(spans)
        earlier = [token_id for one in spans[:number] for token_id in one.token_ids]
        return layer_curve(self._language_model, before + earlier, spans[number], generation.config)

    def _by_method(
        self, prompt: list[int], scored: list[ScoredText], config: CocoaConfig, wanted: Wanted
    ) -> list[ScoredText]:
        """Scored texts with the method's own score, where that takes more passes."""
        if not needs_more(config):
            return scored
        backend = self._backend().backend
        require_ability(config.method, backend, wanted)
        return rescored(backend, prompt, scored, config, wanted)

    def _must_fit(self, prompt: list[int], text: list[int], config: CocoaConfig) -> None:
        """Refuse what a method that reads the prompt twice has no room for."""
        window = self.context_window
        if METHODS[config.method].reads_back and window is not None and 2 * len(prompt) + len(text) > window:
            raise PromptError(
                f"the prompt ({len(prompt)} tokens), which method={config.method!r} reads twice, and the text to score "
                f"({len(text)}) exceed the model's context window of {window}."
            )

    def render_chat(self, messages: Messages, **template_kwargs: Any) -> str:
        """Chat messages as one text, by the tokenizer's chat template, ending where the answer begins.

        Raises:
            ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
        """
        return self._tokens.render_chat(messages, **template_kwargs)

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
    ) -> SpanStream:
        """Answer chat messages span by span; see :meth:`stream` and :meth:`chat`."""
        return self.stream(self.encode_chat(messages, **(template_kwargs or {})), **options)

    def _settings(self, config: CocoaConfig | None, settings: dict[str, Any]) -> CocoaConfig:
        base = self.config if config is None else _checked(config)
        config = base.replace(**settings) if settings else base
        self._warn_of_mismatch(config)
        return config

    def _request(
        self,
        prompt: Prompt,
        config: CocoaConfig,
        processors: Callables,
        criteria: Callables,
        generation_config: Any,
        cancellation: Cancellation | None,
    ) -> Request:
        return make_request(
            self._language_model, self._tokens, prompt, config, processors, criteria, generation_config, cancellation
        )

    def _warn_of_mismatch(self, config: CocoaConfig | None) -> None:
        """Warn, once for each difference, that the calibrator was fitted with another model or other settings."""
        if self.calibrator is None:
            return
        found = self.calibrator.mismatches(self.model_name, config, self.num_layers)
        if fresh := [difference for difference in found if difference not in self._warned]:
            self._warned.update(fresh)
            warnings.warn(CalibrationWarning.of(fresh), stacklevel=4)

    def _given(self, prompt: Prompt, before: list[int], text: Any, what: str) -> tuple[list[int], str]:
        """Token ids of a text to score after a prompt whose ids are ``before``, and the text as it is shown."""
        if not isinstance(text, str) or not text:
            ids = prompt_ids(self._language_model, self._tokens, text, what)
        elif isinstance(prompt, str):
            ids = require_tokens(self._tokens.continuation(prompt, before, text), what)
        else:
            ids = require_tokens(self.encode(text, add_special_tokens=False), what)
        window = self.context_window
        if window is not None and len(before) + len(ids) > window:
            raise PromptError(
                f"prompt ({len(before)} tokens) and {what} ({len(ids)}) exceed the model's context window of {window}."
            )
        return ids, text if isinstance(text, str) else self.decode(ids)

    def _competition(
        self, prompt: list[int], texts: Sequence[list[int]], config: CocoaConfig
    ) -> Sequence[Competition | None]:
        """What would have competed in given texts, if a calibrator asks for it."""
        if self.calibrator is None or self.calibrator.answer is None:
            return [None] * len(texts)
        if not METHODS[config.method].branches:
            return [Competition()] * len(texts)
        return [competition(risk_points(candidates)) for candidates in Grower(self, config)(prompt, texts)]

    def _scored(
        self, prompt: list[int], shown: str, scored: ScoredText, config: CocoaConfig, competed: Competition | None
    ) -> Generation:
        decided, forward_passes = scored
        copied, _ = AnswerSoFar(prompt).extend(decided.token_ids, decided.token_log_probs, decided.token_entropies)
        decided = replace(decided, token_copied=copied)
        count = len(decided.token_ids)
        generation = Generation(
            text=shown,
            token_ids=decided.token_ids,
            spans=[make_span(decided, (0, len(shown), shown), config, self._span_calibrator, given=True)],
            finish_reason=None,
            usage=Usage(
                prompt_tokens=len(prompt),
                completion_tokens=count,
                forward_passes=forward_passes,
                fed_tokens=count,
            ),
            config=config,
            model_name=self.model_name,
            competition=competed,
        )
        return self._judged(generation)

    @property
    def _span_calibrator(self) -> RiskCalibrator | None:
        """The calibrator if it knows the risk of a span."""
        return self.calibrator if self.calibrator is not None and self.calibrator.span is not None else None

    def _judged(self, generation: Generation) -> Generation:
        """The answer with its risk as a whole, if the calibrator knows that."""
        if self.calibrator is None or self.calibrator.answer is None or not generation.spans:
            return generation
        return generation.model_copy(update={"answer_risk": self.calibrator.answer_risk(generation)})

    def _backend(self) -> Chosen:
        """The backend for the model as it is now."""
        with self._language_model.lock:
            state = state_of(self._language_model)
            if self._chosen is None or self._chosen[0] != state:
                self._chosen = state, choose(self._language_model, self.runtime)
            return self._chosen[1]

    def _open(self, request: Request, config: CocoaConfig) -> Decoding:
        return Decoding(
            request,
            config,
            self._backend().backend,
            self._scheduler,
            self.decode,
            draft_tokens=self.runtime.draft_tokens,
            model_name=self.model_name,
            calibrator=self._span_calibrator,
        )

    def _decode_all(
        self, requests: Sequence[Request], config: CocoaConfig, most: int, *, keep_errors: bool = False
    ) -> list[Generation | Exception]:
        """Decode requests together, each joining as soon as there is a place and leaving when it is done."""
        results: dict[int, Generation | Exception] = {}
        running: dict[int, Decoding] = {}
        waiting = deque(enumerate(requests))
        scheduler = self._scheduler
        try:
            while waiting or running:
                # only at the beginning: later it would throw away what is done
                may_refuse = len(waiting) == len(requests)
                while (
                    waiting
                    and len(running) < most
                    and scheduler.enter(
                        wait=not running, may_refuse=may_refuse, cancellation=waiting[0][1].cancellation
                    )
                ):
                    number, request = waiting.popleft()
                    try:
                        running[number] = self._open(request, config)
                    except BaseException:
                        scheduler.leave()
                        raise
                scheduler.feed([decoding.work for decoding in running.values() if decoding.work is not None])
                for number, decoding in list(running.items()):
                    try:
                        decoding.advance()
                        if decoding.work is not None:
                            continue
                        decoding.ready()
                        results[number] = self._judged(decoding.generation())
                    except Exception as error:
                        if not keep_errors:
                            raise
                        results[number] = error
                    del running[number]
                    decoding.close()
                    scheduler.leave()
        finally:
            for decoding in running.values():
                decoding.close()
                scheduler.leave()
        return [results[number] for number in range(len(requests))]

    def _spans(self, shared: _Shared, request: Request, config: CocoaConfig) -> Generator[Span, None, None]:
        """Decode one request, holding a place only while a span is asked for; leaves the generation in ``shared``.

        It ends when the stream is closed; the request's own cancellation is an error.
        """
        decoding: Decoding | None = None
        try:
            with request.cancellation.heard_by(shared.closing.cancel):
                while decoding is None or decoding.work is not None:
                    with self._scheduler.place(may_refuse=decoding is None, cancellation=shared.closing):
                        if decoding is None:
                            decoding = self._open(replace(request, cancellation=shared.closing), config)
                            shared.decoding = decoding
                        spans: list[Span] = []
                        while not spans and decoding.work is not None:
                            self._scheduler.feed([decoding.work])
                            decoding.advance()
                            spans = decoding.ready()
                    if decoding.work is None:
                        shared.generation = self._judged(decoding.generation())
                    yield from spans
        except RequestCancelledError:
            if request.cancellation.cancelled or not shared.closing.cancelled:
                raise
        finally:
            if decoding is not None:
                shared.read, shared.decoding = decoding.prompt_read, None
                decoding.close()


def _is_chat(prompt: Prompt | Messages) -> bool:
    """Whether a prompt is chat messages, not yet text or token ids."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)


def _of_each(given: Callables | PerPrompt, count: int) -> Sequence[Callables]:
    """The processors or criteria of each prompt of a batch."""
    if not isinstance(given, PerPrompt):
        return [given] * count
    if len(given.each) != count:
        raise ConfigError(f"processors or criteria are given for {len(given.each)} prompts; there are {count}.")
    return given.each


def _checked(config: Any) -> CocoaConfig:
    if not isinstance(config, CocoaConfig):
        raise ConfigError(f"config must be a CocoaConfig, not {type(config).__name__}.")
    return config


def _checked_runtime(runtime: Any) -> Runtime:
    if not isinstance(runtime, Runtime):
        raise ConfigError(f"runtime must be a Runtime, not {type(runtime).__name__}.")
    return runtime


def _checked_calibrator(calibrator: Any) -> RiskCalibrator | None:
    if calibrator is None or isinstance(calibrator, RiskCalibrator):
        return calibrator
    if not isinstance(calibrator, (str, Path)):
        raise ConfigError(f"calibrator must be a RiskCalibrator or its file, not {type(calibrator).__name__}.")
    return RiskCalibrator.load(calibrator)


@dataclass
class _Shared:
    """What a stream and its work tell each other. Apart, for an abandoned stream to be freed at once: no cycle."""

    generation: Generation | None = None
    decoding: Decoding | None = None  # while there is one
    read: int = 0  # of the prompt, once there is none any more
    closing: Cancellation = field(default_factory=Cancellation)


class SpanStream(Iterator[Span]):
    """The spans of an answer, each as soon as it is decided; also a context manager."""

    def __init__(self, engine: CocoaEngine, request: Request, config: CocoaConfig) -> None:
        self._shared = _Shared()
        self._engine, self._request = engine, request
        self._spans = engine._spans(self._shared, request, config)

    @property
    def engine(self) -> CocoaEngine:
        """The engine that decodes."""
        return self._engine

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self._request.prompt

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """How many tokens of the prompt have been read, and how many there are. Any thread may ask at any time."""
        decoding = self._shared.decoding
        return self._shared.read if decoding is None else decoding.prompt_read, len(self.prompt)

    @property
    def processed(self) -> bool:
        """Whether logits processors act: the log-probabilities are then not those of the model's own distribution."""
        return bool(self._request.rules.processors)

    @property
    def generation(self) -> Generation | None:
        """The whole answer, once its last span was decided; none before."""
        return self._shared.generation

    @property
    def closed(self) -> bool:
        """Whether the work was stopped."""
        return self._shared.closing.cancelled

    def __next__(self) -> Span:
        span = next(self._spans)
        if self.closed:  # by another thread meanwhile, which could not stop the work from outside
            self.close()
            self._request.cancellation.check()
            raise StopIteration
        return span

    def close(self) -> None:
        """Stop the work; the stream yields nothing more.

        Any thread may call it, also while another asks for a span: that one ends before its next forward pass, and if
        it waits for a place, at once.
        """
        self._shared.closing.cancel()
        with contextlib.suppress(ValueError):  # another thread is inside: it was told
            self._spans.close()

    def __enter__(self) -> SpanStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
