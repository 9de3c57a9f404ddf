"""Neither the engine nor one adapter imports a framework that it does not need."""

from __future__ import annotations

import pytest

from tests.helpers.processes import python

pytestmark = pytest.mark.slow

LOADED = """
import sys

def loaded(*names):
    return sorted(module for module in sys.modules if module.partition(".")[0] in names)
"""
LANGCHAIN = """
import cocoa_engine.engine
assert not loaded("langchain_core", "langchain", "llama_index"), loaded("langchain_core", "langchain", "llama_index")
import cocoa_integrations.langchain
assert all(hasattr(cocoa_integrations.langchain, name) for name in cocoa_integrations.langchain.__all__)
optional = ("llama_index", "langchain", "langgraph")
assert not loaded(*optional), loaded(*optional)
assert cocoa_integrations.langchain.RiskMiddleware.__module__ == "cocoa_integrations.langchain.agents"
assert loaded("langchain")
"""
LLAMA_INDEX = """
import llama_index.core
from transformers import GenerationMixin
before = set(sys.modules)  # older versions import OpenTelemetry themselves
import cocoa_integrations.llama_index
foreign = {*loaded("langchain", "langchain_core", "opentelemetry"), "cocoa_integrations.langchain"}
assert not foreign & (set(sys.modules) - before), foreign
"""


@pytest.mark.parametrize("program", [LANGCHAIN, LLAMA_INDEX], ids=["langchain", "llama_index"])
def test_imports_are_kept_apart(program: str) -> None:
    assert python(LOADED + program) == ""
