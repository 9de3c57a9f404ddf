"""The code of an answer, in whatever shape a model writes it, and its tests in a process of their own."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine.errors import ConfigError
from cocoa_integrations.evaluation import generated_code
from cocoa_integrations.evaluation.generated_code import code_of, confines, passes, require_confinement
from tests.helpers.in_threads import wait_until

PLAIN = "def add(a, b):\n    return a + b"
CODES = (
    PLAIN,
    "import math\n\n\ndef area(r):\n    # a fence is ```\n    return math.pi * r * r",
    'def f(x):\n    """Doubles.\n\n    ```\n    >>> f(1)\n    ```\n    """\n    return 2 * x',
    'def f(x):\n    """```python```"""\n    return "```"',
    "class A:\n    pass\n\nadd = lambda a, b: a + b",
    "def f(s):\n    return re.sub('\\d', '', s)",  # an escape that Python warns of
)
FENCES = ("```", "````")
TAGS = ("", "python", "Python", "PYTHON", "py", " python3", "{.python}")
WORDS = ("", "Here is the code:", "Solution", "Note: this is it", "Sure! It adds `a` and `b`.\n\nAs follows.")

codes, fences, tags, words = map(st.sampled_from, (CODES, FENCES, TAGS, WORDS))


@given(codes, st.sampled_from(("", "\n", "\n[/PYTHON]", "\n[/PYTHON]\nThis is it.", "\n[/python]")))
def test_bare_code(code: str, after: str) -> None:
    assert code_of(code + after) == code


@given(words, fences, tags, codes, st.sampled_from(("", "[PYTHON]\n", "[python]\n")), words)
def test_fenced_code(before: str, fence: str, tag: str, code: str, opened: str, after: str) -> None:
    assert code_of(f"{before}\n{opened}{fence}{tag}\n{code}\n{fence}\n{after}") == code
    assert code_of(f"{code}\n{fence}\n{after}") == code  # a fence that only closes
    assert code_of(f"{before}\n{fence}{tag}\n{code}") == code  # and one that is never closed
    assert code_of(f"{before}\n[PYTHON]\n{code}\n[/PYTHON]\n{after}") == code


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (f"{PLAIN}\n```\nThis adds.", PLAIN),
        (f"```sh\npip install numpy\n```\nand\n```python\n{PLAIN}\n```", PLAIN),
        (f"{PLAIN}\n```\nIt is used so:\n```python\nx = add(1, 2)\n```", PLAIN),
        (f"1. The code:\n   ```python\n   {PLAIN[:14]}\n       return a + b\n   ```", PLAIN),
        ("```python\ndef add(a, b) return a + b\n```\nThis adds.", "def add(a, b) return a + b"),
        ("def add(a, b) return a + b", "def add(a, b) return a + b"),
        ("", ""),
        ("\0", "\0"),
    ],
)
def test_of_an_answer(answer: str, code: str) -> None:
    assert code_of(answer) == code


@given(st.text(st.sampled_from("`\n[]/PYTHON d:=1('\"\\\0"), max_size=60))
def test_any_text_has_some(answer: str) -> None:
    assert isinstance(code_of(answer), str)


@pytest.mark.timeout(60)
def test_answers_without_an_end() -> None:
    for endless in ("(" * 100_000, "-" * 100_000 + "1"):
        assert code_of(endless) == endless
    for empty in ("```\n" * 3000, "[PYTHON]" * 3000):
        assert code_of(empty) == ""


# --- tests of the code

Passes = Callable[..., bool]


@pytest.fixture
def nothing_confines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without bubblewrap."""
    confines.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield
    confines.cache_clear()


@pytest.fixture(params=["confirmed", "confined"])
def run(request: pytest.FixtureRequest) -> Passes:
    """:func:`passes` on a machine without bubblewrap, and with it."""
    if request.param == "confirmed":
        request.getfixturevalue("nothing_confines")
        return partial(passes, confirm_run_unsafe_code=True)
    if not confines():
        pytest.skip("bubblewrap is not installed, or may not make namespaces here")
    return passes


def test_right_code_passes_and_wrong_code_fails(run: Passes) -> None:
    code = "import math\ndef area(r):\n    print('noise' * 1000)\n    return math.pi * r * r"
    assert run(code, ["assert round(area(1), 2) == 3.14", "assert area(0) == 0"])
    assert not run(code, ["assert area(1) == 3"])
    assert not run(code, ["assert area(1) == 3", "assert True"])
    assert not run("def", ["pass"])
    assert not run("", ["assert area(1)"])
    assert run("def sum(a, b): return a * b", ["assert sum(3, 4) == 12"])  # a name of Python, too


@pytest.mark.slow
def test_leaving_early_is_no_pass_and_endless_code_is_ended(run: Passes) -> None:
    for code in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit()"):
        assert not run(code, ["assert False"])
    assert not run("while True:\n    pass", [], seconds=1.0)
    assert not run("", ["import time\ntime.sleep(600)"], seconds=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "while True:\n    pass"])
def test_processes_that_the_code_starts_are_ended(end: str, nothing_confines: None, tmp_path: Path) -> None:
    note = tmp_path / "child"
    start = f"import subprocess\nchild = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])"
    code = f"{start}\nopen({str(note)!r}, 'w').write(str(child.pid))\n{end}"
    assert passes(code, [], seconds=3.0, confirm_run_unsafe_code=True) is (not end)
    child = Path(f"/proc/{note.read_text()}/stat")
    wait_until(lambda: not child.exists() or child.read_text().split()[2] == "Z")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no limit of the address space")
def test_memory_is_limited(run: Passes) -> None:
    assert not run("x = bytearray(2 * 2**30)", [])
    assert run("x = bytearray(32 * 2**20)", [])


def test_only_the_standard_library_is_there_and_no_environment(run: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert run("import asyncio, collections.abc, heapq, re, statistics, subprocess, unittest", [])
    assert not run("import numpy", [])
    assert run("import os", ["assert 'SECRET_TOKEN' not in os.environ"])


def test_files_are_written_to_a_folder_of_their_own(nothing_confines: None) -> None:
    assert passes("open('here.txt', 'w').write('x')", ["import os", "assert os.listdir() == ['here.txt']"],
                  confirm_run_unsafe_code=True)  # fmt: skip
    assert not Path("here.txt").exists()


def test_bubblewrap_takes_network_files_and_processes_away(tmp_path: Path) -> None:
    if not confines():
        pytest.skip("bubblewrap is not installed, or may not make namespaces here")
    victim = tmp_path / "kept.txt"
    victim.write_text("as it was")
    with socket.socket() as server:  # there is somebody to connect to
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        for attempt in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)",
            f"open({str(victim)!r}).read()",
            f"open({str(victim)!r}, 'w').write('gone')",
            f"open({sys.base_prefix + '/new.txt'!r}, 'w')",
            f"import os\nos.kill({os.getpid()}, 0)",
            f"open('/proc/{os.getpid()}/environ', 'rb').read()",
        ):
            assert not passes(attempt, []), attempt
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    assert victim.read_text() == "as it was"
    assert passes("import os", ["assert os.getuid() == os.getgid() == 65534"])


def test_without_bubblewrap_code_needs_consent(
    nothing_confines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"
    with pytest.raises(ConfigError, match="--confirm-run-unsafe-code"):
        passes(f"open({str(note)!r}, 'w')", [])
    assert not note.exists()
    require_confinement(True)
    monkeypatch.setattr(generated_code.os, "name", "nt")
    with pytest.raises(ConfigError, match="Linux or macOS"):
        require_confinement(True)


def test_bubblewrap_is_used_where_it_works_and_binds_nothing_to_write(nothing_confines: None, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    assert not confines()  # one that may make no namespaces does not count
    confines.cache_clear()
    # this one notes its options, and runs the command after them
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\nat = sys.argv.index({sys.executable!r}, sys.argv.index('--chdir'))\n"
        f"print(*sys.argv[1:at], file=open({str(notes)!r}, 'a'))\nos.execv(sys.argv[at], sys.argv[at:])\n"
    )
    script.chmod(0o755)
    assert confines()
    for consent in (False, True):
        assert passes("x = 1", ["assert x == 1"], confirm_run_unsafe_code=consent)
    lines = notes.read_text().splitlines()
    assert len(lines) == 3  # a trial, and both runs
    for line in lines:
        assert {"--unshare-all", "--clearenv", "--die-with-parent", "--new-session"} <= set(line.split())
        assert "--bind" not in line
