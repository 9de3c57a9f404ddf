"""Python's garbage collector during imports."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cocoa_engine.garbage import OF_COMMANDS, collector_paused
from tests.helpers.processes import LIMIT


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


def test_it_is_off_meanwhile_and_on_afterwards() -> None:
    gc.enable()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_after_an_error() -> None:
    gc.enable()
    with pytest.raises(ImportError), collector_paused():
        raise ImportError
    assert gc.isenabled()


def test_one_that_is_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


PROGRAM = """
import gc
from cocoa_engine.garbage import collector_paused
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
    subprocess.run([sys.executable, "-c", "import sys" + PROGRAM.format(frozen=frozen)], check=True, timeout=LIMIT)


def test_commands_collect_seldom() -> None:
    program = "import gc, sys; sys.argv = ['cocoa', '--version']\nfrom cocoa_engine.cli import main\n"
    program += "try:\n    main()\nfinally:\n    print(gc.get_threshold())"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=LIMIT)
    printed = done.stdout
    assert printed.splitlines()[-1] == str(OF_COMMANDS)
