"""The chat model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult

from cocoa_engine import Span
from cocoa_integrations.langchain.base import CocoaModel, usage_of
from cocoa_integrations.langchain.messages import to_chat, to_entry
from cocoa_integrations.metadata import SPANS_KEY, all_spans, span_metadata
from cocoa_integrations.tracing import RiskTrace

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile


# LangChain passes the prompt of a call by position; CocoaModel does not name it as BaseChatModel does.
class ChatCocoa(CocoaModel, BaseChatModel):  # type: ignore[misc]
    """A local chat model decoded with CoCoA-SIG, every span of its answers with its risk.

    Messages go through the tokenizer's chat template. An answer carries ``additional_kwargs["cocoa_spans"]`` (in a
    stream: each chunk its own span, as soon as it is decided) and ``response_metadata["cocoa_risk"]`` (in a stream: the
    last chunk); see :func:`~cocoa_integrations.langchain.get_risk`. The options are described at :class:`CocoaModel`.

    Example:
        >>> chat = ChatCocoa(model="Qwen/Qwen2.5-7B-Instruct", device_map="auto", alpha=2.5, max_tokens=256)
        >>> answer = chat.invoke("What is the capital of France?")
        >>> answer.response_metadata["cocoa_risk"]["max_risk"]
        >>> chat.invoke("And of Italy?", alpha=1.0)  # any setting, for this call only
    """

    _ls_model_type = "chat"

    @property
    def _llm_type(self) -> str:
        return "cocoa-chat"

    def _resolve_model_profile(self) -> ModelProfile:
        window = self.engine.context_window if self.engine is not None else None
        limit: ModelProfile = {} if window is None else {"max_input_tokens": window}
        return {
            **limit,
            "text_inputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "text_outputs": True,
            "tool_calling": False,
            "structured_output": False,
            "temperature": True,
        }

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Number of tokens of the prompt that these messages make, the chat template's own among them.

        Raises:
            UnsupportedFeatureError: tools are given.
        """
        self._refuse_tools({"tools": tools})
        return len(self.load().encode_chat([to_entry(message) for message in messages])) if messages else 0

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As in LangChain, the options of the call being part of the model: caches and traces see what applies."""
        model, framework = self._for_call(stop, kwargs)
        return super(ChatCocoa, model).generate(messages, list(model.stop) or None, callbacks, **framework)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """See :meth:`generate`."""
        model, framework = self._for_call(stop, kwargs)
        return await super(ChatCocoa, model).agenerate(messages, list(model.stop) or None, callbacks, **framework)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        model, _ = self._for_call(stop, kwargs)
        chat, engine, options = to_chat(messages), model.load(), model._decode_options()
        generation = model._retrying(lambda: engine.chat(chat, **options))
        RiskTrace().record(generation)
        message = AIMessage(
            content=generation.text,
            additional_kwargs={SPANS_KEY: all_spans(generation)},
            response_metadata=model._metadata(generation),
            usage_metadata=usage_of(generation),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunks(self, messages: list[BaseMessage]) -> Generator[ChatGenerationChunk, None, None]:
        chat, engine, options = to_chat(messages), self.load(), self._decode_options()

        def of_span(number: int, span: Span) -> ChatGenerationChunk:
            spans = [span_metadata(span, number)]
            return ChatGenerationChunk(message=AIMessageChunk(content=span.text, additional_kwargs={SPANS_KEY: spans}))

        generation = yield from self._decided(lambda: engine.stream_chat(chat, **options), of_span)
        yield ChatGenerationChunk(
            message=AIMessageChunk(
                content="",
                response_metadata=self._metadata(generation),
                usage_metadata=usage_of(generation),
                chunk_position="last",
            )
        )
