"""The chat model."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from pydantic import PrivateAttr, model_validator
from typing_extensions import Self

from cocoa_engine.errors import ConfigError, unknown
from cocoa_engine.report import Detail
from cocoa_integrations._shared.options import template_options
from cocoa_integrations.chat_service import Answer, ChatCall, LocalChat
from cocoa_integrations.langchain import structured
from cocoa_integrations.langchain.answers import ReducedStream
from cocoa_integrations.langchain.base import PER_CALL, TOOL_DETAILS, TOOLS, ChatCallOptions, CocoaModel
from cocoa_integrations.langchain.messages import answer_message, to_chat, to_entries
from cocoa_integrations.langchain.structured import ArgumentsParser, WholeJsonParser
from cocoa_integrations.tool_calling import ToolRequest
from cocoa_integrations.tracing import RiskTrace

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile

STRUCTURED_METHODS = ("json_schema", "function_calling", "json_mode")


# LangChain passes the prompt of a call by position, so CocoaModel need not name it as BaseChatModel does.
class ChatCocoa(ChatCallOptions, CocoaModel, BaseChatModel):  # type: ignore[misc]
    """A chat model, decoded with CoCoA-SIG, that reports the risk of every span of its answers.

    The model is in this process, or at a server (``cocoa serve``) whose address is ``base_url``. Messages are formatted
    with the chat template of the tokenizer. The options are described in :class:`CocoaModel`.

    An answer has its report in ``response_metadata["cocoa_risk"]``: a compact one, unless ``risk_metadata="full"``. In
    a stream, each chunk has the span it adds in ``additional_kwargs["cocoa_spans"]``, and the last chunk has the full
    report. See :func:`~cocoa_integrations.langchain.get_risk`.

    Tools are described by the chat template if it supports tools, and otherwise in the system message in the format of
    Hermes and Qwen. A tool call that ``tool_choice`` or ``strict=True`` asks for, and an answer with a schema, are
    constrained to their JSON schema token by token; this needs the extra ``tools``. ``cocoa_risk["tool_calls"]`` has
    the risk of every argument; see :func:`~cocoa_integrations.langchain.argument_risks`. All offsets refer to the
    generated text, which contains the tool calls, while ``content`` does not.

    A tool call that was cut off or cannot be parsed is in ``invalid_tool_calls``. Its entry in
    ``cocoa_risk["tool_calls"]`` has the reason as ``error``, also in a stream, where LangChain has none. The last chunk
    of such a call ends with an unmatched bracket (``{"name"]``), so that LangChain does not complete it.

    The reasoning of a model, its text between ``<think>`` and ``</think>``, is a content block ``{"type": "reasoning",
    "reasoning": ...}`` before that of the text. No tool is called in it, and risk reports and gates count the answer:
    the reasoning has its own values in ``cocoa_risk["reasoning"]``, and spans have a ``part``, ``"reasoning"`` or
    ``"answer"``. ``enable_thinking`` and ``chat_template_kwargs`` control the chat template, and with
    ``continue_final_message=True`` the model continues the last message, which must be an ``AIMessage``.

    Example:
        >>> chat = ChatCocoa(device_map="auto", alpha=2.5, max_tokens=256)  # or model="Qwen/Qwen2.5-7B-Instruct"
        >>> answer = chat.invoke("What is the capital of France?")
        >>> answer.response_metadata["cocoa_risk"]["max_risk"]
        >>> chat.invoke("And of Italy?", alpha=1.0)  # every setting can be changed for one call
        >>> remote = ChatCocoa(base_url="http://gpu-box:8000/v1", api_key="...")
    """

    initial_tool_choice: str | None = None
    """Default ``tool_choice`` of calls with tools, until a tool has answered the last human message. With ``"any"``,
    agents can use models that are too small to decide when to call a tool."""

    _ls_model_type = "chat"
    _detail = "compact"
    _batches_prompts = False
    _call_options = ChatCallOptions
    _tool_options = TOOLS | TOOL_DETAILS

    _tool_request: ToolRequest = PrivateAttr(default_factory=ToolRequest)
    """The tools and the response format of the call that this copy was made for."""

    _initial_request: ToolRequest | None = PrivateAttr(default=None)
    """The same with ``initial_tool_choice`` applied; ``None`` if that option has no effect on the call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if options.get("profile") is None:
            self.__dict__.pop("profile", None)  # resolved when it is read, see __getattr__

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """``profile``, unless it was given. It follows the model, whose configuration is not read before."""
            return self._resolve_model_profile() if name == "profile" else super().__getattr__(name)

    @model_validator(mode="after")
    def _set_model_profile(self) -> Self:  # replaces LangChain's, which would read the configuration at once
        return self

    @property
    def _llm_type(self) -> str:
        return "cocoa-chat"

    def _resolve_model_profile(self) -> "ModelProfile":
        window = None if self.is_remote else self._engine_or_lazy.context_window
        enforces = self.is_remote or find_spec("llguidance") is not None
        limit: ModelProfile = {} if window is None else {"max_input_tokens": window}
        return {
            **limit,
            "text_inputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "text_outputs": True,
            "tool_calling": True,
            "tool_choice": enforces,
            "structured_output": enforces,
            "temperature": True,
        }

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Number of prompt tokens of these messages, including those of the chat template and the tools.

        For a model at a server it is that of the texts alone, counted by ``custom_get_token_ids``.
        """
        if self.is_remote or not messages:
            return sum(len(self.get_token_ids(message.text)) for message in messages)
        options = template_options(self).model_copy(update={"continue_final_message": False})
        request = self._tool_request if tools is None else structured.tool_request({"tools": tools})
        call = ChatCall(messages=to_entries(messages), tools=request, template=options)
        return len(LocalChat(self.load()).prompt_ids(call))

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        requests = {"tool_request": self._tool_request, "initial_tool_request": self._initial_request}
        tools = {name: repr(request) for name, request in requests.items() if request}
        template = template_options(self).model_dump(exclude_defaults=True)
        source = {"source": list(self.source)} if self.source else {}
        return {**super()._identifying_params, **tools, **template, **source}

    def _with_tools(self, options: Mapping[str, Any]) -> Self:
        if not any(options.get(name) is not None for name in TOOLS | TOOL_DETAILS):
            return self
        copy = self.model_copy()
        copy._tool_request = structured.tool_request(options)
        copy._initial_request = None
        if options.get("tools") and options.get("tool_choice") is None and self.initial_tool_choice is not None:
            copy._initial_request = structured.tool_request({**options, "tool_choice": self.initial_tool_choice})
        return copy

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """As in LangChain. The chunks have full metadata unless ``risk_metadata`` says otherwise.

        ``stream_events(version="v3")`` does not use this method: its events always have full metadata.
        """
        reduced = self._reduced_stream(kwargs)
        kwargs["risk_metadata"] = "full"  # reduced below; LangChain may call invoke instead
        with closing(super().stream(input, config, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            yield from map(reduced.next, chunks)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """See :meth:`stream`."""
        reduced = self._reduced_stream(kwargs)
        kwargs["risk_metadata"] = "full"
        async with aclosing(super().astream(input, config, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield reduced.next(chunk)

    def _reduced_stream(self, options: Mapping[str, Any]) -> ReducedStream:
        """Reduces the chunks of a stream with these options."""
        detail: Detail = options.get("risk_metadata", self.risk_metadata) or "full"
        model = self if detail == "full" else self._for_call(None, options)[0]
        return ReducedStream(detail, logprobs=model._keeps_logprobs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        trace = RiskTrace()  # generate() has applied the options of the call
        return self._result(self.service.answer(self._request(messages)), trace)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        trace = RiskTrace()
        return self._result(await self.service.aanswer(self._request(messages)), trace)

    def _result(self, answer: Answer, trace: RiskTrace) -> ChatResult:
        trace.record(answer)
        return ChatResult(generations=[ChatGeneration(message=answer_message(answer))])

    def _request(self, messages: Sequence[BaseMessage]) -> ChatCall:
        chat = to_chat(messages)
        last = next((turn for turn in reversed(messages) if isinstance(turn, (HumanMessage, ToolMessage))), None)
        answered = isinstance(last, ToolMessage)  # a tool has, since the last human message
        request = self._tool_request if answered else self._initial_request or self._tool_request
        return self._call(messages=chat, tools=request, template=template_options(self), source=self.source or None)

    def prompt_text(self, prompt: LanguageModelInput) -> str:
        """The text of the prompt of a call, as the chat template and the tools of this model make it.

        For a model at a server, which has the chat template, it is the texts of the messages.

        Raises:
            PromptError: the messages have no text, or unsupported content.
            ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
        """
        request = self._request(self._convert_input(prompt).to_messages())
        if self.is_remote:
            return "\n".join(entry["content"] for entry in request.messages or ())
        return LocalChat(self.load()).prompt_text(request)

    def calls_like(self, other: "ChatCocoa") -> bool:
        """Whether calls of both models have the same options and tools."""
        return self._tool_request == other._tool_request and all(
            getattr(self, name) == getattr(other, name) for name in PER_CALL
        )

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools that it can call.

        Args:
            tools: functions, LangChain tools, pydantic classes, TypedDicts or tools in OpenAI's format.
            tool_choice: ``"auto"``: the model decides. ``"any"``, ``"required"`` or ``True``: the model must call a
                tool. A name, or ``{"type": "function", "function": {"name": ...}}``: the model must call this tool. A
                required call is constrained by a grammar. ``"none"``: the tools are not offered to the model. The
                default is ``initial_tool_choice`` of the model, or else ``"auto"``.
            strict: ``True`` also constrains calls that the model decides to make to the JSON schema of their tool.
            parallel_tool_calls: whether an answer may contain several calls. The default is ``True`` if the model
                decides, and ``False`` if a call is required. With ``False``, further calls are listed as invalid.
            **kwargs: options of a call, such as ``response_format``.

        Raises:
            ConfigError: a tool cannot be converted, ``tool_choice`` names an unknown tool, or an option is unknown.
        """
        details = {"tool_choice": tool_choice, "strict": strict, "parallel_tool_calls": parallel_tool_calls}
        options = {name: value for name, value in {**details, **kwargs}.items() if value is not None}
        tools = structured.openai_tools(tools or (), strict=strict)  # at once: an iterator gives them once
        self.with_options({"tools": tools, **options})  # reports errors now rather than at the first call
        if not tools and not options.keys() - details.keys():
            return self
        return self.bind(tools=tools, **options)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model with structured output: its answers are objects, whose JSON schema is enforced token by token.

        Args:
            schema: a pydantic class, a TypedDict or a JSON schema. Objects have no properties besides the declared
                ones, unless the schema allows them. Optional only for ``"json_mode"``.
            method: ``"json_schema"``: the answer is JSON, and the system message contains the schema.
                ``"function_calling"``: the answer is a tool call with these arguments. ``"json_mode"``: the answer is
                JSON, and your prompt describes its content.
            include_raw: return ``{"raw": message, "parsed": object or None, "parsing_error": error or None}``.
            strict: accepted for compatibility; the schema is always enforced.
            **kwargs: options of a call.

        Returns:
            A runnable from a prompt to an object of the pydantic class, or to a dict.

        Raises:
            ConfigError: a method or an option is unknown, or the schema is missing or not a schema.
            OutputParserException: raised by the returned runnable if the answer was cut off (by ``max_tokens``) or does
                not validate.
        """
        if method not in STRUCTURED_METHODS:
            raise ConfigError(f"with_structured_output: {unknown([method], STRUCTURED_METHODS, what='method')}")
        if schema is None and method != "json_mode":
            raise ConfigError(f"with_structured_output: method={method!r} takes a schema")
        json_schema = None if schema is None else structured.json_schema_of(schema)
        # as a tool, since LangChain's own conversion of a schema does not take every one
        shown = structured.openai_tool({"title": structured.TITLE, **(json_schema or {})})
        traced = {"kwargs": {"method": method}, "schema": shown}
        options = {**kwargs, "ls_structured_output_format": traced}
        if method == "function_calling":
            tool, read = structured.as_tool(schema), structured.reader(schema)
            model = self.bind_tools([tool], tool_choice="any", **options)
            parser: Any = ArgumentsParser(key_name=tool["function"]["name"], first_tool_only=True, read=read)
            return structured.with_parser(model, parser, include_raw=include_raw)
        enforced = {"schema": json_schema, "strict": False}  # the parser validates what no grammar enforces
        if json_schema is None:
            response_format: dict[str, Any] = {"type": "json_object"}
        elif method == "json_mode":
            response_format = {"type": "json_object", **enforced}
        else:
            response_format = {"type": "json_schema", "json_schema": enforced}
        self.with_options({**kwargs, "response_format": response_format})
        model = self.bind(response_format=response_format, **options)
        parser = WholeJsonParser(read=structured.reader(schema), json_schema=json_schema)
        return structured.with_parser(model, parser, include_raw=include_raw)
