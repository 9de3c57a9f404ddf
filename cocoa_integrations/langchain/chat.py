"""The chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.callbacks import CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig
from pydantic import PrivateAttr, model_validator
from typing_extensions import Self

from cocoa_engine import Generation
from cocoa_integrations._shared.chat_template import given_options, template_options
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY, all_spans, span_metadata
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations._shared.workers import in_worker
from cocoa_integrations.langchain.base import CocoaModel, usage_of
from cocoa_integrations.langchain.cocoa_chat import CocoaChat
from cocoa_integrations.langchain.detail import ReducedStream, reduced_result
from cocoa_integrations.langchain.messages import chunk_content, message_content, to_chat, to_entries
from cocoa_integrations.langchain.options import PER_CALL, TOOL_DETAILS, TOOLS, ChatCallOptions
from cocoa_integrations.langchain.tools import ChunkWriter, refuse_legacy, tool_calls, tool_has_answered, tool_request
from cocoa_integrations.tool_calling import Call, Plan, ToolRequest, new_id, parts_of_report
from cocoa_integrations.tool_calling.streaming import GrowingAnswer, Piece
from cocoa_integrations.tracing import RiskTrace

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile

Item = TypeVar("Item")
Result = TypeVar("Result")


# LangChain passes the prompt of a call by position, so CocoaModel need not name it as BaseChatModel does.
class ChatCocoa(ChatCallOptions, CocoaModel, CocoaChat):  # type: ignore[misc]
    """A local chat model, decoded with CoCoA-SIG, that reports the risk of every span of its answers.

    Messages are formatted with the chat template of the tokenizer. An answer has its report in
    ``response_metadata["cocoa_risk"]``: a compact one, unless ``risk_metadata="full"``. In a stream, each chunk has the
    span it adds in ``additional_kwargs["cocoa_spans"]``, and the last chunk has the full report. See
    :func:`~cocoa_integrations.langchain.get_risk`. The options are described in :class:`CocoaModel`.

    Tools are described by the chat template if it supports tools, and otherwise in the system message in the format of
    Hermes and Qwen. A tool call that ``tool_choice`` or ``strict=True`` asks for, and an answer with a schema, are
    constrained to their JSON schema token by token; this needs the extra ``tools``. The offsets of spans and arguments
    refer to the generated text, which is the concatenation of the span texts. It contains the tool calls, while
    ``content`` does not. ``response_metadata["cocoa_risk"]["tool_calls"]`` has the risk of every argument; see
    :func:`~cocoa_integrations.langchain.argument_risks`.

    A tool call that was cut off or cannot be parsed is in ``invalid_tool_calls``. The ``error`` of its entry in
    ``cocoa_risk["tool_calls"]`` gives the reason, also in a stream, where LangChain sets the ``error`` of the invalid
    call to ``None``. The last chunk of such a call ends with an unmatched bracket (``{"name"]``). Without it, LangChain
    would complete the truncated JSON and list the call as valid.

    The reasoning of a model, its text between ``<think>`` and ``</think>``, is a content block
    ``{"type": "reasoning", "reasoning": ...}`` before that of the text. ``message.text`` is the answer only, no tool is
    called before ``</think>``, and risk reports and gates count the answer: the reasoning has its own values in
    ``cocoa_risk["reasoning"]``. Spans then have a ``part``, ``"reasoning"`` or ``"answer"``. ``enable_thinking`` and
    ``chat_template_kwargs`` control the chat template, and with ``continue_final_message=True`` the model continues the
    last message, which must be an ``AIMessage``.

    Example:
        >>> chat = ChatCocoa(device_map="auto", alpha=2.5, max_tokens=256)  # or model="Qwen/Qwen2.5-7B-Instruct"
        >>> answer = chat.invoke("What is the capital of France?")
        >>> answer.response_metadata["cocoa_risk"]["max_risk"]
        >>> chat.invoke("And of Italy?", alpha=1.0)  # every setting can be changed for one call
    """

    initial_tool_choice: str | None = None
    """Default ``tool_choice`` of calls with tools, until a tool has answered the last human message. With ``"any"``,
    agents can use models that are too small to decide when to call a tool."""

    _ls_model_type = "chat"
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

    def _resolve_model_profile(self) -> ModelProfile:
        window = self._engine_or_lazy.context_window
        enforces = find_spec("llguidance") is not None
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
        """Number of prompt tokens of these messages, including those of the chat template and the tools."""
        if not messages:
            return 0
        engine = self.load()
        request = self._tool_request if tools is None else tool_request({"tools": tools})
        options = template_options(self).model_copy(update={"continue_final_message": False})
        chat, template_kwargs = Plan(request, engine, options).prompt(to_entries(messages))
        return len(engine.encode_chat(chat, **template_kwargs))

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        requests = {"tool_request": self._tool_request, "initial_tool_request": self._initial_request}
        tools = {name: repr(request) for name, request in requests.items() if request}
        source = {"source": list(self.source)} if self.source else {}
        return {**super()._identifying_params, **tools, **given_options(self), **source}

    def _with_tools(self, options: Mapping[str, Any]) -> Self:
        refuse_legacy(options)
        if not any(options.get(name) is not None for name in TOOLS | TOOL_DETAILS):
            return self
        copy = self.model_copy()
        copy._tool_request = tool_request(options)
        copy._initial_request = None
        if options.get("tools") and options.get("tool_choice") is None and self.initial_tool_choice is not None:
            copy._initial_request = tool_request({**options, "tool_choice": self.initial_tool_choice})
        return copy

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """As in LangChain. ``max_concurrency`` defaults to the batch size of the engine."""
        configs = self._with_concurrency(config, len(inputs))
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """See :meth:`batch`."""
        configs = self._with_concurrency(config, len(inputs))
        return await super().abatch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As in LangChain. The options of the call are applied to the model first, so caches and traces see them."""
        model, framework = self._for_call(stop, kwargs)
        result = super(ChatCocoa, model).generate(messages, list(model.stop) or None, callbacks, **framework)
        return model._returned(result)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See :meth:`generate`."""
        model, framework = self._for_call(stop, kwargs)
        result = await super(ChatCocoa, model).agenerate(messages, list(model.stop) or None, callbacks, **framework)
        return model._returned(result)

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
            for chunk in chunks:
                yield reduced.next(chunk) if reduced else chunk

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
                yield reduced.next(chunk) if reduced else chunk

    def _returned(self, result: LLMResult) -> LLMResult:
        """The result with the detail that the messages of a call have."""
        return reduced_result(result, self.risk_metadata or "compact", logprobs=self._keeps_logprobs)

    def _reduced_stream(self, options: Mapping[str, Any]) -> ReducedStream | None:
        """Reduces the chunks of a stream with these options; ``None`` if they have full metadata."""
        detail = options.get("risk_metadata", self.risk_metadata)
        if detail in (None, "full"):
            return None
        model = self._for_call(None, options)[0]
        return ReducedStream(model.risk_metadata or "full", logprobs=model._keeps_logprobs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        model, _ = self._for_call(stop, kwargs)
        plan, chat, options = model._prepare(messages)
        trace = RiskTrace()
        generation = model._retrying(lambda: plan.engine.chat(chat, **options))
        split = plan.split(generation)
        trace.record(split.answered)
        reading = plan.read(generation.text, start=split.answer_start)
        calls = [(new_id(), call) for call in reading.calls]
        valid, invalid = tool_calls(calls)
        message = AIMessage(
            content=message_content(split.reasoning, reading.content),
            tool_calls=valid,
            invalid_tool_calls=invalid,
            additional_kwargs={SPANS_KEY: all_spans(generation, split)},
            response_metadata=model._chat_metadata(generation, plan, split, calls),
            usage_metadata=usage_of(generation, split),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunks(self, messages: list[BaseMessage]) -> Generator[ChatGenerationChunk, None, None]:
        plan, chat, options = self._prepare(messages)
        answer, writer = GrowingAnswer(plan), ChunkWriter()

        def to_chunk(piece: Piece, **last: Any) -> ChatGenerationChunk:
            blocks = answer.has_reasoning or self.output_version == "v1"
            message = AIMessageChunk(
                content=chunk_content(piece.reasoning, piece.content) if blocks else piece.content,
                tool_call_chunks=[writer.chunk(delta) for delta in piece.calls],
                additional_kwargs={}
                if piece.span is None or piece.number is None
                else {SPANS_KEY: [span_metadata(piece.span, piece.number, piece.part)]},
                **last,
            )
            return ChatGenerationChunk(message=message)

        spans = self._stream_spans(
            lambda: plan.engine.stream_chat(chat, **options),
            lambda _, span: [to_chunk(piece) for piece in answer.add(span)],
            lambda generation: plan.split(generation).answered,
        )
        generation = yield from _flattened(spans)
        [*held, rest], reading = answer.finish()
        yield from map(to_chunk, held)
        split = plan.split(generation)
        usage = usage_of(generation, split) if self.stream_usage else None
        last = to_chunk(rest, usage_metadata=usage, chunk_position="last")
        calls = list(zip(writer.ids, reading.calls, strict=True))
        last.message.response_metadata = self._chat_metadata(generation, plan, split, calls)
        yield last

    def _prompt(self, messages: Sequence[BaseMessage]) -> tuple[Plan, list[dict[str, Any]], dict[str, Any]]:
        """The plan of a call, and the messages and the arguments of the chat template of its prompt."""
        chat = to_chat(messages)
        request = self._tool_request if tool_has_answered(messages) else self._initial_request or self._tool_request
        plan = Plan(request, self.load(), template_options(self))
        return plan, *plan.prompt(chat)

    def prompt_ids(self, given: LanguageModelInput) -> list[int]:
        """The token ids of the prompt of a call, as the chat template and the tools of this model make it.

        Raises:
            PromptError: the messages have no text, or unsupported content.
            ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
        """
        plan, chat, template_kwargs = self._prompt(self._convert_input(given).to_messages())
        return plan.engine.encode_chat(chat, **template_kwargs)

    def prompt_text(self, given: LanguageModelInput) -> str:
        """The text of the prompt of a call; see :meth:`prompt_ids`."""
        plan, chat, template_kwargs = self._prompt(self._convert_input(given).to_messages())
        return plan.engine.render_chat(chat, **template_kwargs)

    async def aprompt_text(self, given: LanguageModelInput) -> str:
        """See :meth:`prompt_text`; without blocking the event loop."""
        return await in_worker(self._engine_or_lazy, self.prompt_text, given)

    def calls_like(self, other: ChatCocoa) -> bool:
        """Whether calls of both models have the same options and tools."""
        return self._tool_request == other._tool_request and all(
            getattr(self, name) == getattr(other, name) for name in PER_CALL
        )

    def _prepare(self, messages: Sequence[BaseMessage]) -> tuple[Plan, list[dict[str, Any]], dict[str, Any]]:
        """The plan of a call, and the messages and the options for ``chat`` or ``stream_chat`` of the engine."""
        plan, chat, template_kwargs = self._prompt(messages)
        options = self._decode_options()
        options["logits_processor"] = [*options["logits_processor"], *plan.processors(chat, template_kwargs)]
        options["source"] = self.source or None
        return plan, chat, {"template_kwargs": template_kwargs, **options}

    def _chat_metadata(
        self, generation: Generation, plan: Plan, split: Split, calls: Sequence[tuple[str, Call]]
    ) -> dict[str, Any]:
        metadata = {**self._metadata(generation, split), "model_provider": "cocoa"}
        metadata[RISK_KEY] |= parts_of_report(generation, plan, split, calls)
        return metadata


def _flattened(lists: Generator[list[Item], None, Result]) -> Generator[Item, None, Result]:
    """Yield the items of the lists of a generator, and return what it returns."""
    with closing(lists):
        while True:
            try:
                items = next(lists)
            except StopIteration as end:
                return end.value
            yield from items
