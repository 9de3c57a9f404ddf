"""LangChain's own standard tests on the chat model of a server, with the real model.

What is declared for :class:`ChatCocoa` is declared here too, and ``supports_model_override``: a server can have several
names. For the reasons that ``test_langchain_standard`` gives, images, PDF, audio, video and recorded HTTP traffic are
not. ``_LEFT_OUT`` has the tests that take long and show nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa
from tests.helpers.langchain_standard import Declarations
from tests.helpers.reasoning_models import OPENS
from tests.helpers.remote import serving
from tests.helpers.served import speaker

pytestmark = pytest.mark.slow

_LONG = {
    "tool": {"max_tokens": 64, "span_log_prob": "sum"},
    "agent": {"max_tokens": 64},
    "structured": {"max_tokens": 64, "repetition_penalty": 1.3},
    "standard_params": {},
}
"""By a part of a test's name: where an answer must be complete, its settings. A few tokens will do elsewhere."""

_LEFT_OUT = {
    "test_unicode_tool_call_integration": "what the model writes into arguments is the same with and without a server",
    "test_json_mode": "the same request as that of json_schema, with another schema",
    "test_structured_output": "in test_langchain_remote",
    "test_structured_output_async": "in test_langchain_remote",
    "test_structured_output_pydantic_2_v1": "the classes are made in this process",
    "test_structured_output_optional_param": "schemas are converted in this process",
    "test_anthropic_inputs": "messages are converted by the code of ChatCocoa",
}
"""Tests that are not run, with the reasons."""


class _Declarations(Declarations):
    """What is tested. The suites read properties, so the address is put on the class."""

    _url: str
    _thinking_url: str
    _options: dict[str, Any]

    @pytest.fixture(scope="class")
    def url(self, engine: CocoaEngine) -> Iterator[str]:
        with serving(engine, served_names=("cocoa", "another-name")) as url:
            yield url

    @pytest.fixture(scope="class")
    def thinking_url(self) -> Iterator[str]:
        with serving(speaker("Well.</think>Hello!", template=OPENS)) as url:
            yield url

    @pytest.fixture(autouse=True)
    def _use_server(self, url: str, thinking_url: str, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        if name in _LEFT_OUT:
            pytest.skip(_LEFT_OUT[name])
        type(self)._url, type(self)._thinking_url = url, thinking_url
        type(self)._options = next((options for part, options in _LONG.items() if part in name), {"max_tokens": 6})

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # the small model calls no tool that it is not told to
        return {"base_url": self._url, "timeout": 60, "initial_tool_choice": "any", **self._options}

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "another-name"

    def thinker(self) -> ChatCocoa:
        return ChatCocoa(base_url=self._thinking_url, timeout=60)


class TestUnit(_Declarations, ChatModelUnitTests):
    """Nothing is generated here."""


class TestIntegration(_Declarations, ChatModelIntegrationTests):
    """Every way of asking, on the real model."""
