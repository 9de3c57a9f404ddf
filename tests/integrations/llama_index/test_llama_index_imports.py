"""What importing the adapter brings in."""

from __future__ import annotations

import pytest

from tests.helpers.processes import python

pytestmark = pytest.mark.slow


def test_needs_neither_langchain_nor_opentelemetry() -> None:
    code = (
        "import sys, cocoa_integrations.llama_index\n"
        "foreign = ('langchain', 'langchain_core', 'opentelemetry', 'cocoa_integrations.langchain')\n"
        "print([name for name in foreign if name in sys.modules])"
    )
    assert python(code).strip() == "[]"
