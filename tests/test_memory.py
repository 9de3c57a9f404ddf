"""Python's garbage collector during imports, and memory that was freed."""

import gc
import platform
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from cocoa_engine.memory import OF_COMMANDS, collector_paused, release_free_memory
from tests.helpers.processes import python


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


def test_it_is_off_meanwhile_and_then_as_before() -> None:
    gc.enable()

    @collector_paused()
    def imported() -> None:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ImportError

    with pytest.raises(ImportError):
        imported()
    assert gc.isenabled()
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


PROGRAM = """
import gc, sys
from cocoa_engine.memory import collector_paused
frozen = {frozen}
if frozen:
    gc.freeze()
before = gc.get_freeze_count()
gc.collect()
with collector_paused():
    made = [[] for _ in range(20_000)]
old = {{id(each) for each in gc.get_objects(generation=2)}}
assert (gc.get_freeze_count() == before) and (before > 0) == frozen, (before, gc.get_freeze_count())
if not frozen and sys.version_info < (3, 14):
    assert all(id(each) in old for each in made)
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_made_counts_as_old_and_what_was_frozen_stays_so(frozen: bool) -> None:
    python(PROGRAM.format(frozen=frozen))


def test_commands_collect_seldom() -> None:
    program = "import gc, sys; sys.argv = ['cocoa', '--version']\nfrom cocoa_engine.cli import main\n"
    program += "try:\n    main()\nfinally:\n    print(gc.get_threshold())"
    assert python(program).splitlines()[-1] == str(OF_COMMANDS)


FREED = """
from pathlib import Path
from cocoa_engine.memory import release_free_memory

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

kept, freed = [], []
for _ in range(20_000):  # pieces of 4 kB that are not at the end of the heap
    freed.append(bytearray(4000))
    kept.append(bytearray(60))
before = resident()
freed.clear()
held = resident()
assert release_free_memory()
print(before - held, held - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_what_was_freed_goes_back() -> None:
    without, more = map(int, python(FREED).split())
    assert without < 20_000_000 < more


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (Mock(return_value=object()), Mock(side_effect=TypeError("bad argument type"))):  # as on Windows
        monkeypatch.setattr("ctypes.CDLL", library)
        assert not release_free_memory()
