"""The public face of the engine: a model, a tokenizer, and questions put to them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, overload

from cocoa_engine.assembly import Assembler, make_span
from cocoa_engine.backends import Chosen, Path, TokenTree, choose
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decode import Decided, Sequencer
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.info import ModelInfo
from cocoa_engine.model import LanguageModel
from cocoa_engine.request import Callables, Request, is_many, make_request, prompt_ids, require_tokens, wanted_states
from cocoa_engine.results import Generation, Span, Usage
from cocoa_engine.runtime import Runtime
from cocoa_engine.shared_prompt import GivenText, score_texts
from cocoa_engine.teacher_forcing import score_text
from cocoa_engine.text import TextTrack
from cocoa_engine.tokens import Tokens

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

    Raises:
        UnsupportedModelError: the model is not a causal language model, or has fewer than 3 layers.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        config: CocoaConfig | None = None,
        runtime: Runtime | None = None,
        model_name: str | None = None,
    ) -> None:
        self._language_model = LanguageModel(model)
        self.runtime = Runtime() if runtime is None else runtime
        self._tokens = Tokens(tokenizer)
        self.config = CocoaConfig() if config is None else _checked(config)
        self.model_name = model_name or getattr(model, "name_or_path", "") or type(model).__name__

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | None = None,
        *,
        tokenizer_name: str | None = None,
        config: CocoaConfig | None = None,
        runtime: Runtime | None = None,
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
            dtype: ``"auto"`` (as stored), a name such as ``"bfloat16"``, or a ``torch.dtype``.
            device_map: as in transformers, e.g. ``"auto"`` or ``"cuda:0"``; none is the CPU.
            trust_remote_code: run code that comes with the checkpoint.
            allow_pickle: read weights stored as pickle, which can run code when read.
            model_kwargs: further options of the model's ``from_pretrained``, as are all other keywords.
            tokenizer_kwargs: options of the tokenizer's ``from_pretrained``.

        Raises:
            ModelLoadError: it cannot be found or read, or was refused.
            UnsupportedModelError: it is not a causal language model.
        """
        from cocoa_engine.loading import load_pretrained

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
        return cls(model, tokenizer, config=config, runtime=runtime, model_name=name)

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

    def info(self) -> ModelInfo:
        """What the engine knows of the model; tries once whether branches can share its cache."""
        return ModelInfo.of(self._language_model, self._tokens, self.model_name, self._backend())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokens.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokens.decode(token_ids)

    def generate(
        self,
        prompt: Prompt,
        *,
        config: CocoaConfig | None = None,
        logits_processor: Callables = None,
        stopping_criteria: Callables = None,
        **settings: Any,
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: text (the tokenizer adds its special tokens) or token ids (taken as they are).
            config: settings instead of the engine's.
            logits_processor: transformers processors, called on every branch before its next distribution is formed.
            stopping_criteria: transformers criteria, called on every branch after each token.
            **settings: single fields of :class:`CocoaConfig` that override the settings.

        Raises:
            ConfigError: a setting is unknown, out of range or does not fit the model.
            PromptError: the prompt is empty or leaves no room in the context window.
            NonFiniteLogitsError: the model's logits are NaN.
        """
        stream = self.stream(
            prompt, config=config, logits_processor=logits_processor, stopping_criteria=stopping_criteria, **settings
        )
        for _ in stream:
            pass
        assert stream.generation is not None
        return stream.generation

    def stream(
        self,
        prompt: Prompt,
        *,
        config: CocoaConfig | None = None,
        logits_processor: Callables = None,
        stopping_criteria: Callables = None,
        **settings: Any,
    ) -> SpanStream:
        """Answer one prompt span by span; arguments and errors as for :meth:`generate`, raised at once.

        The work is done as spans are asked for. Closing the stream stops it; a suspended one blocks nobody.
        """
        config = self._settings(config, settings)
        request = make_request(self._language_model, self._tokens, prompt, config, logits_processor, stopping_criteria)
        return SpanStream(self, request, config)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        config: CocoaConfig | None = None,
        logits_processor: Callables = None,
        stopping_criteria: Callables = None,
        batch_size: int = 8,
        **settings: Any,
    ) -> list[Generation]:
        """Answer several prompts together, up to ``batch_size`` in each forward pass.

        The results are those of :meth:`generate` on each, in order; see there for the other arguments and the errors.
        Every prompt is checked before any work is done.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise PromptError("generate_batch takes a list of prompts; for a single one use generate.")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size must be a whole number, at least 1 (got {batch_size!r})")
        config = self._settings(config, settings)
        requests = [
            make_request(self._language_model, self._tokens, prompt, config, logits_processor, stopping_criteria)
            for prompt in prompts
        ]
        generations: list[Generation] = []
        for first in range(0, len(requests), batch_size):
            generations += self._generate_together(requests[first : first + batch_size], config)
        return generations

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

        The text is one span of kind ``"given"``. Probabilities are the model's own: no processor applies.

        Args:
            prompt: text or token ids.
            text: a text or its token ids; or a list of such (the options of a question, say), each scored as it would
                be alone, but the prompt is encoded once.
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
        before = prompt_ids(model, self._tokens, prompt)
        if not is_many(text):
            ids, shown = self._given(prompt, before, text, "text to score")
            decided = score_text(model, before, ids, config, wanted, len(shown))
            return self._scored(len(before), shown, decided, config, 1)
        given = [self._given(prompt, before, one, f"text to score at index {n}") for n, one in enumerate(text)]
        texts = [GivenText(ids, len(shown)) for ids, shown in given]
        scored = score_texts(self._backend().backend, before, texts, config, wanted)
        return [
            self._scored(len(before), shown, one.decided, config, one.forward_passes)
            for (_, shown), one in zip(given, scored, strict=True)
        ]

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
        return base.replace(**settings) if settings else base

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

    def _scored(
        self, prompt_tokens: int, shown: str, decided: Decided, config: CocoaConfig, forward_passes: int
    ) -> Generation:
        count = len(decided.token_ids)
        return Generation(
            text=shown,
            token_ids=decided.token_ids,
            spans=[make_span(decided, (0, len(shown), shown), config, given=True)],
            finish_reason=None,
            usage=Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=count,
                forward_passes=forward_passes,
                fed_tokens=count,
            ),
            config=config,
            model_name=self.model_name,
        )

    def _backend(self) -> Chosen:
        return choose(self._language_model, self.runtime)

    def _sequencer(self, request: Request) -> Sequencer:
        return Sequencer(request.prompt, request.rules, TextTrack(self.decode, request.rules.stop_texts))

    def _generate_together(self, requests: Sequence[Request], config: CocoaConfig) -> list[Generation]:
        """Decode some requests in step: each forward pass feeds the tips of all that have not ended."""
        backend = self._backend().backend
        room = max(request.room for request in requests)
        trees = backend.open([request.prompt for request in requests], room, requests[0].wanted)
        sequencers = [self._sequencer(request) for request in requests]
        try:
            loops = [s.decode(tree, backend.prefill(tree)) for s, tree in zip(sequencers, trees, strict=True)]
            asked: dict[int, Sequence[Path]] = {number: next(loop) for number, loop in enumerate(loops)}
            while asked:
                outputs = backend.step([(trees[number], paths) for number, paths in asked.items()])
                for number, output in zip(list(asked), outputs, strict=True):
                    try:
                        asked[number] = loops[number].send(output)
                    except StopIteration:
                        del asked[number]
                        trees[number].close()
        finally:
            for tree in trees:
                tree.close()
        generations = []
        for request, sequencer, tree in zip(requests, sequencers, trees, strict=True):
            assembler = Assembler(config, len(request.prompt), self.model_name)
            assembler.ready(sequencer)
            generations.append(assembler.generation(sequencer, tree))
        return generations

    def _spans(self, stream: SpanStream, request: Request, assembler: Assembler) -> Generator[Span, None, None]:
        """Decode one request; leaves the whole generation in the stream."""
        backend = self._backend().backend
        tree: TokenTree = backend.open([request.prompt], request.room, request.wanted)[0]
        sequencer = self._sequencer(request)
        try:
            loop = sequencer.decode(tree, backend.prefill(tree))
            paths = next(loop)
            while True:
                yield from assembler.ready(sequencer)
                if stream.closed:
                    return
                output = backend.step([(tree, paths)])[0]
                try:
                    paths = loop.send(output)
                except StopIteration:
                    break
        finally:
            tree.close()
        last = assembler.ready(sequencer)
        stream.generation = assembler.generation(sequencer, tree)
        yield from last


def _checked(config: Any) -> CocoaConfig:
    if not isinstance(config, CocoaConfig):
        raise ConfigError(f"config must be a CocoaConfig, not {type(config).__name__}.")
    return config


class SpanStream(Iterator[Span]):
    """The spans of an answer, each as soon as it is decided; also a context manager.

    Attributes:
        generation: the whole answer, once its last span was decided; none before.
        closed: whether the work was stopped.
    """

    def __init__(self, engine: CocoaEngine, request: Request, config: CocoaConfig) -> None:
        self.generation: Generation | None = None
        self.closed = False
        self._spans = engine._spans(self, request, Assembler(config, len(request.prompt), engine.model_name))

    def __next__(self) -> Span:
        return next(self._spans)

    def close(self) -> None:
        """Stop the work; the stream yields nothing more. Any thread may call it, also while another asks for a span."""
        self.closed = True
        with contextlib.suppress(ValueError):  # another thread is inside: it stops before its next forward pass
            self._spans.close()

    def __enter__(self) -> SpanStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
