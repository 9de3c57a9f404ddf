"""Clients in JavaScript: npm's ``openai``, and ``ai`` with ``@ai-sdk/openai-compatible``, streaming with tools."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.conformance.tools import INSTALL, SuiteError, Tools, run, served

PACKAGES = ("openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")
SCRIPT = Path(__file__).parent / "clients.mjs"


def run_npm(tools: Tools) -> str:
    """Run the script of the clients."""
    if shutil.which("node") is None:
        raise SuiteError("node is not installed")
    folder = tools.folder / "npm"
    folder.mkdir(exist_ok=True)
    if not (folder / "node_modules").is_dir():
        run(["npm", "install", "--no-audit", "--no-fund", *PACKAGES], limit=INSTALL, cwd=folder)
    shutil.copy(SCRIPT, folder / SCRIPT.name)
    with served() as address:
        output = run(["node", SCRIPT.name, f"{address}/v1"], limit=300, cwd=folder)
    return output.strip().splitlines()[-1]
