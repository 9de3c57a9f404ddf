"""Neither the engine nor one adapter imports a framework it does not need."""

from __future__ import annotations

import pytest

from tests.helpers.processes import python

pytestmark = pytest.mark.slow

PROGRAM = """
import sys

def loaded(*names):
    return sorted(module for module in sys.modules if module.partition(".")[0] in names)

import cocoa_engine.engine
assert not loaded("langchain_core", "langchain", "llama_index"), loaded("langchain_core", "langchain", "llama_index")
import cocoa_integrations.langchain
optional = ("llama_index", "langchain", "langgraph")
assert not loaded(*optional), loaded(*optional)
assert all(hasattr(cocoa_integrations.langchain, name) for name in cocoa_integrations.langchain.__all__)
assert not loaded(*optional), loaded(*optional)
assert cocoa_integrations.langchain.RiskMiddleware.__module__ == "cocoa_integrations.langchain.agents"
assert loaded("langchain")
"""


def test_imports_are_kept_apart() -> None:
    assert python(PROGRAM) == ""
