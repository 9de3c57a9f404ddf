"""CoCoA decoding as a LlamaIndex LLM, with the option names of HuggingFaceLLM."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, ValidationError, field_serializer
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from torch import nn
from typing_extensions import Self

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, SpanStream
from cocoa_engine.logs import safe_logger
from cocoa_engine.messages import explain
from cocoa_engine.model.checkpoint_files import ACCESS_OPTIONS
from cocoa_engine.model.text import require_unicode
from cocoa_engine.report import Detail
from cocoa_integrations._shared.at_exit import closed_at_exit
from cocoa_integrations._shared.chat_template import ChatTemplateOptions, given_options
from cocoa_integrations._shared.load_options import one_model_name, with_field_names
from cocoa_integrations._shared.settings import (
    DecodeSettings,
    config_of,
    fields_of,
    refuse_unknown,
    split_settings,
    updated,
)
from cocoa_integrations._shared.unsupported import refuse_unsupported
from cocoa_integrations.chat_service import Answer, ChatCall, RemoteChat
from cocoa_integrations.chat_service.local import PreparedCall
from cocoa_integrations.chat_service.remote import DEFAULT_MODEL, sent_settings
from cocoa_integrations.llama_index.callbacks import Observers, Start
from cocoa_integrations.llama_index.messages import (
    ChatWriter,
    CompletionWriter,
    Delivery,
    Response,
    Writer,
    edited,
    require_text,
    to_entries,
)
from cocoa_integrations.llama_index.options import (
    BESIDE_SETTINGS,
    SUPPORTED,
    DecodeOptions,
    ModelOptions,
    split_template_options,
    split_tools,
)
from cocoa_integrations.llama_index.retrieved import PassagesOfCall
from cocoa_integrations.llama_index.structured import CallsFunctions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = safe_logger(__name__)

Edit = Callable[[str], str] | None

FOLLOW_MODEL = ("context_window", "is_chat_model", "is_function_calling_model")
"""Options that follow from the model unless they are given."""


class CocoaLLM(ChatTemplateOptions, DecodeSettings, ModelOptions, CallsFunctions):
    """A language model, decoded with CoCoA, that reports the risk of every span of its answers.

    The model is a local Hugging Face model, or that of a server (``cocoa serve``) whose address is ``base_url``.

    Every field of :class:`CocoaConfig` is also an option, of the constructor and of each call::

        llm = CocoaLLM(model="Qwen/Qwen2.5-7B-Instruct", alpha=2.0, max_new_tokens=128)
        response = llm.complete("The capital of France is", alpha=0.5)
        response.additional_kwargs["cocoa_risk"]["max_risk"]

    Without a model it loads the embedded default model. Calls also accept those keywords of transformers' ``generate``
    that CoCoA supports; other keywords raise an error. Chat messages are formatted with the chat template of the
    tokenizer unless ``messages_to_prompt`` is given. The last chunk of a streamed answer adds no text; it has the
    report of the complete answer, its usage and its finish reason.

    The reasoning of a model, its text between ``<think>`` and ``</think>``, is a ``ThinkingBlock`` of the chat message.
    ``message.content`` and the deltas are the answer only, no tool is called before ``</think>``, and the risk report
    counts the answer: the reasoning has its own values in ``cocoa_risk["reasoning"]``. Spans then have a ``part``,
    ``"reasoning"`` or ``"answer"``, and chunks have the new reasoning in ``additional_kwargs["thinking_delta"]``.
    ``complete`` returns all of the text.

    LlamaIndex counts tokens with its own tokenizer to fit contexts into the window. Set ``Settings.tokenizer =
    llm.engine.encode`` to count the tokens of the model.

    With ``base_url``, which needs the extra ``remote``, ``model`` is a name of the model at the server, settings that
    are not given are the server's, and ``context_window`` is asked of it once. The retrieved nodes of an engine whose
    text is in the messages are sent as ``source``. Errors of the server are those of the package ``openai``, with its
    message, such as ``BadRequestError`` and ``RateLimitError``. An answer with a missing field or one of a wrong type,
    such as that of a server of another kind, is a ``DataError``.

    Every option is a field that can be read and set; a new value applies from the next call. If it concerns the
    weights, they are loaded again. LLMs with the same loading options share one engine, and LLMs that differ in
    ``runtime`` or ``calibrator`` share the weights. Copies share the engine. An unpickled LLM loads its model by name;
    one with a loaded engine, model or tokenizer cannot be pickled. ``to_dict`` and ``from_dict`` transfer a description
    without weights and secrets.

    Args:
        engine: the engine to use, instead of the options that load one.
        config: the decode settings to start from, by default those of the engine. Single settings take precedence.
        model: a synonym of ``model_name``; or a loaded model, which needs ``tokenizer`` or ``tokenizer_name``.
        tokenizer: a loaded tokenizer, instead of ``tokenizer_name``.
        generate_kwargs: decode options of every call, under the names that calls accept. Settings among them are
            stored in the field of their name.
        **options: the fields below; the loading options of :class:`~cocoa_engine.model.load_options.LoadOptions`
            (``device_map``: the GPUs if there are any, otherwise the CPU; ``None``: the CPU); the settings of
            :class:`CocoaConfig`; ``messages_to_prompt``, which formats chat messages instead of the chat template;
            ``completion_to_prompt``, which wraps each prompt of a completion; and LlamaIndex's own LLM options
            (``callback_manager``, ``output_parser``, ``pydantic_program_mode``, ``rate_limiter``).

    Raises:
        ConfigError: an option is unknown, out of range, not supported, or contradicts another.
        ModelLoadError: the model cannot be loaded.
        MissingExtraError: ``base_url`` is given, and the package openai is not installed.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=("pydantic_model_",))

    context_window: int = Field(
        DEFAULT_CONTEXT_WINDOW,
        description="Maximum number of tokens of prompt and answer together. Default: the context window of the model.",
        gt=0,
    )
    query_wrapper_prompt: BasePromptTemplate | None = Field(
        None, exclude=True, description="Template for the prompt of a completion, with a {query_str} placeholder."
    )
    system_prompt: str | None = Field(
        None,
        description="Precedes the prompt of a completion, and messages that do not begin with a system message.",
    )
    stopping_ids: list[int] = Field(default_factory=list, description="Token ids that end an answer.")
    generate_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Decode options of every call; they take precedence over the settings."
    )
    is_chat_model: bool = Field(
        False,
        description="Whether LlamaIndex sends chat messages rather than text. Default: True if there is a chat "
        "template or messages_to_prompt, and completions are not wrapped.",
    )

    is_function_calling_model: bool = Field(
        False,
        description="Whether LlamaIndex uses it to call functions, as FunctionAgent and structured_predict do. "
        "Default: True if chat messages are formatted with the chat template and the extra `tools` is installed.",
    )

    risk_metadata: Detail | None = Field(
        None,
        description="How much of the risk responses carry: `full`; `compact`, one report in which nothing is written "
        "twice; or `none`. Default: full in streams, compact in other responses and in the `raw` of every complete "
        "answer, which agents keep. Events and collectors always receive everything.",
    )
    candidates: bool = Field(
        False, description="Whether the entries of spans list the candidates that competed in them, as `rivals`."
    )
    logprobs: bool | None = Field(
        None,
        description="Whether responses carry the log-probabilities of their tokens. Default: where the risk is full, "
        "and where `top_logprobs` asks for the most probable tokens at each position.",
    )

    _follow_model: frozenset[str] = PrivateAttr(default=frozenset())
    """The options among ``FOLLOW_MODEL`` that were not given."""

    def __init__(
        self,
        *,
        engine: CocoaEngine | None = None,
        config: CocoaConfig | None = None,
        model: PreTrainedModel | str | os.PathLike[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        context_window: int | None = None,
        query_wrapper_prompt: BasePromptTemplate | str | None = None,
        generate_kwargs: dict[str, Any] | None = None,
        is_chat_model: bool | None = None,
        is_function_calling_model: bool | None = None,
        **options: Any,
    ) -> None:
        _require("engine", engine, CocoaEngine)
        _require("config", config, CocoaConfig)
        loaded, named = None if isinstance(model, (str, os.PathLike)) else model, "model_name"
        if loaded is None or (engine is None and not isinstance(loaded, nn.Module)):
            named = one_model_name(options, model=model)
        base = config or (engine.config if engine is not None else CocoaConfig())
        settings, rest = split_settings(options, base.method)
        if of_calls := sorted(name for name in rest if name in SUPPORTED and name not in type(self).model_fields):
            raise ConfigError(f"CocoaLLM: give {', '.join(of_calls)} in generate_kwargs")
        rest = refuse_unsupported(rest, what="CocoaLLM")
        refuse_unknown(rest, (*type(self).model_fields, "engine", "config", "model", "tokenizer"), what="CocoaLLM")
        of_every_call = {} if generate_kwargs is None else generate_kwargs
        url = options.get("base_url")
        if url is not None:
            settings = {name: value for name, value in settings.items() if value is not None}
            base, unset = updated(base, settings), dict.fromkeys(CocoaConfig.model_fields)
            sent_settings(base)  # refuses those of the server's machine
        else:
            base, unset = base.replace(**settings), {}
        decode = DecodeOptions(base).updated(of_every_call)
        if twice := settings.keys() & split_settings(of_every_call)[0].keys():
            raise ConfigError(f"given both by itself and in generate_kwargs: {', '.join(sorted(twice))}.")
        fields: dict[str, Any] = {
            # as in HuggingFaceLLM, None leaves an option at its default; for device_map None is a value, the CPU
            **{name: value for name, value in rest.items() if value is not None or name == "device_map"},
            **unset,
            **fields_of(decode.config),
            "context_window": DEFAULT_CONTEXT_WINDOW if context_window is None else context_window,
            "query_wrapper_prompt": _query_wrapper(query_wrapper_prompt),
            "generate_kwargs": {name: value for name, value in of_every_call.items() if name in BESIDE_SETTINGS},
            "is_chat_model": url is not None if is_chat_model is None else is_chat_model,
            "is_function_calling_model": url is not None
            if is_function_calling_model is None
            else is_function_calling_model,
        }
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(f"CocoaLLM: {explain(error)}") from None
        asked = {
            "context_window": context_window,
            "is_chat_model": is_chat_model,
            "is_function_calling_model": is_function_calling_model,
        }
        self._follow_model = frozenset(name for name, given in asked.items() if given is None)
        self._use(engine, loaded, tokenizer, named)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As in pydantic; ``max_tokens`` and ``model`` are accepted for ``max_new_tokens`` and ``model_name``."""
        return super().model_copy(update=with_field_names(update), deep=deep)

    def _adapt_to(self, engine: CocoaEngine) -> None:
        follow = self._follow_model
        self.context_window = _window(None if "context_window" in follow else self.context_window, engine)
        if "is_chat_model" in follow:
            chats = self._formats_messages or engine.has_chat_template
            plain_prompt = self.completion_to_prompt in (None, default_completion_to_prompt)
            self.is_chat_model = chats and self.query_wrapper_prompt is None and plain_prompt
        if "is_function_calling_model" in follow:
            by_template = engine.has_chat_template and not self._formats_messages
            self.is_function_calling_model = self.is_chat_model and by_template and find_spec("llguidance") is not None
        self._follow_model = follow

    if not TYPE_CHECKING:  # type checkers keep the field-by-field assignment

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name in FOLLOW_MODEL:
                self._follow_model -= {name}

    @classmethod
    def class_name(cls) -> str:
        """The class name in LlamaIndex's serialisation."""
        return "CocoaLLM"

    @property
    def model(self) -> str | None:
        """A synonym of ``model_name``."""
        return self.model_name

    @model.setter
    def model(self, value: str | os.PathLike[str] | None) -> None:
        self.model_name = value  # type: ignore[assignment]  # a path becomes text

    @property
    def max_tokens(self) -> int:
        """A synonym of ``max_new_tokens``."""
        return self.max_new_tokens

    @max_tokens.setter
    def max_tokens(self, value: int) -> None:
        self.max_new_tokens = value

    @property
    def metadata(self) -> LLMMetadata:
        """The properties of the model that LlamaIndex uses to build prompts."""
        service = self.service if self.is_remote else None
        if isinstance(service, RemoteChat) and "context_window" in self._follow_model:
            self.context_window = service.context_window() or DEFAULT_CONTEXT_WINDOW
        return self._metadata(DEFAULT_MODEL if self.is_remote else self.engine.model_name)

    def to_payload(self) -> dict[str, Any]:
        """The description for callbacks. It does not ask a server."""
        if not self.is_remote:
            return super().to_payload()
        return {"class_name": self.class_name(), **self._metadata(DEFAULT_MODEL).model_dump()}

    def _metadata(self, name: str) -> LLMMetadata:
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self._decoding({}).config.max_new_tokens,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model_name or name if self.is_remote else name,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt.

        Args:
            prompt: the text to continue.
            formatted: whether the system prompt and the wrappers have already been applied.
            **kwargs: settings of :class:`CocoaConfig` and keywords of ``generate``, for this call only.

        Raises:
            PromptError: the prompt is empty or does not fit the context window.
            ConfigError: an option is unknown, out of range or not supported.
        """
        return self._answer(self._completion(prompt, formatted, kwargs, streamed=False))

    @closed_at_exit
    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Like :meth:`complete`, with one chunk for each span as soon as it is decided."""
        return self._stream(self._completion(prompt, formatted, kwargs, streamed=True))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Like :meth:`complete`, without blocking the event loop. Cancelling the task stops the work."""
        await self._follow_options_in_worker()
        return await self._aanswer(self._completion(prompt, formatted, kwargs, streamed=False))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Like :meth:`stream_complete`, without blocking the event loop. Leaving the stream stops the work."""
        await self._follow_options_in_worker()
        return await self._astream(self._completion(prompt, formatted, kwargs, streamed=True))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer chat messages.

        Args:
            messages: text, tool calls and their results.
            **kwargs: as for :meth:`complete`, and ``tools`` (OpenAI's format), ``tool_choice``, ``strict``,
                ``parallel_tool_calls`` and ``response_format``, with OpenAI's meanings, and the options of the chat
                template: ``enable_thinking``, ``chat_template_kwargs`` and ``continue_final_message``. A tool call that
                ``tool_choice`` requires is constrained to the JSON schema of its tool, token by token. With
                ``strict=True`` so is a call that the model decides to make.
                ``additional_kwargs["cocoa_risk"]["tool_calls"]`` has the risk of every argument.

        Raises:
            ChatTemplateError: the tokenizer has no chat template and ``messages_to_prompt`` was not given, or the
                template refuses the messages.
            PromptError: the messages contain something besides text, or do not fit the context window.
            ConfigError: an option is unknown, out of range or not supported.
            IncompleteAnswerError: a required tool call was cut off.
        """
        return self._answer(self._conversation(messages, kwargs, streamed=False))

    @closed_at_exit
    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Like :meth:`chat`, with one chunk for each span as soon as it is decided."""
        return self._stream(self._conversation(messages, kwargs, streamed=True))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like :meth:`chat`, without blocking the event loop. Cancelling the task stops the work."""
        await self._follow_options_in_worker()
        return await self._aanswer(self._conversation(messages, kwargs, streamed=False))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Like :meth:`stream_chat`, without blocking the event loop. Leaving the stream stops the work."""
        await self._follow_options_in_worker()
        return await self._astream(self._conversation(messages, kwargs, streamed=True))

    @field_serializer("model_kwargs", "tokenizer_kwargs", "generate_kwargs")
    def _serialized_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The entries that can be written as JSON and are not secret."""
        return {name: value for name, value in kwargs.items() if name not in ACCESS_OPTIONS and _is_plain(value)}

    @field_serializer("dtype")
    def _serialized_dtype(self, dtype: Any) -> str:
        return str(dtype).removeprefix("torch.")

    @property
    def _formats_messages(self) -> bool:
        """Whether messages_to_prompt was given; LlamaIndex fills in a default otherwise."""
        return self.messages_to_prompt not in (None, generic_messages_to_prompt)

    def _completion(
        self, prompt: str, formatted: bool, options: Mapping[str, Any], *, streamed: bool
    ) -> _Asked[CompletionResponse]:
        """What is asked for by a prompt."""
        self._follow_options()
        delivery, rest = self._delivery(options, streamed)

        def call(edit: Edit) -> ChatCall:
            asked = self._call(rest, delivery)
            assert self.completion_to_prompt is not None  # set by a validator of LLM
            require_unicode(prompt, "prompt")
            text = prompt if edit is None else edit(prompt)
            return replace(asked, prompt=text if formatted else self._extend_prompt(self.completion_to_prompt(text)))

        return self._asked(call, CompletionWriter(delivery))

    def _conversation(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any], *, streamed: bool
    ) -> _Asked[ChatResponse]:
        """What is asked for by chat messages."""
        self._follow_options()
        delivery, rest = self._delivery(options, streamed)
        request, rest = split_tools(rest)
        template, rest = split_template_options(self, rest)

        def call(edit: Edit) -> ChatCall:
            asked = self._call(rest, delivery)
            require_text(messages)
            opened = list(messages) if edit is None else edited(messages, edit)
            if opened[0].role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
                opened = self._extend_messages(opened)
            if not self._formats_messages:
                return replace(asked, messages=to_entries(opened), tools=request, template=template)
            if request:
                raise ConfigError("tools and response_format need the chat template; leave out messages_to_prompt.")
            if given := given_options(template):
                raise ConfigError(f"{', '.join(given)}: only for the chat template; leave out messages_to_prompt.")
            assert self.messages_to_prompt is not None
            return replace(asked, prompt=self.messages_to_prompt(opened), splits_reasoning=True)

        return self._asked(call, ChatWriter(delivery, required=request.required))

    def _delivery(self, options: Mapping[str, Any], streamed: bool) -> tuple[Delivery, dict[str, Any]]:
        """What the responses of a call carry besides their text, and the other options of the call."""
        rest = dict(options)
        given = {name: rest.pop(name, None) for name in ("risk_metadata", "logprobs")}
        detail, logprobs = (getattr(self, name) if value is None else value for name, value in given.items())
        top = rest.get("top_logprobs")
        if logprobs is None and (self.top_logprobs if top is None else top):
            logprobs = True
        return Delivery(detail, logprobs, streamed), rest

    def _decoding(self, options: Mapping[str, Any]) -> DecodeOptions:
        """The decode options of a call: the current settings and options, updated by those of the call."""
        current = DecodeOptions(config_of(self)).updated({"stopping_ids": self.stopping_ids or None})
        return current.updated(self.generate_kwargs).updated(options)

    def _call(self, options: Mapping[str, Any], delivery: Delivery) -> ChatCall:
        """What the service is asked for, without a prompt."""
        rest = dict(options)
        candidates = rest.pop("candidates", None)
        if self.is_remote:
            rest = {name: value for name, value in rest.items() if value is not None}
        decoding = self._decoding(rest)
        # a server is asked for log-probabilities only where they are wanted
        logprobs = delivery.logprobs is True if self.is_remote else delivery.has_logprobs
        return ChatCall(
            config=decoding.config,
            logprobs=logprobs,
            candidates=self.candidates if candidates is None else candidates,
            context_window=None if self.is_remote else self.context_window,
            logits_processor=decoding.logits_processors(),
            stopping_criteria=decoding.stopping_criteria(),
            timeout=None if self.is_remote else self.timeout,
        )

    def _asked(self, call: Callable[[Edit], ChatCall], writer: Writer[Response]) -> _Asked[Response]:
        passages = PassagesOfCall()
        start = None
        if not self.is_remote:
            engine = self._engine

            def stream(edit: Edit) -> SpanStream:
                return PreparedCall(engine, replace(call(edit), source=passages)).open()

            start = Start(engine, stream)
        return _Asked(replace(call(None), source=passages), writer, passages, Observers(start))

    def _answer(self, asked: _Asked[Response]) -> Response:
        return asked.complete(self.service.answer(asked.call, asked.observers.span_decided))

    async def _aanswer(self, asked: _Asked[Response]) -> Response:
        return asked.complete(await self.service.aanswer(asked.call, asked.observers.span_decided))

    def _stream(self, asked: _Asked[Response]) -> Generator[Response, None, None]:
        stream = self.service.stream(asked.call)
        stream.open()

        def responses() -> Generator[Response, None, None]:
            with closing(stream):
                for pieces in stream:
                    for piece in pieces:
                        asked.observers.span_decided(piece)
                        yield asked.writer.partial(piece)
            yield asked.complete(stream.answer)

        return responses()

    async def _astream(self, asked: _Asked[Response]) -> AsyncGenerator[Response, None]:
        stack = AsyncExitStack()
        stream: Any = await stack.enter_async_context(self.service.astream(asked.call))

        async def responses() -> AsyncGenerator[Response, None]:
            async with stack:
                async for pieces in stream:
                    for piece in pieces:
                        asked.observers.span_decided(piece)
                        yield asked.writer.partial(piece)
            yield asked.complete(stream.answer)

        return responses()


@dataclass(frozen=True)
class _Asked(Generic[Response]):
    """One call: what the service is asked for, and who is told of the answer."""

    call: ChatCall
    writer: Writer[Response]
    passages: PassagesOfCall
    observers: Observers

    def complete(self, answer: Answer) -> Response:
        """The response to a complete answer, after it has been reported."""
        self.observers.answer_complete(answer, self.passages.node_ids)
        return self.writer.complete(answer)


def _query_wrapper(given: BasePromptTemplate | str | None) -> BasePromptTemplate | None:
    template = PromptTemplate(given) if isinstance(given, str) else given
    if isinstance(template, BasePromptTemplate) and "query_str" not in template.template_vars:
        raise ConfigError("query_wrapper_prompt has no {query_str} placeholder, so it would drop the prompt.")
    return template


def _window(asked: int | None, engine: CocoaEngine) -> int:
    limit = engine.context_window
    if asked is not None and limit is not None and asked > limit:
        logger.warning("context_window=%d is more than the model's %d tokens; using %d.", asked, limit, limit)
        return limit
    return asked if asked is not None else limit or DEFAULT_CONTEXT_WINDOW


def _require(name: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} takes a {kind.__name__}, not {type(value).__name__}.")


def _is_plain(value: Any) -> bool:
    """Whether a value can be written as JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
