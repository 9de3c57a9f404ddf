"""The barrier of the kernels: no thread passes it early, and a thread that waits long sleeps instead of spinning."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.native import build
from tests.helpers.in_threads import join, start
from tests.helpers.libraries import forget, needs_kernels

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

EXPOSED = """
#include <thread>

extern "C" {

Barrier* test_barrier() { return new Barrier; }

void test_wait(Barrier* barrier, long team) { barrier->wait(team); }

void test_free(Barrier* barrier) { delete barrier; }

// How often a thread saw another one in another round.
long test_rounds(long team, long rounds) {
    Barrier barrier;
    std::vector<long> at(team);
    std::atomic<long> wrong{0};
    std::vector<std::thread> threads;
    for (long own = 0; own < team; own++)
        threads.emplace_back([&, own] {
            for (long round = 1; round <= rounds; round++) {
                if (round % 50 == 0 && own == round % team) usleep(2000);  // the others fall asleep
                at[own] = round;
                barrier.wait(team);
                for (long other : at) wrong += other != round;
                barrier.wait(team);
            }
        });
    for (auto& thread : threads) thread.join();
    return wrong;
}

}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source, folder = build.SOURCE.read_text(), tmp_path_factory.mktemp("barrier")
    includes = "\n".join(line for line in source.splitlines() if line.startswith("#include ") and "blocks" not in line)
    barrier = source[source.index("class Barrier {") : source.index("struct Buffers {")]
    (folder / "barrier.cpp").write_text(f"{includes}\n{barrier}\n{EXPOSED}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCE", folder / "barrier.cpp")
        made = ctypes.CDLL(str(build._compile(build._compiler(), folder)))
    made.test_barrier.restype = ctypes.c_void_p
    made.test_wait.argtypes = [ctypes.c_void_p, ctypes.c_long]
    made.test_free.argtypes = [ctypes.c_void_p]
    made.test_rounds.argtypes = [ctypes.c_long, ctypes.c_long]
    made.test_rounds.restype = ctypes.c_long
    return made


@pytest.fixture
def busy() -> Iterator[None]:
    """Two other processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for other in others:
        other.kill()
        other.wait(60)


def state(thread: int) -> str:
    """The state of a thread of this process: R while it runs or could, S while it sleeps."""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
@pytest.mark.usefixtures("busy")
def test_who_waits_sleeps_until_the_others_come(library: ctypes.CDLL) -> None:
    barrier = library.test_barrier()
    waiting = [start(lambda: library.test_wait(barrier, 3)) for _ in range(2)]
    ends, asleep = time.monotonic() + 60, 0
    while asleep < 20:  # once might be on the way there
        assert time.monotonic() < ends, "a thread that waits keeps a processor"
        time.sleep(0.01)
        states = [state(thread.native_id) for thread in waiting if thread.native_id is not None]
        asleep = asleep + 1 if states == ["S", "S"] else 0
    assert all(thread.is_alive() for thread in waiting)
    library.test_wait(barrier, 3)
    join(waiting)
    library.test_free(barrier)


@pytest.mark.slow
@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("team", [2, 5])
def test_nobody_is_a_round_ahead(library: ctypes.CDLL, team: int) -> None:
    assert library.test_rounds(team, 500) == 0


@pytest.mark.usefixtures("busy")
def test_two_threads_compute_the_same_beside_busy_processes() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    forget()
    try:
        assert trial.obstacle() is None
    finally:
        torch.set_num_threads(threads)
        forget()
