"""LangChain's own standard tests, on the real model, in this process and behind a server.

They are for chat models; there are none for text models. Every capability that they know is declared in
``_Declarations`` if :class:`ChatCocoa` has it. These are switched off:

- ``supports_image_inputs``, ``supports_image_urls``, ``supports_pdf_inputs``, ``supports_audio_inputs``,
  ``supports_video_inputs``, ``supports_image_tool_message``, ``supports_pdf_tool_message``: the engine decodes language
  models, which read text only. Other content raises a ``PromptError``.
- ``supports_model_override``: an object has one model in memory. A call with another name raises a ``ConfigError``. A
  server can have several names, and there it is declared.
- ``enable_vcr_tests``: there is no HTTP traffic to record.
- ``init_from_env_params``: no option is read from the environment. The Hugging Face client itself reads ``HF_TOKEN``.
- ``test_serdes``: LangChain skips it, because a model with weights is not ``lc_serializable``.
- Of ``supported_usage_metadata_details``, audio is not declared, because there is none, and neither is
  ``cache_creation_input``, because writing to the prefix cache is not counted.

``_LEFT_OUT`` has the tests that take long and show nothing of HTTP: they do not run behind a server.
"""

from collections.abc import Iterator
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
from tests.helpers.live_server import serving
from tests.helpers.reasoning_models import OPENS, speaker

pytestmark = pytest.mark.slow

_LONG: dict[str, dict[str, Any]] = {
    "tool": {"max_tokens": 64, "span_log_prob": "sum"},
    "agent": {"max_tokens": 64},
    "structured": {"max_tokens": 64, "repetition_penalty": 1.3},  # or its jokes have no end
    "json_mode": {"max_tokens": 64, "repetition_penalty": 1.3},
    "standard_params": {},
}
"""By a part of a test's name: where an answer must be complete, its settings. A few tokens will do elsewhere."""

_LEFT_OUT = {
    "test_unicode_tool_call_integration": "what the model writes into arguments is the same with and without a server",
    "test_json_mode": "the same request as that of json_schema, with another schema",
    "test_structured_output": "in test_remote",
    "test_structured_output_async": "in test_remote",
    "test_structured_output_pydantic_2_v1": "the classes are made in this process",
    "test_structured_output_optional_param": "schemas are converted in this process",
    "test_anthropic_inputs": "messages are converted by the code of ChatCocoa",
}
"""Tests that are not run behind a server, with the reasons."""


class _Declarations:
    """What is tested. The suites read properties, so what a model is made of is put on the class."""

    _made_of: dict[str, Any]
    _thinker: dict[str, Any]
    _options: dict[str, Any]

    @pytest.fixture(scope="class")
    def made_of(self, engine: CocoaEngine) -> dict[str, Any]:
        return {"engine": engine}

    @pytest.fixture(scope="class")
    def thinker(self) -> dict[str, Any]:
        """A model that reasons."""
        return {"engine": speaker("Well.</think>Hello!", template=OPENS)}

    @pytest.fixture(autouse=True)
    def _use(self, made_of: dict[str, Any], thinker: dict[str, Any], request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        if name in _LEFT_OUT and "engine" not in made_of:
            pytest.skip(_LEFT_OUT[name])
        type(self)._made_of, type(self)._thinker = made_of, thinker
        type(self)._options = next((options for part, options in _LONG.items() if part in name), {"max_tokens": 6})

    @property
    def chat_model_class(self) -> type[ChatCocoa]:
        return ChatCocoa

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # the small model calls no tool that it is not told to
        return {**self._made_of, "initial_tool_choice": "any", **self._options}

    has_tool_calling = has_tool_choice = has_structured_output = property(lambda self: True)
    supports_json_mode = returns_usage_metadata = supports_anthropic_inputs = property(lambda self: True)
    supports_model_override = property(lambda self: "engine" not in self._made_of)
    model_override_value = property(lambda self: "another-name")

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
        chat = ChatCocoa(**self._thinker)
        return cast("AIMessage", add(list(chat.stream("Hi")))) if stream else chat.invoke("Hi")


class _Remote(_Declarations):
    @pytest.fixture(scope="class")
    def made_of(self, engine: CocoaEngine) -> Iterator[dict[str, Any]]:
        with serving(engine, served_names=("cocoa", "another-name")) as url:
            yield {"base_url": url, "timeout": 60}

    @pytest.fixture(scope="class")
    def thinker(self) -> Iterator[dict[str, Any]]:
        with serving(speaker("Well.</think>Hello!", template=OPENS)) as url:
            yield {"base_url": url, "timeout": 60}


class TestUnit(_Declarations, ChatModelUnitTests):
    """Nothing is generated here."""


class TestIntegration(_Declarations, ChatModelIntegrationTests):
    """Every way of asking, on the real model."""


class TestRemoteUnit(_Remote, ChatModelUnitTests):
    """Nothing is asked here."""


class TestRemoteIntegration(_Remote, ChatModelIntegrationTests):
    """Every way of asking, over HTTP."""


def test_every_capability_is_declared_or_listed() -> None:
    off = (__doc__ or "").split("switched off:")[1]
    prefixes = ("has_", "supports_", "returns_", "enable_", "supported_")
    for name in {name for name in dir(ChatModelTests) if name.startswith(prefixes)} - {*vars(_Declarations)}:
        assert f"``{name}``" in off


def test_there_is_no_suite_for_text_models() -> None:
    suites = [name for module in (unit_tests, integration_tests) for name in module.__all__]
    assert not [name for name in suites if "LLM" in name or "Language" in name]
