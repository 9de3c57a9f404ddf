"""What generated code cannot do, and what it can."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import pytest

from cocoa_engine.errors import ConfigError
from cocoa_integrations.evaluation.sandbox import require_confinement, run_code, runner


def _unconfined() -> str:
    """Why no process can be confined here; empty if it can."""
    try:
        require_confinement()
    except ConfigError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_unconfined()), reason=_unconfined())


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


@pytest.mark.slow
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
        "import os\nos.system('true') == 0 or os.fork()",
        f"import subprocess\nsubprocess.run([{sys.executable!r}, '-c', 'pass'])",
        "import os\nos.fork()",
        "import os\nos.kill(os.getppid(), 0)",
        "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
        "import _posixsubprocess\n_posixsubprocess.fork_exec(*range(21))",
        f"import os\nos.execv({sys.executable!r}, [{sys.executable!r}, '-c', 'pass'])",
        "import threading\nthreading.Thread(target=print).start()",
    ],
)
def test_no_other_processes(code: str) -> None:
    verdict = run_code(code, [])
    assert not verdict.passed
    assert re.match("PermissionError|TypeError|RuntimeError: can't start new thread", verdict.reason), verdict


_CALLS = """
import ctypes, errno
system = ctypes.CDLL(None, use_errno=True)
def refused(name, *args):
    ctypes.set_errno(0)
    return getattr(system, name)(*args) == -1 and ctypes.get_errno() == errno.EPERM
"""


@pytest.mark.parametrize(
    "call",
    [
        "'fork'",
        "'open', b'/etc/passwd', 0",
        "'socket', 1, 1, 0",
        "'kill', system.getppid(), 0",
        "'mknod', b'/tmp/x', 0o010600, 0",
        "'ptrace', 0, 0, 0, 0",
        "'setuid', 0",
        "'memfd_create', b'x', 0",
        "'prctl', 4, 1, 0, 0, 0",
        "'mprotect', ctypes.c_void_p(0x10000), 4096, 7",
    ],
)
def test_native_code_is_confined_too(call: str) -> None:
    assert run_code(f"{_CALLS}\ndef attempt(): return refused({call})", ["assert attempt() is True"]) == (
        True,
        "passed",
    )


def test_no_native_module_is_loaded() -> None:
    """Also under a name that is a text with methods of its own."""
    origin = next(
        spec.origin
        for name in ("_posixshmem", "_sqlite3", "_testcapi", "_dbm", "_tkinter")
        if (spec := find_spec(name)) and spec.origin and spec.origin.endswith(".so")
    )
    name = Path(origin).name.partition(".")[0]
    code = f"""
import _imp
from importlib.machinery import ModuleSpec
class Name(str):
    def rpartition(self, separator):
        return "", "", "math"
spec = ModuleSpec("x", None, origin={origin!r})
spec.name = Name({name!r})
_imp.create_dynamic(spec)
"""
    verdict = run_code(code, [])
    assert not verdict.passed
    assert verdict.reason.startswith("ImportError"), verdict


def test_no_file_is_read(tmp_path: Path) -> None:
    """Least of all the environment of this process, which may have keys in it."""
    (tmp_path / "file.txt").write_text("text")
    for file in ("/proc/' + str(os.getppid()) + '/environ", "/proc/self/mem", str(tmp_path / "file.txt")):
        verdict = run_code(f"import os\nopen('{file}', 'rb').read(0)", [])
        assert not verdict.passed, file
        assert verdict.reason.startswith("PermissionError"), verdict


@pytest.mark.parametrize("call", ["mkfifo({!r})", "mknod({!r})", "mkdir({!r})", "symlink('/', {!r})"])
def test_no_node_is_made(call: str, tmp_path: Path) -> None:
    file = tmp_path / "new"
    verdict = run_code(f"import os\nos.{call.format(str(file))}", [])
    assert not verdict.passed
    assert verdict.reason.startswith("PermissionError"), verdict
    assert not file.is_fifo()
    assert not file.exists()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "def f(): return 1\n"])
def test_what_the_code_writes_is_not_collected(before: str) -> None:
    flood = (
        "import os\nblob = b'\\x7f' * 2**20\nwhile True:\n    for file in range(3, 32):\n        try:\n"
        "            os.write(file, blob)\n        except OSError:\n            pass"
    )
    tracemalloc.start()
    try:
        verdict = run_code(before + flood, ["assert f() == 1"], seconds=2.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not verdict.passed
    assert peak < 16 * 2**20, f"{peak:,} bytes"


@pytest.mark.parametrize(
    ("value", "reason"),
    [("'x' * 2**21", "1048576 bytes"), ("'x' * 2**21 and iter(int, 1)", "MemoryError|bytes|AssertionError")],
)
def test_values_are_bounded(value: str, reason: str) -> None:
    verdict = run_code(f"def f(): return {value}", ["assert f() == 1"])
    assert not verdict.passed
    assert re.search(reason, verdict.reason), verdict


@pytest.mark.slow
def test_modules_of_the_standard_library_are_there() -> None:
    names = "asyncio, collections.abc, doctest, heapq, math, re, statistics, subprocess, typing, unittest, uuid"
    assert run_code(f"import {names}", []).passed
    assert run_code(
        "def f():\n    from xml.etree import ElementTree\n    return ElementTree.fromstring('<a/>').tag",
        ["assert f() == 'a'"],
    ).passed
    late = "from datetime import datetime\nfrom collections import Counter\ndef f():\n"
    late += "    return datetime.strptime('2020', '%Y').year, Counter('aab').most_common(1), str(10**4299)[0]"
    assert run_code(late, ["assert f() == (2020, [('a', 2)], '1')"]) == (True, "passed")
    for missing in ("numpy", "antigravity", "ensurepip.__main__"):
        assert "ModuleNotFoundError" in run_code(f"import {missing}", []).reason


_TRACES = """
import sys
def trace(frame, event, arg):
    if frame.f_code.co_filename == "<test>":
        frame.f_globals["f"] = lambda: frame.f_code.co_consts[0]
    return trace
sys.settrace(trace)
def f(): return None
"""
"""Makes the function return the constant that the test compares it with."""


@pytest.mark.parametrize(
    "code",
    [
        "import gc, os\nfor text in gc.get_objects(): os.write(3, str(text).encode())",
        "import sys\nframe = sys._getframe(1)\nwhile frame:\n    for value in frame.f_locals.values():\n"
        "        getattr(value, 'clear', int)()\n    frame = frame.f_back",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *_: None",
        "import os\nos._exit = lambda *_: None",
        'import os\nfor file in range(32):\n    try: os.write(file, b\'{"passed": true, "reason": ""}\')\n'
        "    except OSError: pass\nos._exit(0)",
    ],
)
def test_code_does_not_pass_without_its_tests(code: str) -> None:
    assert not run_code(code, ["assert False"]).passed


@pytest.mark.slow
def test_code_that_never_answers_does_not_pass() -> None:
    code = "import json, os\nos.write = json.loads = lambda *_: None"
    assert run_code(code, ["assert False"], seconds=2) == (False, "time-out after 2 s")


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (_TRACES, "assert f() == 3"),
        ("import sys\ndef f(): return sys._getframe(1).f_code.co_consts[0]", "assert f() == 3"),
        ("class Any:\n    def __eq__(self, other): return True\ndef f(): return Any()", "assert f() == 3"),
        ("class Any(int):\n    def __eq__(self, other): return True\ndef f(): return Any()", "assert f() == 3"),
        ("class Any(list):\n    def __eq__(self, other): return True\ndef f(): return Any()", "assert f() == [3]"),
        ("def f(): return 1\ndef set(*_): return 0", "assert set(f()) == set((3, 4))"),
        ("def f(): return 1\nimport builtins\nbuiltins.set = lambda *_: 0", "assert set([f()]) == set((3, 4))"),
        ("def f(): return 1\nclass math:\n    isclose = lambda *_, **__: True", "assert math.isclose(f(), 3)"),
        ("def f(): return 1\nimport math\nmath.isclose = lambda *_, **__: True", "assert math.isclose(f(), 3)"),
        ("import sys\nf = lambda: 1\nfor frame in sys._current_frames().values():\n"
         "    frame.f_globals['encode'] = lambda *_: 3", "assert f() == 4"),
    ],
)  # fmt: skip
def test_code_does_not_take_part_in_the_comparison(code: str, test: str) -> None:
    assert not run_code(code, [test]).passed


def test_values_cross_as_they_are() -> None:
    values = (
        "None", "True", "-1", "2**70", "1.5", "float('inf')", "2j", "'a\\ud800'", "b'a'", "bytearray(b'a')", "[1, [2]]",
        "(1, (2,))", "{1, 2}", "frozenset([1])", "{1: (2, {'a': None})}", "range(3)", "{'object': 1, 'int': 2}",
    )  # fmt: skip
    same = [f"assert f({value}) == {value} and type(f({value})) is type({value})" for value in values]
    assert run_code("def f(value): return value", same) == (True, "passed")
    code = (
        "from collections import Counter, deque\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "def f():\n"
        "    return Counter('aa'), (one for one in 'ab'), deque([1]), {1: 2}.keys(), Decimal('0.1'), Fraction(1, 3)"
    )
    tests = [
        "from collections import deque\nfrom decimal import Decimal\nfrom fractions import Fraction",
        "one = f()",
        "assert one[0] == {'a': 2} and list(one[1]) == ['a', 'b'] and one[2] == deque([1])",
        "assert one[3] == {1} and one[4:] == (Decimal('0.1'), Fraction(1, 3))",
    ]
    assert run_code(code, tests) == (True, "passed")


def test_objects_and_errors_of_the_code_can_be_tested() -> None:
    code = """
class Node:
    def __init__(self, value): self.value, self.next = value, None
def length(node): return 0 if node is None else 1 + length(node.next)
def fail(): raise KeyError("k")
limit = 3
"""
    tests = [
        "root = Node(1)\nroot.next = Node(2)\nassert length(root) == 2 and root.next.value == 2",
        "assert [length(Node(one)) for one in range(2)] == [1, 1]",
        "try:\n    fail()\nexcept KeyError:\n    caught = True\nassert caught and limit == 3",
    ]
    assert run_code(code, tests) == (True, "passed")
    assert run_code(code, ["fail()"]) == (False, "KeyError: \"'k'\"")
    assert "ended its process" in run_code("import os\ndef f(): os._exit(0)", ["f()"]).reason


def test_a_name_of_python_is_tested_if_asked_for() -> None:
    code = "def sum(a, b): return a * b"
    assert run_code(code, ["assert sum(3, 4) == 12"], tested=["sum"]).passed
    assert not run_code(code, ["assert sum(3, 4) == 12"]).passed


def test_root_becomes_nobody() -> None:
    code = "import os\ndef ids(): return os.getuid(), os.geteuid(), os.getgid(), os.getegid()"
    expected = (65534,) * 4 if os.geteuid() == 0 else (os.getuid(), os.geteuid(), os.getgid(), os.getegid())
    assert run_code(code, [f"assert ids() == {expected}, ids()"]) == (True, "passed")


@pytest.fixture
def no_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without libseccomp."""
    monkeypatch.setattr(runner, "_filter_works", lambda: False)
    monkeypatch.setattr(runner, "_bubblewrap_works", lambda: False)
    monkeypatch.setattr(
        runner,
        "_START",
        f"import ctypes\nctypes.CDLL = open\n{runner._START}",  # no file has the name of the library
    )


def test_without_confinement_code_is_refused(no_confinement: None) -> None:
    with pytest.raises(ConfigError, match="--run-code=unsafe"):
        run_code("", [])
    with pytest.warns(UserWarning, match="only accidents"):
        assert run_code("def f(): return 1", ["assert f() == 1"], unsafe=True) == (True, "passed")


def test_unsafe_code_is_kept_from_accidents(no_confinement: None, tmp_path: Path) -> None:
    for attempt in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "import os\nos.system('true')",
        "import socket\nsocket.socket()",
    ):
        with pytest.warns(UserWarning, match="only accidents"):
            assert "PermissionError" in run_code(attempt, [], unsafe=True).reason
    assert not list(tmp_path.iterdir())


def test_a_process_that_cannot_confine_itself_runs_nothing(
    no_confinement: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_filter_works", lambda: True)  # it worked when it was tried, and does not now
    assert not run_code("", []).passed


def test_bubblewrap_is_used_where_it_works() -> None:
    if not runner._bubblewrap_works():
        pytest.skip("bubblewrap is not installed, or may not make namespaces here")
    code = "import os\ndef f(): return os.getppid()"
    assert run_code(code, [f"assert f() != {os.getpid()}"]).passed


def test_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    code = "import os, sys\ndef names(): return list(os.environ)\ndef path(): return sys.path"
    assert run_code(code, ["assert names() and 'SECRET_TOKEN' not in names()"]).passed
    assert run_code(code, ["assert not any('site-packages' in folder for folder in path())"]).passed
