"""LangChain's own standard tests, on the real model.

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

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests import integration_tests, unit_tests
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from langchain_tests.unit_tests.chat_models import ChatModelTests

from cocoa_engine import CocoaConfig, CocoaEngine
from cocoa_integrations.langchain import ChatCocoa
from tests.helpers.langchain_standard import Declarations
from tests.helpers.reasoning_models import reasoning_engine, saying

pytestmark = pytest.mark.slow

_SHORT = CocoaConfig(max_new_tokens=6)
_CONFIGS = {
    "tool": CocoaConfig(max_new_tokens=64, span_log_prob="sum"),
    "agent": CocoaConfig(max_new_tokens=64),
    "structured": CocoaConfig(max_new_tokens=64, repetition_penalty=1.3),  # or its jokes have no end
    "json_mode": CocoaConfig(max_new_tokens=64, repetition_penalty=1.3),
}
"""By a part of a test's name: where an answer must be complete. A few tokens will do elsewhere."""


class _Declarations(Declarations):
    """What is tested. The suites read properties, so the engine is put on the class."""

    _engine: CocoaEngine
    _config: CocoaConfig

    @pytest.fixture(autouse=True)
    def _use_engine(self, engine: CocoaEngine, request: pytest.FixtureRequest) -> None:
        name = request.node.name
        type(self)._engine = engine
        type(self)._config = next((config for part, config in _CONFIGS.items() if part in name), _SHORT)

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # the small model calls no tool that it is not told to
        return {"engine": self._engine, "config": self._config, "initial_tool_choice": "any"}

    @property
    def supports_model_override(self) -> bool:
        return False

    def thinker(self) -> ChatCocoa:
        engine = reasoning_engine()
        return ChatCocoa(engine=engine, **saying(engine, "Well.</think>Hello!"))


class TestUnit(_Declarations, ChatModelUnitTests):
    """Nothing is generated here."""


class TestIntegration(_Declarations, ChatModelIntegrationTests):
    """Every way of asking, on the real model."""


def test_every_capability_is_declared_or_listed() -> None:
    off = (__doc__ or "").split("switched off:")[1]
    known = {
        name
        for name in dir(ChatModelTests)
        if name.startswith(("has_", "supports_", "returns_", "enable_", "supported_"))
    }
    declared = {name for name in known if name in {**vars(Declarations), **vars(_Declarations)}}
    for name in known - declared:
        assert f"``{name}``" in off


def test_there_is_no_suite_for_text_models() -> None:
    suites = [name for module in (unit_tests, integration_tests) for name in module.__all__]
    assert not [name for name in suites if "LLM" in name or "Language" in name]
