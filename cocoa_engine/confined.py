"""Runs work on the data of strangers in other processes, where limits of time and memory, and a cancellation, end it.

The first use starts a server process. It loads what the work needs, and forks a worker process for each task, which
takes about two milliseconds. The functions that run there are of modules that import neither torch nor transformers.

Where Python cannot fork (Windows), the work runs in this process, without limits.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NamedTuple, NoReturn, TypeVar

from cocoa_engine.cancellation import Cancellation, current_cancellation
from cocoa_engine.errors import ConfigError
from cocoa_engine.forks import call_in_child, free_in_child
from cocoa_engine.process_exit import require_running, resting

if sys.platform != "win32":
    import resource
    from multiprocessing.connection import Connection

Result = TypeVar("Result")

CPU_SECONDS = 5.0
"""Processor time of one call, at which the system ends a worker."""
SHORT_SECONDS = 0.1
"""Processor time after which a task counts as long, and is begun again when a place of long tasks is free."""
WALL_SECONDS = 60.0
"""Seconds that a caller waits for one call. They are more, because other work may keep the processors busy."""
MEMORY_MB = 1024
"""Memory that a worker may allocate, in MiB."""

QUICK = 0.05
"""Seconds after which a call counts as slow."""
FORKS = hasattr(os, "fork")
LOW = 10
"""What long tasks add to the niceness of their processes."""
SPARES, MOST_SPARES = 2, 4
"""Workers that are begun before there is a task for them, and that are kept after one."""
MOST_REFUSED, REFUSED_SECONDS = 256, 600.0
"""Data that took too much time or memory: the number that is refused at once when it comes again, and for how long."""


class Load(NamedTuple):
    """What the server does once, before it forks a worker that needs it: it calls a function of a module.

    Attributes:
        key: the name of the result, for :func:`loaded`.
        function: the function.
        arguments: makes its arguments, which can be pickled.
    """

    key: object
    function: Callable[..., object]
    arguments: Callable[[], tuple[Any, ...]]


class Worker:
    """A process that calls functions of modules, for one caller at a time. It ends with this object.

    Args:
        *loads: what the server loads before.
    """

    def __init__(self, *loads: Load) -> None:
        self.ended = self.slow = False
        if not FORKS:
            for load in loads:
                _results.setdefault(load.key, _outcome(load.function, load.arguments()))
            return
        server, self._connection, number, self._loaded = _forked(loads)
        self._end = weakref.finalize(self, server.tell, "end", number)
        self._end.atexit = False
        _workers.add(self)

    @property
    def waits(self) -> bool:
        """Whether the process waits for a call. The system may have ended it."""
        return not FORKS or not (self.ended or self._connection.poll(0))

    def call(
        self,
        function: Callable[..., Result],
        *args: Any,
        what: str,
        cancellation: Cancellation | None = None,
        seconds: float = CPU_SECONDS,
    ) -> Result:
        """Call a function in the process. After a limit or a cancellation, the process has ended.

        Args:
            function: a function of a module.
            *args: arguments that can be pickled.
            what: the data that it works on, for the message.
            cancellation: ends the work; by default that of the calling code.
            seconds: its processor time at most.

        Raises:
            ConfigError: the work takes too much time or memory, or has crashed.
            RequestCancelledError: it was cancelled.
            Exception: that of the function.
        """
        cancellation = cancellation or current_cancellation()
        cancellation.check()
        if not FORKS:
            return function(*args)
        try:
            self._connection.send((_name(function), args, seconds))
            if not self._connection.poll(QUICK):
                self.slow = True
                with cancellation.heard_by(self.end), resting():
                    if not self._connection.poll(WALL_SECONDS):
                        self.end()
                require_running()
            succeeded, result = self._connection.recv()
        except (EOFError, OSError):
            self.end()
            cancellation.check()
            raise _too_much(what) from None
        except BaseException:  # an interrupt: the answer would be taken for that to the next call
            self.end()
            raise
        if succeeded:
            return result
        raise result

    def end(self) -> None:
        """End the process, in the middle of a call too. Can be called from any thread, and repeatedly."""
        self.ended = True
        if FORKS:
            self._end()


def run(function: Callable[..., Result], *args: Any, what: str) -> Result:
    """Call a function of a module in a worker process; arguments and errors as for :meth:`Worker.call`."""
    if not FORKS:
        return function(*args)
    name = _name(function)
    worker, result = started(Load(name, _prepared, lambda: (name,)), function, *args, what=what, data=args)
    give_back([worker])
    return result


def started(load: Load, function: Callable[..., Result], *args: Any, what: str, data: object) -> tuple[Worker, Result]:
    """A new worker, and the result of its first call.

    Short tasks do not wait for long ones. Every task begins among the short ones. One that takes longer than
    :data:`SHORT_SECONDS` is begun again among the long ones, which are few at a time and have a low priority.

    Args:
        load: what is loaded in it.
        function: as for :meth:`Worker.call`, with its errors.
        *args: its arguments.
        what: the data that it works on, for the message.
        data: that of the arguments by which the task is known when it comes again.
    """
    if _refused and time.monotonic() - _refused.get(_digest(load, data), -sys.maxsize) < REFUSED_SECONDS:
        raise _too_much(what)
    for lane, seconds in ((_short, SHORT_SECONDS), (_long, CPU_SECONDS)):
        with _turn(lane):
            worker, begun = worker_with(load), time.monotonic()
            try:
                return worker, worker.call(function, *args, what=what, seconds=seconds)
            except _TooMuchError:
                pass
            except Exception:
                give_back([worker])
                raise
    if time.monotonic() - begun < WALL_SECONDS:  # and not for other work on the processors
        _refused[_digest(load, data)] = time.monotonic()
        for digest in [*_refused][:-MOST_REFUSED]:
            _refused.pop(digest, None)
    raise _too_much(what)


class _TooMuchError(ConfigError):
    """A worker ended at a limit. Functions that it calls raise other errors."""


def _too_much(what: str) -> _TooMuchError:
    return _TooMuchError(
        f"{what} takes too much time or memory, or is nested too deeply: the limits are {CPU_SECONDS:g} seconds "
        f"of processor time and {MEMORY_MB} MB. Simplify it: fewer properties, alternatives and references, "
        "smaller numbers in multipleOf and in repetitions."
    )


def _digest(load: Load, data: object) -> bytes:
    return hashlib.sha256(pickle.dumps((load.key, data))).digest()


def give_back(workers: Sequence[Worker]) -> None:
    """Keep workers for other tasks, except for those that may have much memory left from a long call."""
    _spares.extend([each for each in workers if not (each.ended or each.slow)][: MOST_SPARES - len(_spares)])


def worker_with(load: Load) -> Worker:
    """A worker for which something is loaded. Another one is begun for the next caller, because a fork takes time."""
    worker = None
    while worker is None and _spares:
        with contextlib.suppress(IndexError):  # another thread has taken the last one
            spare = _spares.pop()
            worker = spare if spare.waits and load.key in spare._loaded else None
    worker = worker or Worker(load)
    while FORKS and len(_spares) < SPARES:
        _spares.appendleft(Worker(load))
    return worker


@contextlib.contextmanager
def _turn(lane: threading.Semaphore) -> Iterator[None]:
    """Within the block, only few others work, so that many large tasks at once do not take all memory.

    Raises:
        RequestCancelledError: the calling code was cancelled while it waited.
    """
    cancellation = current_cancellation()
    while not lane.acquire(timeout=QUICK):
        cancellation.check()
    try:
        yield
    finally:
        lane.release()


def _name(function: Callable[..., object]) -> tuple[str, str, str]:
    """The file, the module and the name of a function."""
    return str(sys.modules[function.__module__].__file__), function.__module__, function.__name__


class _Server:
    """The server process, seen from the process that uses it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        program = f"import sys; sys.path[:] = {sys.path!r}; from cocoa_engine.confined import serve; serve()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends the program alone, and its end is that of the server
            )
        self._socket, self._connection = ours, Connection(os.dup(ours.fileno()))
        self._lock = free_in_child(threading.Lock())
        self._loaded: set[object] = set()
        self._numbers = itertools.count()
        self._told: deque[tuple[str, object]] = deque()

    def fork(self, loads: Sequence[Load]) -> tuple[Connection, int, frozenset[object]]:
        """The connection to a new worker, its number, and the keys of what is loaded in it."""
        ours, theirs = socket.socketpair()
        with contextlib.closing(theirs), contextlib.ExitStack() as failing:
            failing.callback(ours.close)
            try:
                with self._lock:
                    for load in loads:
                        if load.key not in self._loaded:
                            self._connection.send(("load", load.key, _name(load.function), load.arguments()))
                            self._loaded.add(load.key)
                    number, loaded = next(self._numbers), frozenset(self._loaded)
                    self._connection.send(("fork", number))
                    socket.send_fds(self._socket, [b"w"], [theirs.fileno()])
            finally:
                self._flush()
            failing.pop_all()
        return Connection(ours.detach()), number, loaded

    def tell(self, task: str, key: object) -> None:
        """Tell it to end the worker of a number, or to unload what has a key. It may take place later."""
        self._loaded.discard(key)
        self._told.append((task, key))
        self._flush()

    def _flush(self) -> None:
        # a finalizer may run inside of `fork`, which then does it
        while self._told and self._lock.acquire(blocking=False):
            try:
                while self._told:
                    self._connection.send(self._told.popleft())
            except OSError:  # the server has ended, and its workers with it
                self._told.clear()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Close the connection, at which the server ends, unless another process has it too."""
        self._socket.close()
        self._connection.close()


_server: _Server | None = None
_starting = free_in_child(threading.Lock())
_spares: deque[Worker] = deque()
_refused: dict[bytes, float] = {}
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _lanes() -> tuple[threading.Semaphore, threading.Semaphore]:
    """The places of short tasks, which take little memory, and those of long ones."""
    processors = os.cpu_count() or 1
    return threading.Semaphore(4 * processors), threading.Semaphore(max(1, processors - 1))


_short, _long = _lanes()


def _forked(loads: Sequence[Load]) -> tuple[_Server, Connection, int, frozenset[object]]:
    global _server
    for _ in range(2):
        server = _server
        try:
            with _starting:
                server = _server = _server or _Server()
            return server, *server.fork(loads)
        except OSError:  # somebody has ended the server, or it cannot be started
            with _starting:
                _server = None if _server is server else _server
    raise ConfigError("the process that compiles grammars cannot be started, or is ended by something else each time.")


def unload(key: object) -> None:
    """Free what a :class:`Load` has loaded."""
    _results.pop(key, None)
    if _server is not None:
        _server.tell("unload", key)


def _forget_server() -> None:
    """In a forked child: the server is the parent's."""
    global _server, _short, _long
    if _server is not None:
        _server.close()
    _server, (_short, _long) = None, _lanes()
    for worker in list(_workers):  # the answers are for the parent
        worker.ended = True
        worker._end.detach()
        worker._connection.close()
    _workers.clear()
    _spares.clear()


call_in_child(_forget_server)


# what runs in the server and in the workers

_results: dict[object, tuple[bool, Any]] = {}


def loaded(key: object) -> Any:
    """In a worker: what a :class:`Load` has loaded.

    Raises:
        Exception: that of its function.
    """
    succeeded, result = _results[key]
    if succeeded:
        return result
    raise result


def serve() -> NoReturn:
    """The server: load, fork and end workers, as the process at standard input says."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as it may be inherited, workers cannot be waited for
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # running answers of a server that drains need their workers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory is short, a worker ends before the program does
    control = socket.socket(fileno=os.dup(0))
    connection, workers = Connection(os.dup(0)), dict[int, int]()
    while True:
        try:
            task, key, *rest = connection.recv()
        except (EOFError, OSError):
            break
        if task == "load":
            name, arguments = rest
            _results[key] = _outcome(_function(name), arguments)
            gc.freeze()  # what workers do not collect they do not copy
        elif task == "unload":
            _results.pop(key, None)
        elif task == "end":
            if (pid := workers.pop(key, None)) is not None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        else:
            _, handles, _, _ = socket.recv_fds(control, 1, 1)
            if not handles:  # the program has just ended
                break
            (handle,) = handles
            with contextlib.suppress(OSError):  # no more processes: the caller sees a closed connection
                pid = os.fork()
                if pid == 0:
                    control.close()
                    connection.close()
                    _work(Connection(handle))
                workers[key] = pid
            os.close(handle)
    for pid in workers.values():
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _work(connection: Connection) -> NoReturn:
    """A worker: call functions until the connection is closed."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 2):  # Rust writes there what it aborts for
        os.dup2(null, stream)
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as pages:
        size = int(pages.read().split()[0]) * resource.getpagesize() + MEMORY_MB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    low = False
    while True:
        try:
            name, args, seconds = connection.recv()
            if seconds > SHORT_SECONDS and not low:
                low = True
                os.nice(LOW)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            answer = _outcome(_function(name), args)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(answer)
        except BaseException:  # the connection is closed, or there is no memory left
            os._exit(0)


def _outcome(function: Callable[..., object], args: Sequence[Any]) -> tuple[bool, Any]:
    """Whether a function succeeds, and its result or its error."""
    try:
        return True, function(*args)
    except MemoryError:
        raise
    except Exception as error:
        return False, error


def _prepared(name: tuple[str, str, str]) -> None:
    """In the server: import the module of a function, and the optional packages that it uses."""
    for package in getattr(sys.modules[_function(name).__module__], "USES", ()):
        with contextlib.suppress(ImportError):
            import_module(package)


def _function(name: tuple[str, str, str]) -> Callable[..., Any]:
    """A function by its name. Its module is read without the package around it, which may import torch."""
    file, module, function = name
    if module not in sys.modules:
        spec = spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], function)
