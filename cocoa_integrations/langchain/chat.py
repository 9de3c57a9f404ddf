"""The chat model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult

from cocoa_engine import Span
from cocoa_engine.errors import UnsupportedFeatureError
from cocoa_integrations.langchain.base import CocoaModel, usage_of
from cocoa_integrations.langchain.messages import to_chat
from cocoa_integrations.metadata import SPANS_KEY, all_spans, span_metadata

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile


class ChatCocoa(CocoaModel, BaseChatModel):
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

    @property
    def _llm_type(self) -> str:
        return "cocoa-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(**{**super()._get_ls_params(stop, **kwargs), "ls_model_type": "chat"})

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
        if tools:
            raise UnsupportedFeatureError("ChatCocoa does not call tools")
        return len(self.load().encode_chat(to_chat(messages)))

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
        message = AIMessage(
            content=generation.text,
            additional_kwargs={SPANS_KEY: all_spans(generation)},
            response_metadata=model._metadata(generation),
            usage_metadata=usage_of(generation),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Generator[ChatGenerationChunk, None, None]:
        model, _ = self._for_call(stop, kwargs)
        chat, engine, options = to_chat(messages), model.load(), model._decode_options()

        def emit(message: AIMessageChunk) -> ChatGenerationChunk:
            chunk = ChatGenerationChunk(message=message)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            return chunk

        def of_span(number: int, span: Span) -> ChatGenerationChunk:
            return emit(AIMessageChunk(content=span.text, additional_kwargs={SPANS_KEY: [span_metadata(span, number)]}))

        generation = yield from model._decided(lambda: engine.stream_chat(chat, **options), of_span)
        yield emit(
            AIMessageChunk(
                content="",
                response_metadata=model._metadata(generation),
                usage_metadata=usage_of(generation),
                chunk_position="last",
            )
        )
