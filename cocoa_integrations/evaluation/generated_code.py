"""The code in answers to the MBPP prompt, which asks for code between ``[PYTHON]`` and ``[/PYTHON]``, and its tests."""

import ast
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import chain, combinations, islice
from json import dumps
from textwrap import dedent
from typing import Any

from cocoa_engine.errors import ConfigError

_FENCE = re.compile(r"[ \t]*```+[^`]*")  # a whole line, with or without the name of a language
_MAX_PARTS = 500  # of one answer: a model that repeats itself writes hundreds of fences
SECONDS = 10.0
_MEMORY = 512 * 2**20  # bytes of address space
_RUN = """
import contextlib, json, os, resource, sys
memory, passed, sources = json.load(sys.stdin)
with contextlib.suppress(OSError, ValueError):  # macOS has no limit of the address space
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
names = {"__name__": "__generated__"}
for source in sources:
    exec(compile(source, "<generated>", "exec"), names)
os._exit(passed)
"""  # the status of success is drawn at random, so that code which ends early does not pass
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.Import, ast.ImportFrom)


def code_of(answer: str) -> str:
    """The code in an answer, up to the closing tag, without Markdown fences and the text around them.

    The prompt ends with the opening tag, so an answer often begins with code that ends at a fence. The candidates are
    the complete text, the text before each fence, and the text between two fences or after the last. The first
    candidate that is valid Python is returned, so a fence inside a docstring does not end the code. If none is valid,
    the result is the block of the first fence, or the complete text.
    """
    text = re.split(r"\[/PYTHON\]", answer, maxsplit=1, flags=re.IGNORECASE)[0]
    lines = re.sub(r"\[PYTHON\]", "\n```\n", text, flags=re.IGNORECASE).split("\n")
    fences = [number for number, line in enumerate(lines) if _FENCE.fullmatch(line)]
    ends = chain([(-1, len(lines))], combinations((-1, *fences, len(lines)), 2))

    def joined(start: int, end: int | None) -> str:
        return dedent("\n".join(lines[start:end])).strip("\n")

    code = next(filter(_is_code, (joined(before + 1, end) for before, end in islice(ends, _MAX_PARTS))), None)
    if code is not None or not fences:
        return code or joined(0, None)
    return joined(fences[0] + 1, fences[1] if len(fences) > 1 else None)


def passes(code: str, tests: Sequence[str], *, seconds: float = SECONDS, confirm_run_unsafe_code: bool = False) -> bool:
    """Whether code passes its tests. Both run in one process, which sees Python's standard library only.

    Where bubblewrap works, the process has no network, no other processes, and no files but those of Python, read-only.
    ``seconds`` limits both together (wall clock). ``confirm_run_unsafe_code`` runs them also where bubblewrap does not
    work, with nothing but the limits of time and memory.

    Raises:
        ConfigError: bubblewrap does not work, and ``confirm_run_unsafe_code`` was not given.
    """
    require_confinement(confirm_run_unsafe_code)
    passed = 64 + secrets.randbelow(64)
    python = [sys.executable, "-I", "-S", "-B", "-c", _RUN]
    command = [*_bubblewrap(), *python] if confines() else python
    quiet: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (
        tempfile.TemporaryDirectory(prefix="cocoa-code-", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(command, cwd=folder, env={}, start_new_session=True, **quiet) as process,
    ):
        try:
            process.communicate(dumps([_MEMORY, passed, [code, *tests]]).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the processes that it started, too
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode == passed


def require_confinement(confirm_run_unsafe_code: bool) -> None:
    """Raise a ConfigError where bubblewrap does not work, unless ``confirm_run_unsafe_code``, or without POSIX."""
    if os.name != "posix":
        raise ConfigError("running generated code needs Linux or macOS")
    if not (confirm_run_unsafe_code or confines()):
        raise ConfigError(
            "mbpp runs the code that the model writes, and nothing confines it here: install bubblewrap (bwrap), or on "
            "a disposable machine allow it with --confirm-run-unsafe-code (confirm_run_unsafe_code=True)"
        )


@cache
def confines() -> bool:
    """Whether bubblewrap is installed and may make namespaces here."""
    try:
        command = [*_bubblewrap(), sys.executable, "-I", "-S", "-c", ""]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _bubblewrap() -> list[str]:
    """The start of a command that runs without network, other processes, and files but those of Python, read-only."""
    seen = dict.fromkeys(("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix, sys.prefix))
    return [
        shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534",
        "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv",
        *(part for path in seen for part in ("--ro-bind-try", path, path)), "--dev", "/dev", "--chdir", "/",
    ]  # fmt: skip


def _is_code(text: str) -> bool:
    """Whether it is Python that defines something. One or two English words are also valid Python expressions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, a null byte, nested too deeply (both)
        return False
    return any(isinstance(statement, _DEFINES) for statement in ast.walk(tree))
