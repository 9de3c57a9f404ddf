"""The engine: a model, a tokenizer, and what can be asked of them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from typing_extensions import Self

from cocoa_engine.arguments import given_or_new, of_type
from cocoa_engine.config import CocoaConfig, Runtime
from cocoa_engine.consistency import Consistency, Match, compare, sample_configs
from cocoa_engine.decoding.request import PerPrompt, Request, for_each, make_request
from cocoa_engine.decoding.task import decode_batch
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.execution.session import ModelInfo, Session
from cocoa_engine.interruptions import Cancellation
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.callables import Criteria, Processors
from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.model.load_options import DeviceMap
from cocoa_engine.model.prompts import (
    Messages,
    Passages,
    Prompt,
    Source,
    Texts,
    chat_ids,
    is_chat,
    is_many,
    passage_positions,
    require_room,
    sources_of_batch,
)
from cocoa_engine.model.tokenizer import Detokenizer, Tokens
from cocoa_engine.results import Generation
from cocoa_engine.risk import RiskCalibrator
from cocoa_engine.risk.policy import RiskPolicy
from cocoa_engine.scoring import given_texts
from cocoa_engine.stream import SpanStream
from cocoa_engine.timeline import Timeline

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from cocoa_engine.decoding.grammar import GrammarProcessor
    from cocoa_engine.model.light_model import LightModel


class CocoaEngine:
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
        runtime = given_or_new(runtime, Runtime, "runtime")
        self._session = Session(model, tokenizer, runtime, model_name)
        in_blocks = any(isinstance(weight, BlockTensor) for weight in model.parameters())
        if runtime.weights != "stored" and in_blocks == (runtime.weights == "float32"):
            raise ConfigError(f"weights={runtime.weights!r} applies to from_pretrained, not to a model that is loaded")
        self.config = given_or_new(config, CocoaConfig, "config")
        self._risk = RiskPolicy(self._session, calibrator)
        self._risk.warn_of_mismatch(config)  # default settings are checked with each call, which may replace them

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
        device_map: DeviceMap = "auto",
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **more_model_kwargs: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            model_name: a local folder or a Hub id. `None` loads the embedded SmolLM2-135M-Instruct.
            tokenizer_name: folder or Hub id of the tokenizer. Default: that of the model.
            config, runtime, calibrator: as for the constructor.
            dtype: ``"auto"`` (as stored), a name such as ``"bfloat16"``, or a ``torch.dtype``.
            device_map: as in transformers, e.g. ``"cuda:0"``. ``"auto"``: the GPUs if there are any, otherwise the CPU.
                `None` is the CPU.
            trust_remote_code: run code that comes with the checkpoint.
            allow_pickle: read weights stored as pickle, which can run code when read.
            model_kwargs: further options of the model's ``from_pretrained``, as are all other keywords.
            tokenizer_kwargs: options of the tokenizer's ``from_pretrained``.

        Raises:
            ModelLoadError: the model cannot be found or read, or was refused.
            UnsupportedModelError: the model is not a causal language model.
            CalibrationError: the calibrator's file cannot be read.
        """
        from cocoa_engine.execution.forward.linears import kernels_name, reads_blocks
        from cocoa_engine.model.loading import load_pretrained

        calibrator = "auto" if calibrator == "auto" else RiskCalibrator.of(calibrator)  # before the weights are read
        linears = "auto" if runtime is None else runtime.linears
        model, tokenizer, name = load_pretrained(
            model_name,
            tokenizer_name=tokenizer_name,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            keeps_blocks=partial(reads_blocks, linears),
            weights="stored" if runtime is None else runtime.weights,
            light_with=partial(kernels_name, linears) if runtime is None or runtime.forward == "auto" else None,
            model_kwargs=dict(model_kwargs or {}),
            tokenizer_kwargs=dict(tokenizer_kwargs or {}),
            **more_model_kwargs,
        )
        model = cast("PreTrainedModel", model)  # a light one is told apart where it matters
        tokens: Any = Tokens(tokenizer, is_shared=False)  # nobody else has it, so it need not be copied
        return cls(model, tokens, config=config, runtime=runtime, model_name=name, calibrator=calibrator)

    @property
    def session(self) -> Session:
        """The model, the tokenizer, and the scheduler that runs them. Every call of the engine goes through it.

        Raises:
            ForkedProcessError: the process has forked since the engine was loaded, and this is the child.
        """
        self._session.require_process()
        return self._session

    @property
    def model(self) -> PreTrainedModel:
        """The model that was passed in, or that was loaded.

        The second start of the embedded model or of a GGUF file loads the weights alone. The first read of this
        property then builds transformers' model on them, which takes seconds.
        """
        return self._session.model.whole()

    @property
    def held_model(self) -> PreTrainedModel | LightModel:
        """The model as it is held: the weights alone until :attr:`model` is read.

        Both have ``dtype``, ``device`` and ``generation_config``.
        """
        return self._session.model.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that was passed in."""
        return self._session.tokens.tokenizer

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an answer."""
        return eos_token_ids(self.held_model, self._session.tokens)

    @property
    def runtime(self) -> Runtime:
        """How the model is run."""
        return self._session.runtime

    @property
    def model_name(self) -> str:
        """The model's name in results."""
        return self._session.model_name

    @property
    def num_layers(self) -> int:
        """The number of decoder layers, L."""
        return self._session.model.num_layers

    @property
    def context_window(self) -> int | None:
        """The maximum length of prompt and answer together, in tokens; `None` if the config does not state it."""
        return self._session.model.context_window

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` can be used."""
        return self._session.tokens.has_chat_template

    def info(self) -> ModelInfo:
        """Facts about the model and how it runs. Selects its backend, if that has not been done before."""
        return ModelInfo.of(self.session)

    @property
    def calibrator(self) -> RiskCalibrator | None:
        """The calibrator of the engine. :meth:`calibrator_for` says whether it applies to a call."""
        return self._risk.calibrator

    @calibrator.setter
    def calibrator(self, calibrator: RiskCalibrator | str | Path | None) -> None:
        self._risk = RiskPolicy(self.session, calibrator)

    def calibrator_for(self, config: CocoaConfig) -> RiskCalibrator | None:
        """The calibrator that applies to a call with these settings, if any; for ``"auto"``, see the class."""
        self._session.require_process()
        return self._risk.applying(config)

    def rated(self, answer: Generation) -> Generation:
        """An answer, or a part of one, with the ``answer_risk`` that follows from its spans."""
        return self._risk.measure(answer.config).rated(answer)

    def with_calibrator(self, calibrator: RiskCalibrator | str | Path) -> Self:
        """This engine with another calibrator; everything else is shared, the running batch included.

        Raises:
            CalibrationError: the calibrator's file cannot be read, or it cannot be used with this model.
        """
        other = self._with(RiskPolicy(self.session, calibrator))
        other._risk.warn_of_mismatch(None)
        return other

    def without_calibrator(self) -> Self:
        """This engine without its calibrator; everything else is shared. Without one, returns the engine itself."""
        return self if self.calibrator is None else self._with(RiskPolicy(self._session, None))

    def without_answer_risk(self) -> Self:
        """This engine without a risk of answers, for texts that are parts of answers; all else is shared."""
        return self._with(self._risk.spans_only())

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: whether to begin with the tokens that the tokenizer puts before a text, unless the text
                begins with the first of them. No token is put after the text.
            split_special_tokens: whether text that spells a special token, such as ``<|im_end|>``, stays text.
        """
        return self.session.tokens.encode(
            text, add_special_tokens=add_special_tokens, split_special_tokens=split_special_tokens
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; a PromptError if they are no token ids."""
        return self.session.tokens.decode(token_ids)

    def detokenizer(self) -> Detokenizer:
        """A decoder for tokens that arrive one by one."""
        return Detokenizer(self.session.tokens)

    def constrain(
        self,
        *,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        ignored_ends: Collection[int] = (),
    ) -> GrammarProcessor:
        """A logits processor that constrains answers to a JSON schema, a regular expression or a grammar.

        It can be passed to any number of calls: ``engine.generate(prompt, logits_processor=engine.constrain(...))``.

        Args:
            json_schema: the answer is a JSON value that matches this schema, on one line.
            regex: the whole answer matches this expression (syntax of Rust's regex crate).
            grammar: the answer matches this grammar, in llguidance's dialect of Lark, with a rule ``start``.
            ignored_ends: those of :meth:`generate`, which may then stand in the answer.

        Raises:
            ConfigError: not exactly one of the first three is given, it is invalid or takes too much time or memory,
                the schema has a keyword that no grammar enforces (such as ``not``), or the tokenizer is no fast one.
            MissingExtraError: llguidance is not installed (the extra ``tools``).
        """
        from cocoa_engine.decoding.grammar import constraint

        ends = self.end_token_ids.difference(ignored_ends)
        if ignored_ends and not ends:
            raise ConfigError(
                "nothing would end an answer that follows a grammar: all end tokens of the model are ignored, as they "
                "stand in answers, too, such as before a call. Add another to eos_token_id of its generation_config."
            )
        return constraint(self.tokenizer, ends, json_schema=json_schema, regex=regex, grammar=grammar)

    def render_chat(self, messages: Messages, **template_kwargs: Any) -> str:
        """Chat messages as one text, by the tokenizer's chat template, up to the start of the answer.

        The text does not say which of its control tokens the template wrote: as a prompt, all of them are tokens. Give
        the messages to :meth:`encode_chat` or :meth:`chat` instead if others wrote them.

        Raises:
            ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
        """
        return self.session.tokens.render(messages, **template_kwargs).text

    def encode_chat(self, messages: Messages, **template_kwargs: Any) -> list[int]:
        """Token ids of chat messages, up to the start of the answer.

        Control tokens, such as ``<|im_end|>``, come from the template only. Text in messages, tools and template
        variables that spells one is encoded like other text, unless ``split_special_tokens=False`` is given.

        Raises:
            ChatTemplateError: as for :meth:`render_chat`.
        """
        return chat_ids(self.session.tokens, messages, template_kwargs)[1]

    def require_room(self, token_ids: Sequence[int]) -> None:
        """Raise a PromptError if a prompt leaves no tokens for an answer in the context window."""
        require_room(self.context_window, len(token_ids))

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
        ignored_ends: Collection[int] = (),
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
            ignored_ends: ids among :attr:`end_token_ids` that do not end this answer.
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
        arguments = (logits_processor, stopping_criteria, generation_config, cancellation, source, timeline)
        (generation,) = self._decode([self._request(prompt, config, *arguments, ignored_ends)])
        self._risk.warn_of_domain(generation.out_of_domain)
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
        ignored_ends: Collection[int] = (),
        **settings: Any,
    ) -> SpanStream:
        """Answer one prompt span by span; arguments and errors as for :meth:`generate`, raised at once.

        A span is decoded when it is requested. Closing the stream stops the work. A suspended stream blocks no other
        call.
        """
        config = self._settings(config, settings)
        arguments = (logits_processor, stopping_criteria, generation_config, cancellation, source, timeline)
        request = self._request(prompt, config, *arguments, ignored_ends)
        self._risk.check(config)
        return SpanStream(self.session, request, self._risk)

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
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise PromptError("generate_batch takes a list of prompts; for a single one use generate.")
        count = len(prompts)
        per_prompt = (for_each(logits_processor, count), for_each(stopping_criteria, count))
        requests: list[Request | PromptError] = []
        for prompt, *callables, passages in zip(prompts, *per_prompt, sources_of_batch(source, count), strict=True):
            try:
                requests.append(self._request(prompt, config, *callables, generation_config, cancellation, passages))
            except PromptError as error:
                if not return_exceptions:
                    raise
                requests.append(error)
        valid = [request for request in requests if isinstance(request, Request)]
        answers = iter(self._decode(valid, batch_size, keep_errors=return_exceptions))
        results = [next(answers) if isinstance(request, Request) else request for request in requests]
        self._risk.warn_of_domain(any(isinstance(result, Generation) and result.out_of_domain for result in results))
        return results

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
            config, source, cancellation, **settings: as for :meth:`generate`.
            divide: divide the text at its risk points, as decoding divides an answer, so that each part has a risk of
                its own. With a calibrator of spans, the candidates at the risk points are grown for it; the usage does
                not count that.

        Returns:
            One result, or for a list of texts a list in the same order. A forward pass over tokens of several texts
            counts in the usage of each, and so do the prompt's passes; ``fed_tokens`` is the length of the text.

        Raises:
            ConfigError: as for :meth:`generate`; or ``divide`` with a method that reads a text several times.
            PromptError: prompt or text is empty, or the two do not fit the context window.
            NonFiniteLogitsError, RequestCancelledError: as for :meth:`generate`.
        """
        settled = self._settings(config, settings)
        cancellation = given_or_new(cancellation, Cancellation, "cancellation")
        many = is_many(text)
        texts = list(text) if many else [text]
        arguments = (self.session, prompt, texts, many, settled, self._risk, source, divide, cancellation)
        scored = cancellation.run(given_texts.score, *arguments)
        self._risk.warn_of_domain(any(result.out_of_domain for result in scored))
        return scored if many else scored[0]

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
            config, logits_processor, stopping_criteria, generation_config, cancellation: as for :meth:`generate`.
            **settings: fields of :class:`CocoaConfig`. Samples have the method ``"sample"``; with a ``seed``, sample i
                has the seed ``seed + i``.

        Raises:
            ConfigError: ``n`` is out of range, ``temperature`` is not above 0, the samples would all be greedy,
                ``match`` returns something else, or as for :meth:`generate`.
            PromptError, NonFiniteLogitsError, EngineBusyError, RequestCancelledError: as for :meth:`generate`.
            ChatTemplateError: as for :meth:`chat`.
        """
        config = self._settings(config, settings)
        token_ids = self.encode_chat(prompt) if is_chat(prompt) else prompt
        arguments = (logits_processor, stopping_criteria, generation_config, cancellation)
        requests = [self._request(token_ids, sampled, *arguments) for sampled in sample_configs(config, n, temperature)]
        if answer is None:  # first, so that the samples reuse its prompt
            (answer,) = self._decode([self._request(token_ids, config, *arguments)])
        return compare(answer, self._decode(requests), match)

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
        token_ids, passages = self._chat_prompt(messages, template_kwargs, source, options.get("cancellation"))
        return self.generate(token_ids, source=passages, **options)

    def stream_chat(
        self,
        messages: Messages,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        source: Source | None = None,
        **options: Any,
    ) -> SpanStream:
        """Answer chat messages span by span; see :meth:`stream` and :meth:`chat`."""
        token_ids, passages = self._chat_prompt(messages, template_kwargs, source, options.get("cancellation"))
        return self.stream(token_ids, source=passages, **options)

    def _settings(self, config: CocoaConfig | None, settings: dict[str, Any]) -> CocoaConfig:
        base = self.config if config is None else of_type(config, CocoaConfig, "config")
        config = base.replace(**settings) if settings else base
        self._risk.warn_of_mismatch(config)
        return config

    def _request(self, prompt: Prompt, config: CocoaConfig, *arguments: Any) -> Request:
        return make_request(self.session, prompt, config, self._risk.fitting(config), *arguments)

    def _chat_prompt(
        self,
        messages: Messages,
        template_kwargs: Mapping[str, Any] | None,
        source: Source | None,
        cancellation: Cancellation | None,
    ) -> tuple[list[int], Passages | None]:
        """Token ids of chat messages, and the positions of the passages in them."""
        if cancellation is not None:
            run = of_type(cancellation, Cancellation, "cancellation").run
            return run(self._chat_prompt, messages, template_kwargs, source, None)
        tokens = self.session.tokens
        text, token_ids = chat_ids(tokens, messages, template_kwargs or {})
        if source is None:
            return token_ids, None
        return token_ids, passage_positions(tokens, text, token_ids, source, add_special_tokens=False)

    def _decode(
        self, requests: Sequence[Request], batch_size: int | None = None, *, keep_errors: bool = False
    ) -> list[Any]:
        """The answers; with ``keep_errors``, the error of a request in the place of its answer."""
        size = self.runtime.max_batch_size if batch_size is None else batch_size
        return decode_batch(requests, self.session, self._risk, size, keep_errors=keep_errors)

    def _with(self, risk: RiskPolicy) -> Self:
        other = copy.copy(self)
        other._risk = risk
        return other
