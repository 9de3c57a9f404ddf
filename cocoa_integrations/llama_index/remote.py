"""An LLM that asks ``cocoa serve``, whose responses and events have the risk where those of ``CocoaLLM`` have it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cocoa_engine.optional import need

need("llama_index.llms.openai_like", extra="remote", what="CocoaRemote")

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, ValidationError
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import explain
from cocoa_engine.report import Detail, require_detail
from cocoa_integrations._shared.at_exit import closed_at_exit
from cocoa_integrations._shared.chat_template import ChatTemplateOptions
from cocoa_integrations._shared.citations import MOST_PASSAGES
from cocoa_integrations._shared.load_options import one_model_name
from cocoa_integrations._shared.remote_answers import MODELS, clear_errors, received
from cocoa_integrations._shared.remote_settings import (
    DEFAULT_MODEL,
    DEFAULT_URL,
    NO_KEY,
    REMOTE,
    RemoteSettings,
    body_beside_openai,
    checked,
    openai_options,
    refuse_unknown,
    require_addresses,
    wire_message,
)
from cocoa_integrations._shared.settings import SYNONYMS
from cocoa_integrations.llama_index.function_calling import CallsFunctions
from cocoa_integrations.llama_index.messages import require_text, to_entries
from cocoa_integrations.llama_index.remote_answers import RemoteAnswer
from cocoa_integrations.llama_index.responses import Delivery
from cocoa_integrations.llama_index.retrieved import PassagesOfCall
from cocoa_integrations.llama_index.tools import TOOL_OPTIONS, split_tools

OF_CALLS = frozenset({"risk_metadata", "logprobs", "candidates", "use_chat_completions"})
"""Options of a call that are neither settings nor OpenAI's."""


class CocoaRemote(RemoteSettings, ChatTemplateOptions, CallsFunctions, OpenAILike):
    """The LLM of a server (``cocoa serve``), with the risk of every span of its answers.

    Responses, events and collectors have ``cocoa_risk`` and ``cocoa_spans`` where those of :class:`CocoaLLM` have them,
    so :class:`RiskQueryEngine`, :class:`RiskRetryQueryEngine`, chat engines and agents work alike. Every setting of
    :class:`~cocoa_engine.CocoaConfig` is an option, of the constructor and of each call, except ``decore_heads``. A
    setting that is not given is that of the server. All options of ``OpenAILike`` are accepted; ``base_url`` is a
    synonym of ``api_base``, and ``model_name`` of ``model``. ``model`` matters only if the server was given names, and
    ``api_key`` if it was given keys. The key of OpenAI in the environment is never sent.

    The retrieved nodes of an engine whose text is in the messages are sent as ``source``, as :class:`CocoaLLM` measures
    them. ``complete`` sends its prompt as a user's message. ``context_window`` is asked of the server unless it is
    given. The ``generation`` of a :class:`CocoaRiskEvent` has no tokens.

    An error of the server is raised as the exception of the package ``openai`` for its status, with the server's
    message. Requests that a busy server refuses are sent again, up to ``max_retries`` times, after the time that it
    asks for. An answer with a missing field or one of a wrong type, such as that of a server of another kind, is a
    ``DataError``::

        llm = CocoaRemote(base_url="http://gpu-box:8000/v1", api_key="...", alpha=2.0, max_tokens=128)
        response = llm.chat([ChatMessage("What is the capital of France?")])
        response.additional_kwargs["cocoa_risk"]["max_risk"]

    Raises:
        ConfigError: an option is unknown or out of range.
        MissingExtraError: the package llama-index-llms-openai-like is not installed.
    """

    model: str = Field(DEFAULT_MODEL, description="The name of the model at the server.")
    api_base: str | None = Field(DEFAULT_URL, description="The address of the server's API.")
    api_key: str | None = Field(NO_KEY, description="The API key.")
    is_chat_model: bool = Field(True, description="Whether messages are sent, rather than their text.")
    is_function_calling_model: bool = Field(True, description="Whether LlamaIndex uses it to call functions.")
    temperature: float | None = Field(None, description=CocoaConfig.model_fields["temperature"].description)
    top_logprobs: int | None = Field(None, description=CocoaConfig.model_fields["top_logprobs"].description)
    top_p: float | None = Field(None, description=CocoaConfig.model_fields["top_p"].description)
    seed: int | None = Field(None, description=CocoaConfig.model_fields["seed"].description)
    stop: Any = Field(None, description=CocoaConfig.model_fields["stop"].description)
    risk_metadata: Detail | None = Field(
        None, description="How much of the risk responses carry, as for :class:`CocoaLLM`."
    )
    candidates: bool = Field(False, description="Whether the entries of spans list the candidates that competed.")

    if TYPE_CHECKING:
        alpha: Any

    _window: int | None = PrivateAttr(default=None)

    def __init__(self, **options: Any) -> None:
        what, fields = type(self).__name__, type(self).model_fields
        own = ("base_url", "http_client", "async_http_client", "openai_client", "async_openai_client")
        refuse_unknown(options, {*fields, *SYNONYMS, *REMOTE, *own, "model_name"}, what=what, base="OpenAILike")
        one_model_name(options, field="model")
        require_addresses(options)
        for name, synonym in (("max_tokens", "max_new_tokens"), ("api_base", "base_url")):
            given = [one for one in (options.pop(synonym, None), options.get(name)) if one is not None]
            if len(set(given)) > 1:
                raise ConfigError(
                    f"{what}: {synonym} and {name} are the same option, given as {given[0]!r} and {given[1]!r}"
                )
            options[name] = given[0] if given else None
        for name, default in (("api_base", DEFAULT_URL), ("api_key", NO_KEY), ("model", DEFAULT_MODEL)):
            options[name] = default if options.get(name) is None else options[name]
        require_detail(options.get("risk_metadata"))
        window = options.get("context_window")
        options = {name: value for name, value in options.items() if value is not None or name == "logprobs"}
        try:
            super().__init__(**{"temperature": None, **options})
        except ValidationError as error:
            raise ConfigError(f"{what}: {explain(error)}") from None
        self._window = window
        self._settings()

    @classmethod
    def class_name(cls) -> str:
        """The class name in LlamaIndex's serialisation."""
        return "CocoaRemote"

    @property
    def model_name(self) -> str:
        """A synonym of ``model``."""
        return self.model

    @model_name.setter
    def model_name(self, value: str) -> None:
        self.model = value

    @property
    def metadata(self) -> LLMMetadata:
        """The properties of the model that LlamaIndex uses to build prompts. Asks the server for the context window."""
        return self._metadata(self._context_window())

    def to_payload(self) -> dict[str, Any]:
        """The description for callbacks. It does not ask the server."""
        return {"class_name": self.class_name(), **self._metadata(self._window or DEFAULT_CONTEXT_WINDOW).model_dump()}

    def _metadata(self, context_window: int) -> LLMMetadata:
        return LLMMetadata(
            context_window=context_window,
            num_output=self.max_tokens or CocoaConfig().max_new_tokens,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model,
        )

    # OpenAILike would read the metadata first, which asks the server

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer chat messages; the options of a call are those of the constructor, and tools, as for CocoaLLM."""
        return self._openai.chat(messages, **kwargs)

    @closed_at_exit
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Like :meth:`chat`, with one chunk for each span as soon as it is decided."""
        return self._openai.stream_chat(messages, **kwargs)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like :meth:`chat`, without blocking the event loop."""
        return await self._openai.achat(messages, **kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Like :meth:`stream_chat`, without blocking the event loop."""
        return await self._openai.astream_chat(messages, **kwargs)

    @property
    def _openai(self) -> Any:
        """The methods of the class that OpenAILike extends."""
        return super(OpenAILike, self)

    def _context_window(self) -> int:
        if self._window is None:
            with clear_errors():
                listed = received(self._get_client().get("/models", cast_to=object), MODELS)["data"]
            entry = next((one for one in listed if one["id"] == self.model), listed[0])
            self._window = entry.get("max_model_len") or DEFAULT_CONTEXT_WINDOW
        return self._window

    def _use_chat_completions(self, kwargs: dict[str, Any]) -> bool:
        return True

    def _settings(self) -> dict[str, Any]:
        """The settings that are given, by their names.

        Raises:
            ConfigError: one is out of range.
        """
        return checked({name: getattr(self, "max_tokens" if name == "max_new_tokens" else name) for name in REMOTE})

    def _begin(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any], *, stream: bool
    ) -> tuple[dict[str, Any], RemoteAnswer]:
        """The arguments of a call of OpenAI's client, and what converts its answer.

        Raises:
            ConfigError: an option is unknown or out of range.
            PromptError: the messages have no text, or unsupported content.
        """
        request, rest = split_tools(options)
        one_model_name(rest, field="model")
        known = {*REMOTE, *SYNONYMS, *OF_CALLS, *ChatTemplateOptions.model_fields}
        refuse_unknown(rest, known | openai_options(), what="a call of CocoaRemote", base="OpenAI's API")
        named = {SYNONYMS.get(name, name): value for name, value in rest.items() if value is not None}
        settings = {**self._settings(), **checked({name: value for name, value in named.items() if name in REMOTE})}

        def value(name: str) -> Any:
            return named.pop(name) if name in named else getattr(self, name)

        template = ChatTemplateOptions(**{name: value(name) for name in ChatTemplateOptions.model_fields})
        logprobs = value("logprobs")
        if logprobs is None and settings.get("top_logprobs"):
            logprobs = True
        delivery = Delivery(value("risk_metadata"), logprobs)
        given = dict(self.additional_kwargs)
        body = {**given.pop("extra_body", {}), **named.pop("extra_body", {})}
        require_text(messages)
        opened = list(messages)
        if opened[0].role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
            opened = self._extend_messages(opened)
        entries, passages = to_entries(opened), PassagesOfCall()
        # sources that the caller names take precedence
        source = (
            None
            if "source" in body.get("cocoa", {})
            else passages.source(partial(_text_of, entries), most=MOST_PASSAGES)
        )
        extra = body_beside_openai(
            {name: one for name, one in settings.items() if name != "max_new_tokens"},
            template,
            candidates=value("candidates"),
            source=source or (),
            given=body,
        )
        tools = {name: options[name] for name in TOOL_OPTIONS - {"strict"} if options.get(name) is not None}
        if (response_format := tools.pop("response_format", None)) is not None:
            extra["response_format"] = response_format
        if request.tools:
            strict = {"strict": True} if request.strict else {}
            tools["tools"] = [{**tool, "function": {**tool["function"], **strict}} for tool in request.tools]
            tools["tool_choice"] = request.tool_choice
        else:
            tools = {}
        arguments = {
            "model": self.model,
            **given,
            **{name: one for name, one in named.items() if name in openai_options()},
            **tools,
            "messages": [wire_message(entry) for entry in entries],
            "stream": stream,
            "extra_body": extra,
        }
        if "max_new_tokens" in settings:
            arguments["max_tokens"] = settings["max_new_tokens"]
        if logprobs is not None:
            arguments["logprobs"] = logprobs
        if stream:
            arguments["stream_options"] = {"include_usage": True}
        return arguments, RemoteAnswer(delivery, settings, passages, required=request.required)

    def _created(self, arguments: Mapping[str, Any], answer: RemoteAnswer) -> Any:
        """What OpenAI's client returns: an answer or a stream."""
        create = self._get_client().chat.completions.create
        try:
            return create(**arguments)
        except BadRequestError as error:
            return create(**_without_nodes(arguments, answer, error))

    async def _acreated(self, arguments: Mapping[str, Any], answer: RemoteAnswer) -> Any:
        """Like :meth:`_created`."""
        create = self._get_aclient().chat.completions.create
        try:
            return await create(**arguments)
        except BadRequestError as error:
            return await create(**_without_nodes(arguments, answer, error))

    def _chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        arguments, answer = self._begin(messages, kwargs, stream=False)
        with clear_errors():
            return answer.whole(self._created(arguments, answer))

    def _stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        arguments, answer = self._begin(messages, kwargs, stream=True)

        def responses() -> Generator[ChatResponse, None, None]:
            with clear_errors(), self._created(arguments, answer) as stream:
                for chunk in stream:
                    yield from answer.add(chunk)
            yield from answer.finish()

        return responses()

    async def _achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        arguments, answer = self._begin(messages, kwargs, stream=False)
        with clear_errors():
            return answer.whole(await self._acreated(arguments, answer))

    async def _astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        arguments, answer = self._begin(messages, kwargs, stream=True)

        async def responses() -> AsyncGenerator[ChatResponse, None]:
            with clear_errors():
                async with await self._acreated(arguments, answer) as stream:
                    async for chunk in stream:
                        for response in answer.add(chunk):
                            yield response
            for response in answer.finish():
                yield response

        return responses()


def _text_of(entries: Sequence[Mapping[str, Any]]) -> str:
    """The text of messages, in which no passage goes from one into the next."""
    return "\0".join(entry["content"] for entry in entries)


def _without_nodes(arguments: Mapping[str, Any], answer: RemoteAnswer, error: BadRequestError) -> dict[str, Any]:
    """The arguments of a refused call again, without the retrieved nodes, if the server does not find these.

    Its chat template can change or drop the text of a message. The answer then has no attention on the nodes.

    Raises:
        BadRequestError: the call was refused for another reason.
    """
    if error.param not in ("cocoa.source", "source") or not answer.passages.node_ids:
        raise error
    answer.passages.node_ids = []
    body = arguments["extra_body"]
    cocoa = {name: value for name, value in body["cocoa"].items() if name != "source"}
    return {**arguments, "extra_body": {**body, "cocoa": cocoa}}
