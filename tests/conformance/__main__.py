"""``python -m tests.conformance [SUITE ...]``: run suites, each against a server of its own.

A suite is a function that returns what passed in a few words.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.conformance import harmony, harness, json_schema, llama_cpp_files, tool_calls
from tests.conformance.tools import INSTALL, ROOT, SuiteError, Tools, run, served

OPENAI_NAMES = ("SmolLM2-135M-Instruct", "gpt-6-astra", "gpt-3.5-turbo-instruct")
"""The names of models in openai-python's tests. They ask for the first by its name."""

LLAMA_CPP_FILES = ("test_chat_completion.py", "test_tool_call.py", "test_basic.py")
LLAMA_CPP_TESTS = (
    "response_format or invalid_chat or multiple_choices or logprobs or context_size or mutual_exclusion "
    "or json_schema or test_completion_without_tool_call_fast or server_start_simple or server_models"
)
LLAMA_CPP_KEY = "sk-this-is-the-secret-key"

LITELLM_CHECKS = "litellm_checks.py"
NPM_PACKAGES = ("openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")
NPM_SCRIPT = "clients.mjs"
SCHEMATHESIS_SECONDS = 300  # for all routes together


def openai_python(tools: Tools) -> str:
    """openai-python's own tests of chat, completions and models, with strict validation of responses."""
    source = tools.source("openai")
    folder = source / "tests" / "api_resources"
    with served(*(f"--served-model-name={name}" for name in OPENAI_NAMES), max_new_tokens=8) as address:
        return tools.pytest(
            "openai-python",
            source,
            *(str(folder / name) for name in ("chat/test_completions.py", "test_completions.py", "test_models.py")),
            *("-o", "addopts=", "-o", "xfail_strict=false"),
            TEST_API_BASE_URL=f"{address}/v1",
        )


def llama_cpp(tools: Tools) -> str:
    """llama.cpp's tests of its server, as far as they test OpenAI's protocol."""
    folder = tools.source("llama-cpp-python")
    folder = folder / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    of_suite = partial(tools.pytest, "llama-cpp", folder, DEBUG_EXTERNAL="1")
    with served() as address:
        files = [f"unit/{name}" for name in LLAMA_CPP_FILES]
        open_ = of_suite(*files, only=LLAMA_CPP_TESTS, PORT=address.rpartition(":")[2])
    with served(f"--api-key={LLAMA_CPP_KEY}") as address:
        keys = of_suite("unit/test_security.py", PORT=address.rpartition(":")[2])
    return f"{open_}; with a key: {keys}"


def schemathesis(tools: Tools) -> str:
    """Requests made up from the OpenAPI document: none of them makes the server fail."""
    schemathesis = str(Path(tools.python).with_name("schemathesis"))
    with served("--max-answer-tokens=64", max_new_tokens=2) as address:
        command = [schemathesis, "run", f"{address}/openapi.json", "--checks", "not_a_server_error", "--no-color"]
        limits = ["--max-time", str(SCHEMATHESIS_SECONDS), "--request-timeout", "60"]
        begun = time.monotonic()
        output = run([*command, *limits], limit=SCHEMATHESIS_SECONDS + 240, cwd=tools.folder)
        if time.monotonic() - begun < SCHEMATHESIS_SECONDS:  # it repeats its rounds until the time is over
            raise SuiteError(f"schemathesis ended before its time:\n{output[-2000:]}")
    return output.partition("Test cases:\n")[2].partition("\n")[0].strip()


def litellm(tools: Tools) -> str:
    folder = tools.folder / "litellm"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent / LITELLM_CHECKS, folder)  # away from the project's own tests and their settings
    with served() as address:
        settings = {"COCOA_URL": f"{address}/v1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return tools.pytest("litellm", folder, LITELLM_CHECKS, "--rootdir", ".", "-c", "/dev/null", **settings)


def npm(tools: Tools) -> str:
    """Clients in JavaScript: npm's ``openai``, and ``ai`` with ``@ai-sdk/openai-compatible``, streaming with tools."""
    if shutil.which("node") is None:
        raise SuiteError("node is not installed")
    folder = tools.folder / "npm"
    folder.mkdir(exist_ok=True)
    if not (folder / "node_modules").is_dir():
        run(["npm", "install", "--no-audit", "--no-fund", *NPM_PACKAGES], limit=INSTALL, cwd=folder)
    shutil.copy(Path(__file__).parent / NPM_SCRIPT, folder)
    with served() as address:
        output = run(["node", NPM_SCRIPT, f"{address}/v1"], limit=300, cwd=folder)
    return output.strip().splitlines()[-1]


SUITES: dict[str, Callable[[Tools], str]] = {
    "openai-python": openai_python,
    "llama-cpp": llama_cpp,
    "schemathesis": schemathesis,
    "lm-eval": harness.run_harness,
    "litellm": litellm,
    "npm": npm,
    "json-schema": json_schema.run_json_schema,
    "templates": llama_cpp_files.run_templates,
    "tool-calls": tool_calls.run_tool_calls,
    "harmony": harmony.run_harmony,
    "vocabularies": llama_cpp_files.run_vocabularies,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Suites that others wrote, against this server.")
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="default: all")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-conformance", help="with requirements.txt")
    given = parser.parse_args()
    environment = given.environment.absolute()
    tools = Tools(folder=environment / "work", python=str(environment / "bin" / "python"))
    tools.folder.mkdir(parents=True, exist_ok=True)
    lines, failed = [], False
    for name in given.suites or SUITES:
        begun = time.monotonic()
        try:
            outcome = SUITES[name](tools)
        except (SuiteError, AssertionError, subprocess.SubprocessError) as error:
            outcome, failed = f"FAILED: {error}", True
        lines.append(f"{name}: {outcome} ({time.monotonic() - begun:.0f} s)")
        print(lines[-1], flush=True)
    print("\n".join(["", *lines]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
