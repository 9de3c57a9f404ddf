"""What importing the adapter brings in."""

from __future__ import annotations

import subprocess
import sys


def test_needs_neither_langchain_nor_opentelemetry() -> None:
    code = (
        "import sys, cocoa_integrations.llama_index\n"
        "foreign = ('langchain', 'langchain_core', 'opentelemetry', 'cocoa_integrations.langchain')\n"
        "sys.exit(', '.join(name for name in foreign if name in sys.modules) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
