"""What generated code cannot do, and what it can."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from cocoa_integrations.evaluation.sandbox import run_code

pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits need POSIX")


def test_right_code_passes_and_wrong_code_fails() -> None:
    code = "import math\ndef area(r):\n    print('noise' * 1000)\n    return math.pi * r * r"
    assert run_code(code, ["assert round(area(1), 2) == 3.14", "assert area(0) == 0"]).passed
    verdict = run_code(code, ["assert area(1) == 3"])
    assert verdict == (False, "AssertionError")
    assert "SyntaxError" in run_code("def", ["pass"]).reason
    assert "NameError" in run_code("", ["assert area(1)"]).reason


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit()"])
def test_leaving_early_is_no_pass(code: str) -> None:
    assert not run_code(code, ["assert False"]).passed


@pytest.mark.slow
def test_infinite_loop_is_ended() -> None:
    start = time.monotonic()
    verdict = run_code("while True:\n    pass", [], seconds=1.5)
    assert not verdict.passed
    assert "time-out" in verdict.reason
    assert time.monotonic() - start < 10


def test_sleeping_is_ended() -> None:
    assert "time-out" in run_code("import time\ntime.sleep(60)", [], seconds=1.0).reason


def test_memory_is_limited() -> None:
    verdict = run_code("x = bytearray(2 * 2**30)", [], memory_mb=256)
    assert verdict == (False, "MemoryError")
    assert run_code("x = bytearray(32 * 2**20)", [], memory_mb=256).passed


def test_no_network() -> None:
    with socket.socket() as server:  # there is somebody to connect to
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        verdict = run_code(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)", [])
        assert not verdict.passed
        assert "PermissionError" in verdict.reason
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_files_are_written(tmp_path: Path) -> None:
    victim = tmp_path / "kept.txt"
    victim.write_text("as it was")
    attempts = [
        f"open({str(victim)!r}, 'w').write('gone')",
        f"open({str(tmp_path / 'new.txt')!r}, 'x')",
        f"import os\nos.close(os.open({str(tmp_path / 'new.txt')!r}, os.O_CREAT | os.O_WRONLY))",
        f"import os\nos.remove({str(victim)!r})",
        f"import os\nos.rename({str(victim)!r}, {str(tmp_path / 'new.txt')!r})",
        f"import pathlib\npathlib.Path({str(victim)!r}).unlink()",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        "open('here.txt', 'w')",
    ]
    for attempt in attempts:
        verdict = run_code(attempt, [])
        assert not verdict.passed, attempt
        assert "PermissionError" in verdict.reason, attempt
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert victim.read_text() == "as it was"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.system('true')",
        f"import subprocess\nsubprocess.run([{sys.executable!r}, '-c', 'pass'])",
        "import os\nos.fork()",
        "import os\nos.kill(os.getppid(), 9)",
        "import _posixsubprocess\n_posixsubprocess.fork_exec(*range(21))",
        f"import os\nos.execv({sys.executable!r}, [{sys.executable!r}, '-c', 'pass'])",
    ],
)
def test_no_other_processes(code: str) -> None:
    verdict = run_code(code, [])
    assert not verdict.passed
    assert "PermissionError" in verdict.reason


@pytest.mark.parametrize(
    "code",
    [
        "import ctypes\nctypes.CDLL(None).getpid()",
        "import _ctypes",
        "import sys\ndel sys.modules['_posixsubprocess']\nimport _posixsubprocess",
        "import sys, _imp\nfrom importlib.machinery import ModuleSpec\n"
        "spec = ModuleSpec('a._posixsubprocess', None, origin='/x.so')\n_imp.create_dynamic(spec)",
    ],
)
def test_no_native_code(code: str) -> None:
    verdict = run_code(code, [])
    assert verdict.reason.startswith("ImportError: generated code may not import"), verdict


def test_modules_that_import_others_are_there() -> None:
    assert run_code(
        "import asyncio, doctest, heapq, math, re, statistics, subprocess, typing, unittest, uuid", []
    ).passed


_FRAMES = """
import os, re, sys
def frames():
    frame = sys._getframe(1)
    while frame:
        yield frame
        frame = frame.f_back
def texts(value, depth=4):
    if isinstance(value, (str, bytes)):
        yield value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    elif depth and isinstance(value, dict):
        for one in list(value.values()):
            yield from texts(one, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for one in list(value):
            yield from texts(one, depth - 1)
found = [text for frame in frames() for text in texts({**frame.f_locals, **frame.f_globals})]
for file in range(1, 32):
    for text in {text for text in found if re.fullmatch(b"[0-9a-f]{32}", text)}:
        try:
            os.write(file, text)
        except OSError:
            break
os._exit(0)
"""


@pytest.mark.parametrize(
    "code",
    [
        _FRAMES,
        "import gc, os\nfor text in gc.get_objects(): os.write(3, str(text).encode())",
        "import sys\nframe = sys._getframe(1)\nwhile frame:\n    for value in frame.f_locals.values():\n"
        "        getattr(value, 'clear', int)()\n    frame = frame.f_back",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *_: None",
        "import json, os\nos.write = json.loads = lambda *_: None",
        "import sys\nsys.modules['__main__']._steps = lambda *_: ()",
        "import os\nos._exit = lambda *_: None",
    ],
)
def test_code_does_not_pass_without_its_tests(code: str) -> None:
    assert not run_code(code, ["assert False"]).passed


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.modules['__main__']._refuse.__code__ = (lambda *_: None).__code__",
        "import sys\nsys.modules['__main__']._REFUSED = sys.modules['__main__']._NOT_IMPORTED = ()",
        "import builtins\nbuiltins.isinstance = lambda *_: False\nbuiltins.set = lambda *_: frozenset()",
        "import builtins\nbuiltins.PermissionError = lambda *_: Warning()",
    ],
)
def test_the_hook_stays(code: str, tmp_path: Path) -> None:
    file = tmp_path / "new.txt"
    before = "\n".join(f"    {line}" for line in code.split("\n"))
    run_code(f"try:\n{before}\nfinally:\n    open({str(file)!r}, 'w')", [])
    assert not file.exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a Python that every user can read")
def test_root_becomes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    code = "import os, decimal\nids = (os.getuid(), os.geteuid(), os.getgid(), os.getegid(), os.getgroups())"
    assert run_code(code, ["assert ids == (65534, 65534, 65534, 65534, []), ids"]) == (True, "passed")
    assert not run_code("import threading\nthreading.Thread(target=print).start()", []).passed  # the kernel's limit


def test_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert run_code("import os", ["assert 'SECRET_TOKEN' not in os.environ"]).passed
    assert run_code("import sys", ["assert not any('site-packages' in path for path in sys.path)"]).passed
