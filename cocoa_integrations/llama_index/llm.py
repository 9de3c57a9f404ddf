"""CoCoA decoding behind LlamaIndex's LLM interface; the option names are those of HuggingFaceLLM."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

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
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, ValidationError, field_serializer
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, Generation, PromptError, Runtime, SpanStream
from cocoa_engine.errors import UnsupportedFeatureError
from cocoa_engine.messages import explain
from cocoa_engine.model.loading import ACCESS_OPTIONS
from cocoa_integrations.llama_index.async_stream import AsyncSpanStream
from cocoa_integrations.llama_index.callbacks import Start, Watchers
from cocoa_integrations.llama_index.generate_kwargs import BESIDE_SETTINGS, DecodeOptions
from cocoa_integrations.llama_index.loading import engine_for
from cocoa_integrations.llama_index.messages import arguments_of, edited, require_text, template_messages
from cocoa_integrations.llama_index.responses import Answer, Chunks, whole_answer
from cocoa_integrations.llama_index.tools import ChatReader, split_tools
from cocoa_integrations.settings import LOADING, DecodeSettings, config_of, fields_of, refuse_unknown, split_settings

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

logger = logging.getLogger(__name__)

Response = TypeVar("Response", CompletionResponse, ChatResponse)


class CocoaLLM(DecodeSettings, FunctionCallingLLM):
    """A local Hugging Face model, decoded with CoCoA, that says how risky each span of its answers is.

    Every field of :class:`CocoaConfig` is an option too, of the constructor and of each call::

        llm = CocoaLLM(model_name="Qwen/Qwen2.5-7B-Instruct", alpha=2.0, max_new_tokens=128)
        response = llm.complete("The capital of France is", alpha=0.5)
        response.additional_kwargs["cocoa_risk"]["max_risk"]

    Without a model it loads the embedded default one. Calls also take transformers' generate keywords, as far as
    CoCoA can honour them; anything else raises. Chat goes through the tokenizer's chat template unless
    ``messages_to_prompt`` is given. A streamed answer ends with a chunk that adds no text and holds the report of
    the whole answer, its usage and its finish reason.

    LlamaIndex fits contexts into the window by counting with its own tokenizer; ``Settings.tokenizer =
    llm.engine.encode`` makes it count the model's tokens.

    Every option is a field that can be read and set; what is set counts from the next call on. Copies share the engine;
    pickling is refused, since ``to_dict`` and ``from_dict`` move a description, without weights and secrets, instead.

    Args:
        engine: an engine to use, instead of the options that load one.
        config: decode settings to start from, by default the engine's; single settings given beside it go before it.
        model: a loaded model, instead of ``model_name``; needs ``tokenizer`` (or ``tokenizer_name``).
        tokenizer: a loaded tokenizer, instead of ``tokenizer_name``.
        generate_kwargs: decode options of every call, by the names that calls take. Those that are settings become
            the fields of that name.
        **options: the fields below, the settings in :class:`CocoaConfig`, ``messages_to_prompt`` (writes chat messages
            as a prompt, instead of the chat template), ``completion_to_prompt`` (wraps each prompt of a completion),
            and LlamaIndex's own LLM options (``callback_manager``, ``output_parser``, ``pydantic_program_mode``,
            ``rate_limiter``).

    Raises:
        ConfigError: an option is unknown, out of range, contradicts another or cannot be honoured.
        ModelLoadError: the model cannot be loaded.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=("pydantic_model_",))

    model_name: str | None = Field(None, description="Hub id or folder of the model. Default: the embedded model.")
    tokenizer_name: str | None = Field(None, description="Hub id or folder of the tokenizer, if not the model's.")
    context_window: int = Field(
        DEFAULT_CONTEXT_WINDOW,
        description="Tokens that prompt and answer may have together. Default: as many as the model can take.",
        gt=0,
    )
    query_wrapper_prompt: BasePromptTemplate | None = Field(
        None, exclude=True, description="Put around the prompt of a completion; has a {query_str} placeholder."
    )
    system_prompt: str | None = Field(
        None, description="Put before the prompt of a completion, and before messages that do not open with one."
    )
    device_map: str | dict[str, Any] | None = Field("auto", description="Where the model's layers go.")
    dtype: Any = Field("auto", description="Of the weights: auto (as stored), a name or a torch.dtype.")
    trust_remote_code: bool = Field(False, description="Run code that comes with the checkpoint.")
    allow_pickle: bool = Field(False, description="Read weights stored as pickle, which can run code when read.")
    stopping_ids: list[int] = Field(default_factory=list, description="Token ids that end an answer.")
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False, description="For loading the tokenizer.")
    runtime: Runtime | None = Field(default=None, description="How the model is run: speed and memory.")
    calibrator: str | None = Field(
        default=None, description="File of a RiskCalibrator, or embedded: risks are then in [0, 1]."
    )
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False, description="For loading the model.")
    generate_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Decode options of every call; they go before the settings."
    )
    is_chat_model: bool = Field(
        False,
        description="Whether LlamaIndex should send chat messages rather than text. Default: if there is a chat "
        "template or messages_to_prompt, and completions are not wrapped.",
    )

    is_function_calling_model: bool = Field(
        False,
        description="Whether LlamaIndex should have it call functions: FunctionAgent and structured_predict do. "
        "Default: if chat messages go through the chat template, and the extra `tools` is installed.",
    )

    _engine: CocoaEngine = PrivateAttr()
    _tool_required: bool = PrivateAttr(default=False)

    def __init__(
        self,
        *,
        engine: CocoaEngine | None = None,
        config: CocoaConfig | None = None,
        model: Any = None,
        tokenizer: Any = None,
        context_window: int | None = None,
        query_wrapper_prompt: BasePromptTemplate | str | None = None,
        generate_kwargs: dict[str, Any] | None = None,
        is_chat_model: bool | None = None,
        is_function_calling_model: bool | None = None,
        **options: Any,
    ) -> None:
        settings, rest = split_settings(options)
        refuse_unknown(rest, (*type(self).model_fields, "engine", "config", "model", "tokenizer"), what="CocoaLLM")
        _require("engine", engine, CocoaEngine)
        _require("config", config, CocoaConfig)
        base = config or (engine.config if engine is not None else CocoaConfig())
        standing = {} if generate_kwargs is None else generate_kwargs
        decode = DecodeOptions(base.replace(**settings)).updated(standing)
        if twice := settings.keys() & split_settings(standing)[0].keys():
            raise ConfigError(f"given both by itself and in generate_kwargs: {', '.join(sorted(twice))}.")
        fields: dict[str, Any] = {
            # None is HuggingFaceLLM's way to leave an option as it is; for the device map it means the CPU
            **{name: value for name, value in rest.items() if value is not None or name == "device_map"},
            **fields_of(decode.config),
            "context_window": DEFAULT_CONTEXT_WINDOW if context_window is None else context_window,
            "query_wrapper_prompt": _query_wrapper(query_wrapper_prompt),
            "generate_kwargs": {name: value for name, value in standing.items() if name in BESIDE_SETTINGS},
            "is_chat_model": is_chat_model or False,
            "is_function_calling_model": is_function_calling_model or False,
        }
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(f"CocoaLLM: {explain(error)}") from None
        loading = {name: getattr(self, name) for name in LOADING}
        self._engine = engine_for(engine, model=model, tokenizer=tokenizer, **loading)
        if engine is not None or model is not None:
            self.model_name = self._engine.model_name
        self.context_window = _window(context_window, self._engine)
        if is_chat_model is None:
            chats = self._formats_messages or self._engine.has_chat_template
            wrapped = self.query_wrapper_prompt is not None or rest.get("completion_to_prompt") is not None
            self.is_chat_model = chats and not wrapped
        if is_function_calling_model is None:
            by_template = self._engine.has_chat_template and not self._formats_messages
            self.is_function_calling_model = self.is_chat_model and by_template and find_spec("llguidance") is not None

    @classmethod
    def class_name(cls) -> str:
        """The name under which LlamaIndex serialises it."""
        return "CocoaLLM"

    @property
    def engine(self) -> CocoaEngine:
        """The engine that decodes."""
        return self._engine

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex needs to know to fit prompts to the model."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self._decoding({}).config.max_new_tokens,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self._engine.model_name,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The answer to a prompt.

        Args:
            prompt: the text to go on from.
            formatted: whether the system prompt and the wrappers have been applied already.
            **kwargs: settings of :class:`CocoaConfig` and generate keywords for this call only.

        Raises:
            PromptError: the prompt is empty or does not fit the context window.
            ConfigError: an option is unknown, out of range or cannot be honoured.
        """
        return self._answer(self._completion(prompt, formatted, kwargs)).to_completion()

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As :meth:`complete`, a chunk for each span as soon as it is decided."""
        return self._stream(self._completion(prompt, formatted, kwargs), Answer.to_completion)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As :meth:`complete`, off the event loop; cancelling it stops the work."""
        return (await self._aanswer(self._completion(prompt, formatted, kwargs))).to_completion()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As :meth:`stream_complete`, off the event loop; cancelling or leaving it stops the work."""
        return await self._astream(self._completion(prompt, formatted, kwargs), Answer.to_completion)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The assistant's answer to chat messages.

        Args:
            messages: text, tool calls and their results.
            **kwargs: as for :meth:`complete`; and ``tools`` (OpenAI's format), ``tool_choice``, ``strict``,
                ``parallel_tool_calls`` and ``response_format``, with OpenAI's meanings. A call that ``tool_choice``
                requires is held to its tool's JSON schema, token by token; so is one that the model decides on with
                ``strict=True``. The risk of every argument is in ``additional_kwargs["cocoa_risk"]["tool_calls"]``.

        Raises:
            ChatTemplateError: the tokenizer has no chat template and ``messages_to_prompt`` was not given, or the
                template refuses the messages.
            PromptError: the messages hold more than text, or do not fit the context window.
            ConfigError: an option is unknown, out of range or cannot be honoured.
            IncompleteAnswerError: a call that was required was cut off.
        """
        reader, start = self._conversation(messages, kwargs)
        return reader.response(self._answer(start))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As :meth:`chat`, a chunk for each span as soon as it is decided."""
        reader, start = self._conversation(messages, kwargs)
        return self._stream(start, reader.response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As :meth:`chat`, off the event loop; cancelling it stops the work."""
        reader, start = self._conversation(messages, kwargs)
        return reader.response(await self._aanswer(start))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As :meth:`stream_chat`, off the event loop; cancelling or leaving it stops the work."""
        reader, start = self._conversation(messages, kwargs)
        return await self._astream(start, reader.response)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of a response; of one that is not complete, calls so far.

        Raises:
            ValueError: there is none, and ``error_on_no_tool_call``.
        """
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise ValueError(f"expected at least one tool call, but the answer is {response.message.content!r}")
        return [
            ToolSelection(tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=arguments_of(block))
            for block in blocks
        ]

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        choice = kwargs.pop("tool_choice", None)
        required = tool_required or self._tool_required
        return {
            "messages": [*(chat_history or []), *([] if user_msg is None else [user_msg])],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": choice or ("required" if required and tools else "auto"),
            "parallel_tool_calls": allow_parallel_tool_calls and choice in (None, "auto"),
            **kwargs,
        }

    def _structured_stream_call(self, *args: Any, **kwargs: Any) -> Any:
        return super(CocoaLLM, self._requiring())._structured_stream_call(*args, **kwargs)

    async def _structured_astream_call(self, *args: Any, **kwargs: Any) -> Any:
        return await super(CocoaLLM, self._requiring())._structured_astream_call(*args, **kwargs)

    def _requiring(self) -> CocoaLLM:
        """A copy whose calls are required: LlamaIndex does not ask for that in structured streams."""
        copy = self.model_copy()
        copy._tool_required = True
        return copy

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> CocoaLLM:
        """A copy that shares the engine."""
        memo = {} if memo is None else memo
        memo[id(self._engine)] = self._engine
        return super().__deepcopy__(memo)

    def __getstate__(self) -> NoReturn:
        """Refuse pickling; LlamaIndex's own way would drop the engine, from this object too.

        Raises:
            UnsupportedFeatureError: always.
        """
        raise UnsupportedFeatureError(
            "a CocoaLLM holds a model and cannot be pickled; send its to_dict() and make it anew with "
            "CocoaLLM.from_dict(...), or make one in each process"
        )

    @field_serializer("model_kwargs", "tokenizer_kwargs", "generate_kwargs")
    def _serialized_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What is plain data and no secret."""
        return {name: value for name, value in kwargs.items() if name not in ACCESS_OPTIONS and _is_plain(value)}

    @field_serializer("dtype")
    def _serialized_dtype(self, dtype: Any) -> str:
        return str(dtype).removeprefix("torch.")

    @property
    def _formats_messages(self) -> bool:
        """Whether the user gave a messages_to_prompt; LlamaIndex puts its own where none was given."""
        return self.messages_to_prompt not in (None, generic_messages_to_prompt)

    def _completion(self, prompt: str, formatted: bool, options: Mapping[str, Any]) -> Start:
        def start(edit: Callable[[str], str] | None = None) -> SpanStream:
            decoding = self._decoding(options)
            assert self.completion_to_prompt is not None  # LLM's validator sees to it
            text = prompt if edit is None else edit(prompt)
            wrapped = text if formatted else self._extend_prompt(self.completion_to_prompt(text))
            return self._begin(wrapped, decoding)

        return start

    def _conversation(self, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> tuple[ChatReader, Start]:
        """How the answer is to be read, and what starts it."""
        request, rest = split_tools(options)
        reader = ChatReader(request, self._engine)

        def start(edit: Callable[[str], str] | None = None) -> SpanStream:
            decoding = self._decoding(rest)
            require_text(messages)
            opened = list(messages) if edit is None else edited(messages, edit)
            if opened[0].role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
                opened = self._extend_messages(opened)
            if not self._formats_messages:
                told, template_kwargs = reader.plan.prompt(template_messages(opened))
                prompt = self._engine.encode_chat(told, **template_kwargs)
                return self._begin(prompt, decoding, reader.plan.processors())
            if request:
                raise ConfigError(
                    "tools and response_format go through the chat template; leave out messages_to_prompt."
                )
            assert self.messages_to_prompt is not None
            return self._begin(self.messages_to_prompt(opened), decoding)

        return reader, start

    def _decoding(self, options: Mapping[str, Any]) -> DecodeOptions:
        """What a call is asked to do: the settings and options as they stand, then its own."""
        standing = DecodeOptions(config_of(self)).updated({"stopping_ids": self.stopping_ids or None})
        return standing.updated(self.generate_kwargs).updated(options)

    def _begin(self, prompt: str | list[int], decoding: DecodeOptions, processors: Sequence[Any] = ()) -> SpanStream:
        config = decoding.config
        if prompt:  # the engine refuses an empty one
            prompt = self._token_ids(prompt) if isinstance(prompt, str) else prompt
            room = self.context_window - len(prompt)
            if room < 1:
                raise PromptError(
                    f"the prompt has {len(prompt)} tokens and context_window is {self.context_window}: no room for an "
                    f"answer. Shorten the prompt by at least {1 - room} tokens."
                )
            config = config.replace(max_new_tokens=min(config.max_new_tokens, room))
        return self._engine.stream(
            prompt,
            config=config,
            logits_processor=[*decoding.logits_processors(), *processors],
            stopping_criteria=decoding.stopping_criteria(),
        )

    def _token_ids(self, prompt: str) -> list[int]:
        """Prompt formats often write the begin-of-sequence token out; the tokenizer must not add a second one."""
        bos = self._engine.tokenizer.bos_token
        return self._engine.encode(prompt, add_special_tokens=not (bos and prompt.startswith(bos)))

    def _answer(self, start: Start) -> Answer:
        watchers = Watchers(start)
        with start() as stream:
            for span in stream:
                watchers.span_decided(span)
        return self._complete_answer(stream.generation, watchers)

    async def _aanswer(self, start: Start) -> Answer:
        watchers = Watchers(start)
        async with await AsyncSpanStream.open(self._engine, start) as stream:
            async for span in stream:
                watchers.span_decided(span)
        return self._complete_answer(stream.generation, watchers)

    def _stream(self, start: Start, to_response: Callable[[Answer], Response]) -> Generator[Response, None, None]:
        watchers, stream = Watchers(start), start()

        def responses() -> Generator[Response, None, None]:
            chunks = Chunks(self._engine)
            with stream:
                for span in stream:
                    watchers.span_decided(span)
                    yield to_response(chunks.next(span))
            yield to_response(self._complete_answer(stream.generation, watchers, streamed=True))

        return responses()

    async def _astream(self, start: Start, to_response: Callable[[Answer], Response]) -> AsyncGenerator[Response, None]:
        watchers, stream = Watchers(start), await AsyncSpanStream.open(self._engine, start)

        async def responses() -> AsyncGenerator[Response, None]:
            chunks = Chunks(self._engine)
            async with stream:
                async for span in stream:
                    watchers.span_decided(span)
                    yield to_response(chunks.next(span))
            yield to_response(self._complete_answer(stream.generation, watchers, streamed=True))

        return responses()

    def _complete_answer(self, generation: Generation | None, watchers: Watchers, *, streamed: bool = False) -> Answer:
        assert generation is not None  # its stream has been read to its end
        watchers.answer_complete(generation)
        return whole_answer(generation, self._engine, streamed=streamed)


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
