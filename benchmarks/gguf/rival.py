"""llama.cpp in a process of its own, as a competitor."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from benchmarks.measure import Prompts
from cocoa_engine.lab.timing import Turn

WORKER = Path(__file__).with_name("llama_cpp_worker.py")
SLOTS = 2048


class LlamaCpp:
    """Greedy decoding by llama.cpp. A turn's time is what the worker measured, without the pipe.

    Attributes:
        about: version and build of llama.cpp.
    """

    def __init__(self, process: subprocess.Popen[str], tokens: int) -> None:
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout
        self.tokens = tokens
        self.about: dict[str, Any] = self._read()

    def __call__(self, prompts: Prompts) -> Turn:
        [prompt] = prompts
        self._stdin.write(json.dumps({"prompt": list(prompt), "tokens": self.tokens}) + "\n")
        self._stdin.flush()
        answer = self._read()
        return Turn(answer["prompt_seconds"] + answer["other_seconds"], len(answer["ids"]))

    def _read(self) -> dict[str, Any]:
        line = self._stdout.readline()
        if not line:
            raise RuntimeError("llama.cpp's process has ended; it says why above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def llama_cpp(python: Path, file: Path, threads: int, tokens: int) -> Iterator[LlamaCpp]:
    """Start the worker.

    Args:
        python: the interpreter of an environment with llama-cpp-python.
        file: the model.
        threads: its threads.
        tokens: maximum number of new tokens.
    """
    command = [str(python), str(WORKER), str(file), str(threads), str(SLOTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield LlamaCpp(process, tokens)
        finally:
            process.kill()
