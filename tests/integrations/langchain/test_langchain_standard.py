"""LangChain's own standard tests, on the real model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_integrations.langchain import ChatCocoa

pytestmark = pytest.mark.slow

_SHORT = CocoaConfig(max_new_tokens=6)
_CONFIGS = {
    "tool": CocoaConfig(max_new_tokens=64),
    "agent": CocoaConfig(max_new_tokens=64),
    "structured": CocoaConfig(max_new_tokens=64, repetition_penalty=1.3),  # or its jokes have no end
    "json_mode": CocoaConfig(max_new_tokens=64, repetition_penalty=1.3),
}
"""By a part of a test's name: where an answer must be complete. A few tokens will do elsewhere."""


class _Declarations:
    """What is tested. The suites read properties, so the engine is put on the class."""

    _engine: CocoaEngine
    _config: CocoaConfig

    @pytest.fixture(autouse=True)
    def _use_engine(self, engine: CocoaEngine, request: pytest.FixtureRequest) -> None:
        name = request.node.name
        type(self)._engine = engine
        type(self)._config = next((config for part, config in _CONFIGS.items() if part in name), _SHORT)

    @property
    def chat_model_class(self) -> type[ChatCocoa]:
        return ChatCocoa

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # the small model calls no tool that it is not told to
        return {"engine": self._engine, "config": self._config, "initial_tool_choice": "any"}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestUnit(_Declarations, ChatModelUnitTests):
    """Nothing is generated here."""


class TestIntegration(_Declarations, ChatModelIntegrationTests):
    """Every way of asking, on the real model."""
