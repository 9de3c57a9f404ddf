"""LangChain's own standard tests, on the real model. ``test_remote`` has what is the same behind a server.

They are for chat models; there are none for text models. Every capability that they know is declared in
``_Declarations`` if :class:`ChatCocoa` has it. These are switched off:

- ``supports_image_inputs``, ``supports_image_urls``, ``supports_pdf_inputs``, ``supports_audio_inputs``,
  ``supports_video_inputs``, ``supports_image_tool_message``, ``supports_pdf_tool_message``: the engine decodes language
  models, which read text only. Other content raises a ``PromptError``.
- ``supports_model_override``: an object has one model in memory. A call with another name raises a ``ConfigError``.
- ``enable_vcr_tests``: there is no HTTP traffic to record.
- ``init_from_env_params``: no option is read from the environment. The Hugging Face client itself reads ``HF_TOKEN``.
- ``test_serdes``: LangChain skips it, because a model with weights is not ``lc_serializable``.
- Of ``supported_usage_metadata_details``, audio is not declared, because there is none, and neither is
  ``cache_creation_input``, because writing to the prefix cache is not counted.
"""

from typing import Any, cast

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables.utils import add
from langchain_tests import integration_tests, unit_tests
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from langchain_tests.unit_tests.chat_models import ChatModelTests

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa
from tests.helpers.reasoning_models import OPENS
from tests.helpers.served import speaker

pytestmark = pytest.mark.slow

_LONG: dict[str, dict[str, Any]] = {
    "tool": {"max_tokens": 64, "span_log_prob": "sum"},
    "agent": {"max_tokens": 64},
    "structured": {"max_tokens": 64, "repetition_penalty": 1.3},  # or its jokes have no end
    "json_mode": {"max_tokens": 64, "repetition_penalty": 1.3},
    "standard_params": {},
}
"""By a part of a test's name: where an answer must be complete, its settings. A few tokens will do elsewhere."""


class _Declarations:
    """What is tested. The suites read properties, so what a model is made of is put on the class."""

    _engine: CocoaEngine
    _options: dict[str, Any]

    @pytest.fixture(autouse=True)
    def _use(self, engine: CocoaEngine, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        type(self)._engine = engine
        type(self)._options = next((options for part, options in _LONG.items() if part in name), {"max_tokens": 6})

    @property
    def chat_model_class(self) -> type[ChatCocoa]:
        return ChatCocoa

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # the small model calls no tool that it is not told to
        return {"engine": self._engine, "initial_tool_choice": "any", **self._options}

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
        chat = ChatCocoa(engine=speaker("Well.</think>Hello!", template=OPENS))
        return cast("AIMessage", add(list(chat.stream("Hi")))) if stream else chat.invoke("Hi")


class TestUnit(_Declarations, ChatModelUnitTests):
    """Nothing is generated here."""


class TestIntegration(_Declarations, ChatModelIntegrationTests):
    """Every way of asking, on the real model."""


def test_every_capability_is_declared_or_listed() -> None:
    off = (__doc__ or "").split("switched off:")[1]
    prefixes = ("has_", "supports_", "returns_", "enable_", "supported_")
    for name in {name for name in dir(ChatModelTests) if name.startswith(prefixes)} - {*vars(_Declarations)}:
        assert f"``{name}``" in off


def test_there_is_no_suite_for_text_models() -> None:
    suites = [name for module in (unit_tests, integration_tests) for name in module.__all__]
    assert not [name for name in suites if "LLM" in name or "Language" in name]
