"""A loaded model with its tokenizer: facts about the model, and conversion between text and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cocoa_engine.errors import ChatTemplateError
from cocoa_engine.execution.session import Session
from cocoa_engine.info import ModelInfo
from cocoa_engine.model.detokenizer import Detokenizer
from cocoa_engine.model.ends import eos_token_ids
from cocoa_engine.model.prompts import ChatTokens, Messages, without_history
from cocoa_engine.runtime import Runtime

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cocoa_engine.decoding.grammar import GrammarProcessor
    from cocoa_engine.model.light_model import LightModel


class LoadedModel:
    """The base class of :class:`~cocoa_engine.CocoaEngine`: facts about its model, and conversion of text to tokens."""

    def __init__(self, session: Session) -> None:
        self._session = session

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
        """The model as it is held: the weights alone where nothing has asked for :attr:`model` yet.

        Both have ``dtype``, ``device`` and ``generation_config``.
        """
        return self._session.model.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that was passed in."""
        return self._session.tokens.tokenizer

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

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: the text.
            add_special_tokens: whether to begin with the tokens that the tokenizer puts before a text, unless the text
                begins with the first of them. No token is put after the text.
            split_special_tokens: whether text that spells a special token, such as ``<|im_end|>``, stays text.
        """
        return self.session.tokens.encode(
            text, add_special_tokens=add_special_tokens, split_special_tokens=split_special_tokens
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out.

        Raises:
            PromptError: they are no token ids.
        """
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
    ) -> GrammarProcessor:
        """A logits processor that constrains answers to a JSON schema, a regular expression or a grammar.

        It can be passed to any number of calls: ``engine.generate(prompt, logits_processor=engine.constrain(...))``.

        Args:
            json_schema: the answer is a JSON value that matches this schema, on one line.
            regex: the whole answer matches this expression (syntax of Rust's regex crate).
            grammar: the answer matches this grammar, in llguidance's dialect of Lark, with a rule ``start``.

        Raises:
            ConfigError: not exactly one of them is given, it is invalid or takes too much time or memory, the schema
                has a keyword that no grammar enforces (such as ``not``), or the tokenizer is not a fast tokenizer.
            MissingExtraError: llguidance is not installed (the extra ``tools``).
        """
        from cocoa_engine.decoding.grammar import constraint

        ends = eos_token_ids(self.held_model, self._session.tokens)
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
        return self._encoded_rendering(messages, template_kwargs)[1]

    def _encoded_rendering(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Chat messages as text and as token ids."""
        tokens = self.session.tokens
        rendered = tokens.render(messages, **template_kwargs)
        ids = tokens.encode_rendered(rendered)
        question = without_history(messages)
        if question is None:
            return rendered.text, ids
        try:
            alone = tokens.encode_rendered(tokens.render(question, **template_kwargs))
        except ChatTemplateError:  # such as of a template that wants the call of a tool before its answer
            return rendered.text, ids
        return rendered.text, ChatTokens(ids, len(alone))
