"""LangChain's own standard tests, on the real model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_integrations.langchain import ChatCocoa


class _Declarations:
    """What is tested, and what it does not do. The suites read properties, so the engine is put on the class."""

    _engine: CocoaEngine

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _use_engine(cls, engine: CocoaEngine) -> None:
        short = CocoaConfig(max_new_tokens=6)
        cls._engine = CocoaEngine(engine.model, engine.tokenizer, config=short, model_name=engine.model_name)

    @property
    def chat_model_class(self) -> type[ChatCocoa]:
        return ChatCocoa

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self._engine}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestUnit(_Declarations, ChatModelUnitTests):
    """Nothing is generated here."""


class TestIntegration(_Declarations, ChatModelIntegrationTests):
    """Every way of asking, on the real model."""
