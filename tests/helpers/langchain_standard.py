"""What LangChain's standard tests are told of ``ChatCocoa``, in this process and behind a server."""

from __future__ import annotations

from typing import Any, cast

from langchain_core.messages import AIMessage
from langchain_core.runnables.utils import add

from cocoa_integrations.langchain import ChatCocoa


class Declarations:
    """The capabilities of the model. The suites read them as properties, and where the model is from the subclass."""

    @property
    def chat_model_class(self) -> type[ChatCocoa]:
        return ChatCocoa

    @property
    def chat_model_params(self) -> dict[str, Any]:
        raise NotImplementedError

    def thinker(self) -> ChatCocoa:
        """A model that reasons."""
        raise NotImplementedError

    has_tool_calling = has_tool_choice = has_structured_output = property(lambda self: True)
    supports_json_mode = returns_usage_metadata = supports_anthropic_inputs = property(lambda self: True)

    @property
    def supported_usage_metadata_details(self) -> dict[Any, list[Any]]:
        details = ["cache_read_input", "reasoning_output"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """The answer to a prompt that was read before."""
        chat = ChatCocoa(**self.chat_model_params)
        prompt = "Name three colours of the rainbow, and say where a rainbow comes from. " * 5  # reused from 64 tokens
        chat.invoke(prompt)
        answer = cast("AIMessage", add(list(chat.stream(prompt)))) if stream else chat.invoke(prompt)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 10
        return answer

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        """The answer of a model that reasons."""
        chat = self.thinker()
        return cast("AIMessage", add(list(chat.stream("Hi")))) if stream else chat.invoke("Hi")
