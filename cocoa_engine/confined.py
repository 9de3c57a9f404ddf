"""Runs work on the data of strangers in other processes, where limits of time and memory, and a cancellation, end it.

The first use starts a server process. It loads what the work needs, and forks a worker process for each task, which
takes some milliseconds. A worker ends when one of its sockets is closed, in the middle of a call too. The functions
that run there are of modules that import neither torch nor transformers.

Where Python cannot fork (Windows), the work runs in this process, without limits.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from multiprocessing import Pipe
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from cocoa_engine.errors import ConfigError, EngineBusyError, WorkerError
from cocoa_engine.interruptions import (
    Cancellation,
    call_in_child,
    current_cancellation,
    free_in_child,
    require_running,
    resting,
)

if sys.platform != "win32":
    import fcntl
    import resource
    from multiprocessing.connection import Connection
    from multiprocessing.reduction import recv_handle, send_handle

Result = TypeVar("Result")

_FOLDER = os.sep
with contextlib.suppress(OSError):  # it was removed
    _FOLDER = os.getcwd()  # to which names are relative that are not absolute; the program may leave it

CPU_SECONDS = 5.0  # processor time of the calls of one budget, at which the system ends a worker
SHORT_SECONDS = 0.1  # processor time after which a task counts as long, and waits for a place of long tasks
WALL_SECONDS = 60.0  # that a caller waits for a turn, and for one call: other work may keep the processors busy
START_SECONDS = 30.0  # in which the server process must be ready
MEMORY_MB = 1024  # that a worker may allocate, in MiB
FORKS = hasattr(os, "fork")
POLL = 0.05  # seconds between two looks at a cancellation
LOW = 10  # what long tasks add to the niceness of their processes
READY = "ready"
SPARES = 2  # workers that are begun before there is a task for them, or that a short task has left
MOST_LOADED = 8  # results of `Load` that the server keeps; earlier ones are loaded again when they are needed
MOST_REFUSED, REFUSED_SECONDS = 256, 600.0
"""Data that took too much time or memory: the number that is refused at once when it comes again, and for how long."""


class Load(NamedTuple):
    """What the server does once, before it forks a worker that needs it: it calls a function of a module.

    ``key`` names the result, for :func:`loaded`; ``arguments`` makes the arguments, which can be pickled.
    """

    key: object
    function: Callable[..., object]
    arguments: Callable[[], tuple[Any, ...]]


class Budget:
    """The processor time, ``left`` in seconds, that all calls for one request have together. They take turns.

    ``waiting`` is the context in which a call waits for a place of long tasks, and has it. A server limits it.
    """

    def __init__(self, waiting: Callable[[], contextlib.AbstractContextManager[object]] | None = None) -> None:
        self.left = CPU_SECONDS
        self.waiting = waiting or contextlib.nullcontext
        self.turn = threading.Semaphore(1)


budget_of_request: ContextVar[Budget | None] = ContextVar("cocoa_budget", default=None)


def current_budget() -> Budget:
    """That of the request on which the calling code works; otherwise a new one."""
    return budget_of_request.get() or Budget()


@contextlib.contextmanager
def one_budget() -> Iterator[None]:
    """Within the block, all calls have one budget: that of the request, if there is one already."""
    token = budget_of_request.set(current_budget())
    try:
        yield
    finally:
        budget_of_request.reset(token)


class Worker:
    """A process that calls functions of modules, for one caller at a time, after a load. It ends with this object.

    Attributes:
        ended: whether the process was ended here. The system may have ended it, too.
        slow: whether a call took long, after which it may have much memory.
        loads: the keys of what is loaded in it.
    """

    def __init__(self, load: Load) -> None:
        self.ended = self.slow = self._has_begun = False
        if FORKS:
            self._connection, self._life, self.loads = _forked(load)
            _workers.add(self)
        else:
            _results.setdefault(load.key, _outcome(_name(load.function), load.arguments()))

    @property
    def waits(self) -> bool:
        """Whether the process waits for a call."""
        with contextlib.suppress(EOFError, OSError):
            if not self._has_begun and self._connection.poll(0):
                self._has_begun = self._connection.recv() == READY
            return not (self.ended or self._connection.poll(0))
        return False

    def __reduce__(self) -> NoReturn:
        raise TypeError("a worker process cannot be copied or pickled: begin another one.")

    def call(
        self,
        function: Callable[..., Result],
        *args: Any,
        what: str,
        budget: Budget,
        cancellation: Cancellation | None = None,
        most: float = CPU_SECONDS,
        low: bool = False,
    ) -> Result:
        """Call a function of a module in the process. After a limit or a cancellation, the process has ended.

        Args:
            function, *args: the function, and arguments that can be pickled.
            what: the data that it works on, for the message.
            budget: its processor time, from which the time that it takes is subtracted.
            cancellation: ends the work; by default that of the calling code.
            most: the processor time of this call, at most.
            low: whether it has a low priority.

        Raises:
            ConfigError: the work takes too much time or memory, or has crashed.
            WorkerError: the process was never begun.
            Exception: that of the function, or of the cancellation.
        """
        cancellation = cancellation or current_cancellation()
        cancellation.check()
        if not FORKS:
            return function(*args)
        seconds = used = min(most, budget.left)
        if seconds <= 0:
            raise _too_much(what)
        try:
            self._has_begun = self._has_begun or self._received(cancellation) == READY
            self._connection.send((_name(function), args, seconds, low))
            succeeded, result, used = self._received(cancellation)
        except (EOFError, OSError):
            self.end()
            cancellation.check()
            raise (_too_much(what) if self._has_begun else _never_ran("it was not begun, or has ended")) from None
        except BaseException:  # an interrupt: the answer would be taken for that to the next call
            self.end()
            raise
        finally:
            budget.left -= used
        if succeeded:
            return result
        raise result

    def _received(self, cancellation: Cancellation) -> Any:
        if not self._connection.poll(POLL):
            self.slow = self._has_begun
            with cancellation.heard_by(self.end), resting():
                if not self._connection.poll(WALL_SECONDS):
                    raise EOFError
            require_running()
        return self._connection.recv()

    def end(self) -> None:
        """End the process, in the middle of a call too. Can be called from any thread, and repeatedly."""
        self.ended = True
        if FORKS:
            with contextlib.suppress(OSError):  # it is a forked child's, and closed
                self._life.shutdown(socket.SHUT_RDWR)


def run(function: Callable[..., Result], *args: Any, what: str) -> Result:
    """Call a function of a module in a worker process; arguments and errors as for :meth:`Worker.call`."""
    if not FORKS:
        return function(*args)
    name = _name(function)
    worker, result = started(Load(name, _prepared, lambda: (name,)), function, *args, what=what, data=args)
    give_back([worker])
    return result


def started(
    load: Load, function: Callable[..., Result], *args: Any, what: str, data: object, budget: Budget | None = None
) -> tuple[Worker, Result]:
    """A new worker, and the result of its first call.

    Short tasks do not wait for long ones. Every task begins among the short ones. One that takes longer than
    :data:`SHORT_SECONDS` is begun again among the long ones, which are few at a time and have a low priority.

    Args:
        load: what is loaded in it.
        function, *args, what: as for :meth:`Worker.call`, with its errors.
        data: that of the arguments by which the task is known when it comes again.
        budget: its processor time; by default that of the request.

    Raises:
        EngineBusyError: no turn came for a minute, or the server lets no more calls wait for one.
    """
    digest = hashlib.sha256(pickle.dumps((load.key, data))).digest()
    if time.monotonic() - _refused.get(digest, -sys.maxsize) < REFUSED_SECONDS:
        raise _too_much(what)
    budget = budget or current_budget()
    with _turn(budget.turn):
        whole = budget.left >= CPU_SECONDS
        for low, seconds in ((False, SHORT_SECONDS), (True, CPU_SECONDS)):
            with budget.waiting() if low else contextlib.nullcontext(), _turn(_long if low else _short):
                worker, begun = _worker_with(load), time.monotonic()
                try:
                    return worker, worker.call(function, *args, what=what, budget=budget, most=seconds, low=low)
                except _TooMuchError:
                    pass
                except Exception:
                    give_back([worker])
                    raise
    if whole and time.monotonic() - begun < WALL_SECONDS:  # and not for other data, or other work on the processors
        _refused[digest] = time.monotonic()
        for oldest in [*_refused][:-MOST_REFUSED]:
            _refused.pop(oldest, None)
    raise _too_much(what)


def give_back(workers: Sequence[Worker]) -> None:
    """Keep workers for other tasks, except for those that may have much memory left from a long call."""
    _spares.extend([worker for worker in workers if not (worker.ended or worker.slow)][: 2 * SPARES - len(_spares)])


def _worker_with(load: Load) -> Worker:
    """A worker for which something is loaded. Another one is begun for the next caller, because a fork takes time."""
    worker = None
    while worker is None and _spares:
        with contextlib.suppress(IndexError):  # another thread has taken the last one
            spare = _spares.pop()
            worker = spare if load.key in spare.loads and spare.waits else None
    worker = worker or Worker(load)
    while FORKS and len(_spares) < SPARES:
        _spares.insert(0, Worker(load))
    return worker


class _TooMuchError(ConfigError):
    """A worker ended at a limit. Functions that it calls raise other errors."""


def _too_much(what: str) -> _TooMuchError:
    return _TooMuchError(
        f"{what} takes too much time or memory, or is nested too deeply: the limits are {CPU_SECONDS:g} seconds "
        f"of processor time, for all schemas of a request together, and {MEMORY_MB} MB. Simplify it: fewer "
        "properties, alternatives and references, smaller numbers in multipleOf and in repetitions."
    )


def _never_ran(reason: str) -> WorkerError:
    executable = os.fsdecode(get_executable() or "")
    return WorkerError(
        f"the process that compiles grammars and compares schemas cannot be started ({reason}); the schema was not "
        f"looked at. It is begun with {executable!r}: where this is not Python's interpreter, as in a program "
        "with an embedded Python, name it with multiprocessing.set_executable(). Otherwise look at standard error, and "
        "at the limits of processes and memory."
    )


@contextlib.contextmanager
def _turn(lane: threading.Semaphore | threading.Lock) -> Iterator[None]:
    """Within the block, only few others work, so that many large tasks at once do not take all memory.

    Raises:
        EngineBusyError: the calling code has waited for too long.
    """
    cancellation, deadline = current_cancellation(), time.monotonic() + WALL_SECONDS
    while not lane.acquire(timeout=POLL):
        cancellation.check()
        if time.monotonic() > deadline:
            raise EngineBusyError("too many grammars and schemas are being compiled; try again later.")
    try:
        yield
    finally:
        lane.release()


def _name(function: Callable[..., object]) -> tuple[str, str, str]:
    """The file, the module and the name of a function."""
    return os.path.join(_FOLDER, str(sys.modules[function.__module__].__file__)), function.__module__, function.__name__


class _Server:
    """The server process, seen from the process that uses it."""

    def __init__(self) -> None:
        packages, *path = [os.path.join(_FOLDER, entry) for entry in (str(Path(__file__).parent.parent), *sys.path)]
        program = (  # `path` may have another version of the package first, and must have the standard library first
            f"import sys; sys.path[:] = {[packages, *path]!r}; from cocoa_engine import confined; del sys.path[0]; "
            "confined.serve()"
        )
        self._loaded: list[object] = []  # the latest last
        self._connection, theirs = Pipe()
        with contextlib.ExitStack() as failing:
            failing.callback(self._connection.close)
            with theirs:
                if getattr(sys, "frozen", False) and get_executable() == sys.executable:
                    raise _never_ran("this program is frozen, and has no interpreter")
                try:
                    self.process = subprocess.Popen(
                        [get_executable(), "-c", program],
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C ends the program alone, and its end is that of the server
                    )
                except (OSError, TypeError) as error:  # TypeError: there is no executable
                    raise _never_ran(str(error)) from None
            failing.callback(self.kill)
            cancellation, deadline = current_cancellation(), time.monotonic() + START_SECONDS
            while not self._connection.poll(POLL):
                cancellation.check()
                if time.monotonic() > deadline:
                    raise _never_ran(f"it was not ready after {START_SECONDS:g} seconds")
            try:
                self._connection.recv_bytes(len(READY))
            except (EOFError, OSError):
                raise _never_ran("it has ended at once") from None
            failing.pop_all()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it. Its workers go on."""
        self.process.kill()
        self.process.wait()

    def fork(self, load: Load) -> tuple[Connection, socket.socket, frozenset[object]]:
        """The connection to a new worker, what ends it when it is closed, and its loads. For one thread at a time."""
        if load.key in self._loaded:
            self._loaded.remove(load.key)
        else:
            others = self._loaded[: 1 - MOST_LOADED]
            self._connection.send((load.key, _name(load.function), load.arguments(), others))
            del self._loaded[: len(others)]
        self._loaded.append(load.key)
        ours, theirs = Pipe()
        our_life, their_life = socket.socketpair()
        with theirs, their_life:
            self._connection.send(None)
            for end in (theirs, their_life):
                send_handle(self._connection, end.fileno(), self.process.pid)
        return ours, our_life, frozenset(self._loaded)

    def close(self) -> None:
        """Close the connection, at which the server ends, unless another process has it too."""
        self._connection.close()


_server: _Server | None = None
_starting = free_in_child(threading.Lock())
_spares: list[Worker] = []
_refused: dict[bytes, float] = {}
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _lanes() -> tuple[threading.Semaphore, threading.Semaphore]:
    """The places of short tasks, which take little memory, and those of long ones."""
    processors = os.cpu_count() or 1
    return threading.Semaphore(4 * processors), threading.Semaphore(max(1, processors - 1))


_short, _long = _lanes()


def _forked(load: Load) -> tuple[Connection, socket.socket, frozenset[object]]:
    """As :meth:`_Server.fork`, after the server is started if there is none."""
    global _server
    with _turn(_starting):
        for _ in range(2):
            if _server is None or _server.ended:
                _server = _Server()
            try:
                return _server.fork(load)
            except BaseException as error:  # something is ending the server, or has interrupted a message to it
                _server.kill()
                if not isinstance(error, OSError):
                    raise
                reason = str(error)
    raise _never_ran(reason)


def _forget_server() -> None:
    """In a forked child: the server is the parent's."""
    global _server, _short, _long
    if _server is not None:
        _server.close()
    _server, (_short, _long) = None, _lanes()
    for worker in list(_workers):  # the answers are for the parent
        worker.ended = True
        worker._connection.close()
        worker._life.close()
    _workers.clear()
    _spares.clear()


call_in_child(_forget_server)


# what runs in the server and in the workers

_results: dict[object, tuple[bool, Any]] = {}


def loaded(key: object) -> Any:
    """In a worker: what a :class:`Load` has loaded. Raises the error of its function."""
    succeeded, result = _results[key]
    if succeeded:
        return result
    raise result


def serve() -> NoReturn:
    """The server: load, and fork workers, as the process at standard input says."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # running answers of a server that drains need their workers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory is short, a worker ends before the program does
    program = Connection(os.dup(0))
    program.send_bytes(READY.encode())
    while True:
        try:
            if (load := program.recv()) is None:
                handle, life = recv_handle(program), recv_handle(program)
        except (EOFError, OSError, RuntimeError):  # RuntimeError: the program ended between the two
            os._exit(0)
        if load is not None:
            key, name, arguments, others = load
            for other in others:
                _results.pop(other, None)
            _results[key] = _outcome(name, arguments)
            gc.freeze()  # what workers do not collect they do not copy
            continue
        with contextlib.suppress(OSError):  # no more processes: the caller sees a closed connection
            if os.fork() == 0:
                program.close()
                _work(Connection(handle), life)
        os.close(handle)
        os.close(life)


def _work(connection: Connection, life: int) -> NoReturn:
    """A worker: call functions until ``life`` is closed, at which the system ends it."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 2):  # Rust writes there what it aborts for
        os.dup2(null, stream)
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as pages:
        size = int(pages.read().split()[0]) * resource.getpagesize() + MEMORY_MB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for number in (signal.SIGPROF, signal.SIGIO):  # both end the process
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGIO])
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)  # SIGIO when it is closed; nothing is sent over it
    try:
        ends = select.select([life], [], [], 0)[0]  # it was closed before
        connection.send(READY)
        while not ends:
            name, args, seconds, low = connection.recv()
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = (_low_outcome if low else _outcome)(name, args)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send((*answer, time.process_time() - begun))
    except BaseException:  # the connection is closed, or there is no memory left
        pass
    os._exit(0)


def _outcome(name: tuple[str, str, str], args: Sequence[Any]) -> tuple[bool, Any]:
    """Whether a function succeeds, and its result or its error."""
    try:
        return True, _function(name)(*args)
    except MemoryError:
        raise
    except Exception as error:
        return False, error


def _low_outcome(name: tuple[str, str, str], args: Sequence[Any]) -> tuple[bool, Any]:
    """The same with a low priority, which on Linux is that of a thread: the process keeps its own for later calls."""
    outcomes = []

    def work() -> None:
        if sys.platform == "linux":
            os.nice(LOW)
        outcomes.append(_outcome(name, args))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return outcomes[0]


def _prepared(name: tuple[str, str, str]) -> None:
    """In the server: import the module of a function and the optional packages that it uses, and call its ``warm``."""
    module = sys.modules[_function(name).__module__]
    for package in getattr(module, "USES", ()):
        with contextlib.suppress(ImportError):
            import_module(package)
    with contextlib.suppress(ImportError):
        getattr(module, "warm", bool)()


def _function(name: tuple[str, str, str]) -> Callable[..., Any]:
    """A function by its name. Its module is read without the package around it, which may import torch."""
    file, module, function = name
    if module not in sys.modules:
        spec = PathFinder.find_spec(module, [os.path.dirname(file)])  # the file may be in a zip archive
        if spec is None or spec.loader is None:
            raise WorkerError(f"{module} cannot be read from {file}: install the package again.")
        sys.modules[module] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], function)
