"""The server's threads share one arena of glibc's allocator, unless the user has set it."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import threading

import pytest

from cocoa_integrations.server import lifecycle
from cocoa_integrations.server.lifecycle import free_memory_released, keep_one_arena, one_arena
from tests.helpers.served import happens

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

ARENAS = """
import ctypes, sys, threading
import cocoa_engine, cocoa_integrations.server.command, cocoa_integrations.ray
from cocoa_integrations.server.lifecycle import keep_one_arena

done = keep_one_arena() if "keep" in sys.argv else False
together = threading.Barrier(6)

def work():
    ctypes.CDLL(None).malloc(100)  # its first allocation gives a thread its arena
    together.wait()

threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ctypes.CDLL(None).malloc_stats()
print(done)
"""


def arenas(*arguments: str, **variables: str) -> tuple[bool, int]:
    """Whether a new process was told to keep one arena, and how many it has after six threads."""
    inherited = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", ARENAS, *arguments]
    environment = {**inherited, **variables}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    lines = run.stderr.splitlines()
    return run.stdout.strip() == "True", sum(line.startswith("Arena ") for line in lines)


@pytest.mark.slow
@glibc
def test_all_threads_share_one_arena() -> None:
    assert arenas() == (False, 7)  # the main thread's, and one for each: an import sets nothing
    assert arenas("keep") == (True, 1)
    assert arenas(**one_arena({})) == (False, 1)


@pytest.mark.slow
@glibc
@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_ARENA_MAX": "0"},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=8"},
    ],
)
def test_what_the_user_has_set_stays(variables: dict[str, str]) -> None:
    assert arenas("keep", **variables) == (False, 7)
    assert one_arena(variables) == {}


def test_other_variables_are_not_the_allocators() -> None:
    assert one_arena({"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=off", "PATH": "/bin"}) == {"MALLOC_ARENA_MAX": "1"}


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Musl:
        @staticmethod
        def mallopt(*args: int) -> int:
            raise AssertionError("it has other numbers")

    monkeypatch.setattr("ctypes.CDLL", lambda _: Musl())
    assert not keep_one_arena({})

    def windows(_: None) -> None:
        raise TypeError("bad argument type")

    monkeypatch.setattr("ctypes.CDLL", windows)
    assert not keep_one_arena({})


async def test_free_memory_is_released_until_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    releases: list[threading.Thread] = []
    monkeypatch.setattr(lifecycle, "release_free_memory", lambda: releases.append(threading.current_thread()))
    for environment in ({}, {"PATH": "/bin"}, one_arena({})):
        releases.clear()
        async with free_memory_released(0.001, environment):
            await happens(lambda: len(releases) > 2)
    after = len(releases)
    await asyncio.sleep(0.02)
    assert len(releases) - after <= 1  # the one that had begun
    assert threading.main_thread() not in releases  # a release takes milliseconds
    async with free_memory_released(0.001, {"MALLOC_ARENA_MAX": "8"}):
        await asyncio.sleep(0.02)
    assert len(releases) - after <= 1
