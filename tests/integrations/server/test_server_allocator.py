"""The server's threads share one arena of glibc's allocator, unless the user has set it."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cocoa_integrations.server import lifecycle
from cocoa_integrations.server.lifecycle import free_memory_released, keep_one_arena, one_arena
from tests.helpers.served import happens

ARENAS = """
import ctypes, os, sys, threading
import cocoa_engine, cocoa_integrations.server.command, cocoa_integrations.ray
from cocoa_integrations.server.lifecycle import keep_one_arena

def work():
    ctypes.CDLL(None).malloc(100)  # its first allocation gives a thread its arena
    together.wait()

for keep, variables in ((False, {}), (True, {}), (True, {"MALLOC_TRIM_THRESHOLD_": "131072"})):
    if (child := os.fork()) == 0:
        os.environ.update(variables)
        print("kept", keep and keep_one_arena(), file=sys.stderr, flush=True)
        together = threading.Barrier(6)
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ctypes.CDLL(None).malloc_stats()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of this process leaves the allocator as it is."""
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_all_threads_share_one_arena_unless_an_import_or_the_user_says_otherwise() -> None:
    """Each other thread has one of its own otherwise, besides the main thread's."""
    run = subprocess.run([sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True, timeout=120)
    forks = run.stderr.split("kept ")[1:]
    assert [(fork.startswith("True"), fork.count("\nArena ")) for fork in forks] == [(False, 7), (True, 1), (False, 7)]


@pytest.mark.parametrize(
    ("name", "value", "is_set"),
    [
        ("MALLOC_ARENA_MAX", "0", True),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=8", True),
        ("GLIBC_TUNABLES", "glibc.cpu.x86_shstk=off", False),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_set: bool) -> None:
    monkeypatch.setenv(name, value)
    assert one_arena() == ({} if is_set else {"MALLOC_ARENA_MAX": "1"})


def musl(name: None) -> Any:
    """It has no gnu_get_libc_version, and other numbers."""
    return SimpleNamespace(mallopt=lambda *numbers: pytest.fail("musl's mallopt must not be called"))


def windows(name: None) -> Any:
    raise TypeError("bad argument type")


@pytest.mark.parametrize("library", [musl, windows])
def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setattr("ctypes.CDLL", library)
    assert not keep_one_arena()


@pytest.mark.parametrize(("arenas", "releases"), [(None, True), ("1", True), ("8", False)])
async def test_free_memory_is_released_until_the_server_ends(
    monkeypatch: pytest.MonkeyPatch, arenas: str | None, releases: bool
) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(lifecycle, "release_free_memory", lambda: threads.append(threading.current_thread()))
    monkeypatch.setattr(lifecycle, "RELEASE_INTERVAL", 0.001)
    if arenas is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", arenas)
    async with free_memory_released():
        if releases:
            await happens(lambda: len(threads) > 2)
        await asyncio.sleep(0.02)
    after = len(threads)
    await asyncio.sleep(0.02)
    assert len(threads) - after <= 1  # the one that had begun
    assert bool(threads) is releases
    assert threading.main_thread() not in threads  # a release takes milliseconds
