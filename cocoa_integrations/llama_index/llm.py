"""CoCoA decoding as a LlamaIndex LLM, with the option names of HuggingFaceLLM."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_serializer
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from torch import nn

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError
from cocoa_engine.integration import require_unicode, safe_logger
from cocoa_integrations._shared.engines import closed_at_exit
from cocoa_integrations._shared.options import (
    ChatTemplateOptions,
    config_of,
    fields_of,
    require_text,
    split_settings,
    template_options,
)
from cocoa_integrations.chat_service import Answer, ChatCall, ChatService, LocalChat, Piece, RemoteChat
from cocoa_integrations.chat_service.options import ModelOptions, shown_entries
from cocoa_integrations.chat_service.remote import DEFAULT_MODEL
from cocoa_integrations.llama_index.callbacks import Observers
from cocoa_integrations.llama_index.messages import Writer, detail_of, to_entries
from cocoa_integrations.llama_index.options import (
    BESIDE_SETTINGS,
    SUPPORTED,
    CallOptions,
    decode_settings,
    processors_and_criteria,
    split_tools,
)
from cocoa_integrations.llama_index.retrieved import PassagesOfCall
from cocoa_integrations.llama_index.structured import CallsFunctions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = safe_logger(__name__)

Response = TypeVar("Response", CompletionResponse, ChatResponse)


class CocoaLLM(CallOptions, ModelOptions, CallsFunctions):
    """A language model, decoded with CoCoA, that reports the risk of every span of its answers.

    The model is a local Hugging Face model, or that of a server (``cocoa serve``) whose address is ``base_url``.

    Every setting of :class:`CocoaConfig` is an option, of the constructor and of each call::

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

    With ``base_url``, the server is asked once for ``context_window``, and the retrieved nodes of an engine whose text
    is in the messages are sent as ``source``. An unpickled LLM loads its model by name; one with a loaded engine, model
    or tokenizer cannot be pickled. ``to_dict`` and ``from_dict`` transfer a description without weights and secrets.

    Args:
        engine: the engine to use, instead of the options that load one.
        config: the decode settings to start from, by default those of the engine. Single settings take precedence.
        model: a synonym of ``model_name``; or a loaded model, which needs ``tokenizer`` or ``tokenizer_name``.
        tokenizer: a loaded tokenizer, instead of ``tokenizer_name``.
        generate_kwargs: decode options of every call, under the names that calls accept. Settings among them are
            stored in the field of their name.
        **options: the fields below; those of :class:`~cocoa_integrations.chat_service.options.ModelOptions`;
            ``messages_to_prompt``, which formats chat messages instead of the chat template; ``completion_to_prompt``,
            which wraps each prompt of a completion; and LlamaIndex's own LLM options (``callback_manager``,
            ``output_parser``, ``pydantic_program_mode``, ``rate_limiter``).

    Raises:
        ConfigError: an option is unknown, out of range, not supported, or contradicts another.
        ModelLoadError: the model cannot be loaded.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=("pydantic_model_",))

    context_window: int | None = Field(
        None,
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
    is_chat_model: bool | None = Field(
        None,
        description="Whether LlamaIndex sends chat messages rather than text. Default: True if there is a chat "
        "template or messages_to_prompt, and completions are not wrapped.",
    )
    is_function_calling_model: bool | None = Field(
        None,
        description="Whether LlamaIndex uses it to call functions, as FunctionAgent and structured_predict do. "
        "Default: True if chat messages are formatted with the chat template and the extra `tools` is installed.",
    )

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    def __init__(
        self,
        *,
        engine: CocoaEngine | None = None,
        config: CocoaConfig | None = None,
        model: PreTrainedModel | str | os.PathLike[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        query_wrapper_prompt: BasePromptTemplate | str | None = None,
        generate_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        loaded = {"model": model, "tokenizer": tokenizer} if isinstance(model, nn.Module) else {"tokenizer": tokenizer}
        options |= {"engine": engine, "config": config} | ({} if "model" in loaded else {"model": model})
        if of_calls := [name for name in options if name in SUPPORTED and name not in type(self).model_fields]:
            raise ConfigError(f"CocoaLLM: give {', '.join(sorted(of_calls))} in generate_kwargs")
        settings, of_every_call = split_settings(options)[0], {} if generate_kwargs is None else generate_kwargs
        config, fields = self._read(options, ("tokenizer",), **loaded)
        fields.pop("engine", None)
        config = decode_settings(config, of_every_call)
        if twice := settings.keys() & split_settings(of_every_call)[0].keys():
            raise ConfigError(f"given both by itself and in generate_kwargs: {', '.join(sorted(twice))}.")
        processors_and_criteria(of_every_call)  # refuses values that are not valid
        beside = {name: value for name, value in of_every_call.items() if name in BESIDE_SETTINGS}
        wrapper = _query_wrapper(query_wrapper_prompt)
        super().__init__(**{**fields, **fields_of(config), "query_wrapper_prompt": wrapper, "generate_kwargs": beside})
        objects = {"engine": engine} if engine is not None else loaded
        self._given = {name: value for name, value in objects.items() if value is not None}
        if self.is_remote:
            assert self.service  # reports what is wrong with the address
        elif "model" in self._given and tokenizer is None and self.tokenizer_name is None:
            raise ConfigError("model= was given without a tokenizer; give tokenizer= or tokenizer_name= too.")
        elif self._given.keys() & {"engine", "model"}:
            self.__dict__["model_name"] = self.engine.model_name
        limit = None if self.is_remote else self.engine.context_window
        if limit is not None and self.context_window is not None and self.context_window > limit:
            logger.warning(
                "context_window=%d is more than the model's %d tokens; using %d.", self.context_window, limit, limit
            )
            self.context_window = limit

    @classmethod
    def class_name(cls) -> str:
        """The class name in LlamaIndex's serialisation."""
        return "CocoaLLM"

    @property
    def engine(self) -> CocoaEngine:
        """The engine that decodes; see :meth:`load`. It is loaded again if loading options were changed."""
        return self.load()

    @property
    def _objects(self) -> dict[str, Any]:
        return self._given

    @property
    def metadata(self) -> LLMMetadata:
        """The properties of the model that LlamaIndex uses to build prompts."""
        service = self.service
        if isinstance(service, RemoteChat) and self.context_window is None:
            self.context_window = service.context_window() or DEFAULT_CONTEXT_WINDOW
        return self._metadata()

    def to_payload(self) -> dict[str, Any]:
        """The description for callbacks. It does not ask a server."""
        return {"class_name": self.class_name(), **self._metadata().model_dump()}

    def _metadata(self) -> LLMMetadata:
        window, is_chat, calls = self.context_window, self.is_chat_model, self.is_function_calling_model
        if self.is_remote:
            name, has_template = self.model_name or DEFAULT_MODEL, True
        else:
            name, has_template = self.engine.model_name, self.engine.has_chat_template
            window = min(filter(None, (window, self.engine.context_window)), default=None)
        if is_chat is None:
            is_wrapped = self.completion_to_prompt not in (None, default_completion_to_prompt)
            is_wrapped = is_wrapped or self.query_wrapper_prompt is not None
            is_chat = self.is_remote or ((has_template or self._formats_messages) and not is_wrapped)
        if calls is None:
            by_template = is_chat and has_template and not self._formats_messages
            calls = self.is_remote or (by_template and find_spec("llguidance") is not None)
        return LLMMetadata(
            context_window=window or DEFAULT_CONTEXT_WINDOW,
            num_output=decode_settings(config_of(self), self.generate_kwargs).max_new_tokens,
            is_chat_model=is_chat,
            is_function_calling_model=calls,
            model_name=name,
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
        return self._completion(prompt, formatted, kwargs, streamed=False).answer()

    @closed_at_exit
    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Like :meth:`complete`, with one chunk for each span as soon as it is decided."""
        return self._completion(prompt, formatted, kwargs, streamed=True).stream()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Like :meth:`complete`, without blocking the event loop. Cancelling the task stops the work."""
        return await self._completion(prompt, formatted, kwargs, streamed=False).aanswer()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Like :meth:`stream_complete`, without blocking the event loop. Leaving the stream stops the work."""
        return await self._completion(prompt, formatted, kwargs, streamed=True).astream()

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
        return self._conversation(messages, kwargs, streamed=False).answer()

    @closed_at_exit
    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Like :meth:`chat`, with one chunk for each span as soon as it is decided."""
        return self._conversation(messages, kwargs, streamed=True).stream()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like :meth:`chat`, without blocking the event loop. Cancelling the task stops the work."""
        return await self._conversation(messages, kwargs, streamed=False).aanswer()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Like :meth:`stream_chat`, without blocking the event loop. Leaving the stream stops the work."""
        return await self._conversation(messages, kwargs, streamed=True).astream()

    @field_serializer("generate_kwargs")
    def _serialized_generate_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return shown_entries(kwargs)

    @property
    def _formats_messages(self) -> bool:
        """Whether messages_to_prompt was given; LlamaIndex fills in a default otherwise."""
        return self.messages_to_prompt not in (None, generic_messages_to_prompt)

    def _completion(
        self, prompt: str, formatted: bool, options: Mapping[str, Any], *, streamed: bool
    ) -> _Asked[CompletionResponse]:
        """What is asked for by a prompt."""
        called, rest = self._of_call(options, is_chat=False)
        require_unicode(prompt, "prompt")
        if not formatted:
            assert self.completion_to_prompt is not None  # set by a validator of LLM
            prompt = self._extend_prompt(self.completion_to_prompt(prompt))
        return self._asked(called, rest, {"prompt": prompt}, streamed, is_chat=False)

    def _conversation(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any], *, streamed: bool
    ) -> _Asked[ChatResponse]:
        """What is asked for by chat messages."""
        called, rest = self._of_call(options, is_chat=True)
        request, rest = split_tools(rest)
        require_text(to_entries(messages))
        template = template_options(called)
        if self._formats_messages and (request or template != ChatTemplateOptions()):
            raise ConfigError(
                "tools, response_format and the options of the chat template need the chat template; leave out "
                "messages_to_prompt."
            )

        opened = list(messages)
        if opened[0].role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
            opened = self._extend_messages(opened)
        if self._formats_messages:
            assert self.messages_to_prompt is not None
            asked = {"prompt": self.messages_to_prompt(opened), "splits_reasoning": True}
        else:
            asked = {"messages": to_entries(opened), "tools": request, "template": template}
        return self._asked(called, rest, asked, streamed, is_chat=True, required=request.required)

    def _asked(
        self,
        called: CallOptions,
        options: Mapping[str, Any],
        prompt: Mapping[str, Any],
        streamed: bool,
        **writes: bool,
    ) -> _Asked[Any]:
        """What is asked for; ``prompt`` has the fields of the call that are its prompt."""
        present = {name: value for name, value in options.items() if value is not None}
        config = decode_settings(config_of(self), self.generate_kwargs)
        config = decode_settings(config, present if self.is_remote else options)
        beside = {"stopping_ids": self.stopping_ids or None, **self.generate_kwargs, **present}
        processors, criteria = processors_and_criteria(beside)
        logprobs = called.logprobs
        if logprobs is None:  # a server is asked for them only where they are wanted
            by_default = not self.is_remote and detail_of(called.risk_metadata, streamed) == "full"
            logprobs = bool(config.top_logprobs) or by_default
        service, passages = self.service, PassagesOfCall()
        call = ChatCall(
            **prompt,
            config=config,
            source=passages,
            logprobs=logprobs,
            candidates=called.candidates,
            context_window=None if self.is_remote else self.context_window,
            logits_processor=processors,
            stopping_criteria=criteria,
            timeout=None if self.is_remote else self.timeout,
        )

        asked = (service, call) if isinstance(service, LocalChat) else None
        writer = Writer(called.risk_metadata, streamed=streamed, **writes)
        return _Asked(service, call, writer, Observers(asked, passages.node_ids))


@dataclass(frozen=True)
class _Asked(Generic[Response]):
    """One call: what the service is asked for, and who is told of the answer."""

    service: ChatService
    call: ChatCall
    writer: Writer
    observers: Observers

    def answer(self) -> Response:
        return self._complete(self.service.answer(self.call, self.observers.span_decided))

    async def aanswer(self) -> Response:
        return self._complete(await self.service.aanswer(self.call, self.observers.span_decided))

    def stream(self) -> Generator[Response, None, None]:
        stream = self.service.stream(self.call)
        stream.open()

        def responses() -> Generator[Response, None, None]:
            with closing(stream):
                for pieces in stream:
                    yield from map(self._partial, pieces)
            yield self._complete(stream.answer)

        return responses()

    async def astream(self) -> AsyncGenerator[Response, None]:
        stack = AsyncExitStack()
        stream: Any = await stack.enter_async_context(self.service.stream(self.call))

        async def responses() -> AsyncGenerator[Response, None]:
            async with stack:
                async for pieces in stream:
                    for piece in pieces:
                        yield self._partial(piece)
            yield self._complete(stream.answer)

        return responses()

    def _partial(self, piece: Piece) -> Response:
        self.observers.span_decided(piece)
        response: Response = self.writer.partial(piece)
        return response

    def _complete(self, answer: Answer) -> Response:
        self.observers.answer_complete(answer)
        response: Response = self.writer.complete(answer)
        return response


def _query_wrapper(template: BasePromptTemplate | str | None) -> BasePromptTemplate | None:
    template = PromptTemplate(template) if isinstance(template, str) else template
    if isinstance(template, BasePromptTemplate) and "query_str" not in template.template_vars:
        raise ConfigError("query_wrapper_prompt has no {query_str} placeholder, so it would drop the prompt.")
    return template
