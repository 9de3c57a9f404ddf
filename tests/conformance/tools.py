"""What the suites share: a server of their own, the sources of packages, and runs of pytest."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tomllib

from tests.helpers.in_threads import wait_until
from tests.helpers.processes import free_port
from tests.helpers.server_process import serves

ROOT = Path(__file__).parents[2]
OMITTED = tomllib.loads((Path(__file__).parent / "omitted.toml").read_text(encoding="utf-8"))
"""By suite: what is left out, with the reason."""

SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "openai": ("3.54.0", ()),
    "llama-cpp-python": ("0.3.36", ("/vendor/llama.cpp/tools/server/tests/", "/vendor/llama.cpp/models/")),
    "jsonschema": ("4.26.0", ("/json/tests/", "/json/remotes/")),
}
"""By package: the version of its source distribution, and the parts of paths that are unpacked (default: all)."""

START = 120
"""Seconds for the server to load its model."""
INSTALL = 600
"""Seconds for a download or an installation."""


def source_if_there(name: str) -> Path:
    """The source distribution that ``make conformance`` unpacked. A test that needs it is skipped without it."""
    folder = ROOT / ".venv-conformance" / "work" / f"{name.replace('-', '_')}-{SOURCES[name][0]}"
    if not folder.is_dir():
        pytest.skip(f"`make conformance` unpacks the sources of {name}", allow_module_level=True)
    return folder


class SuiteError(Exception):
    """A suite could not be run, or something in it failed."""


@dataclass(frozen=True)
class Tools:
    """The folder of what is downloaded and written, and the interpreter with the suites' packages."""

    folder: Path
    python: str

    def source(self, name: str) -> Path:
        """The unpacked source distribution of a package in ``SOURCES``."""
        version, members = SOURCES[name]
        unpacked = self.folder / f"{name.replace('-', '_')}-{version}"
        if not unpacked.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            pip = [self.python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name, f"{name}=={version}"]
            subprocess.run(pip, cwd=self.folder, check=True, timeout=INSTALL)
            [archive] = self.folder.glob(f"{unpacked.name}*.tar.gz")
            with tarfile.open(archive) as tar:
                chosen = [one for one in tar if not members or any(part in one.name for part in members)]
                tar.extractall(self.folder, chosen, filter="data")
            archive.unlink()
        return unpacked

    def pytest(self, suite: str, folder: Path, *args: str, only: str = "", limit: int = 900, **environment: str) -> str:
        """Run tests that ``only`` chooses, without those that the list omits for a suite, and return their counts."""
        left_out = " or ".join(f"({one})" for one in OMITTED.get(suite, {}))
        chosen = " and ".join(filter(None, [only and f"({only})", left_out and f"not ({left_out})"]))
        report = self.folder / f"{suite}.xml"
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", *args]
        result = subprocess.run(
            [*command, "-k", chosen, f"--junitxml={report}", "--tb=short"],
            cwd=folder,
            env={**os.environ, **environment, "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=limit,
            check=False,
        )
        counts = counts_of(report) if report.is_file() else {"tests": 0}
        if result.returncode or not counts["tests"]:
            raise SuiteError(f"pytest ended with {result.returncode}: {counts}")
        return f"{counts['tests'] - counts['skipped']} passed, {counts['skipped']} skipped"


def counts_of(report: Path) -> dict[str, int]:
    """The numbers of tests in a report of pytest, by outcome."""
    suites = list(ElementTree.parse(report).iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    return {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}


@contextmanager
def served(*options: str, max_new_tokens: int = 24) -> Iterator[str]:
    """The address, without a path, of a server in a process of its own, which ends with the block.

    Requests that name no limit get few tokens: no suite waits for long answers.
    """
    port = free_port()
    command = [sys.executable, "-m", "cocoa_engine.cli", "serve", f"--port={port}", "--dtype=float32", *options]
    command += [f"--max-new-tokens={max_new_tokens}", "--shutdown-timeout=0"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or serves(address), START, pause=0.25)
        if process.poll() is not None:
            raise SuiteError(f"the server ended with {process.returncode}")
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def run(command: Sequence[str], *, limit: int, cwd: Path) -> str:
    """Run a command and return its output, or raise an error with the end of it."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    result = subprocess.run(command, cwd=cwd, timeout=limit, check=False, **streams)
    if result.returncode:
        raise SuiteError(f"{command[0]} ended with {result.returncode}:\n{result.stdout[-6000:]}")
    return result.stdout
