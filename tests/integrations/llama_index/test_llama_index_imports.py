"""What importing the adapter brings in."""

from __future__ import annotations

import pytest

from tests.helpers.processes import python

pytestmark = pytest.mark.slow


def test_needs_neither_langchain_nor_opentelemetry() -> None:
    code = (
        "import sys, llama_index.core\n"
        "from transformers import GenerationMixin\n"
        "before = set(sys.modules)\n"  # older versions import OpenTelemetry themselves
        "import cocoa_integrations.llama_index\n"
        "foreign = ('langchain', 'langchain_core', 'opentelemetry', 'cocoa_integrations.langchain')\n"
        "print([name for name in foreign if name in set(sys.modules) - before])"
    )
    assert python(code).strip() == "[]"
