"""The process that runs the tests. The code under test is in another process, whose objects are behind a channel."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from json import dumps, loads
from types import CodeType
from typing import Any

from .process import confine, reason_of, silence
from .values import Channel, MessageError, decode, encode


class CodeError(Exception):
    """An error of the code that is no built-in exception."""


class Code:
    """The code under test, in its process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def ask(self, do: str, **request: Any) -> Any:
        """The reply of the worker to a request.

        Raises:
            Exception: what the code raised, if it is a built-in exception.
            CodeError: the code raised another exception, ended its process, or sent no plain data.
        """
        try:
            self._channel.send({"do": do, **request})
            return self.reply()
        except (EOFError, BrokenPipeError):
            raise CodeError("the code ended its process before its tests had passed") from None
        except MessageError as error:
            raise CodeError(f"the code sent {error}") from None

    def reply(self) -> Any:
        """The value or the error of the next message."""
        message = self._channel.receive()
        if "error" in message:
            raise _error(message["error"])
        return decode(message.get("value"), lambda number: Remote(self, number))


class Remote:
    """An object of the code. It can be called, and its attributes be read and set. It is equal only to itself."""

    __slots__ = ("_code", "_number")

    def __init__(self, code: Code, number: int) -> None:
        object.__setattr__(self, "_code", code)
        object.__setattr__(self, "_number", number)

    def __call__(self, *values: Any, **options: Any) -> Any:
        return self._code.ask(
            "call", object=self._number, values=encode(list(values), _number_of), options=encode(options, _number_of)
        )

    def __getattr__(self, name: str) -> Any:
        return self._code.ask("get", object=self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._code.ask("set", object=self._number, name=name, values=encode([value], _number_of))


def main() -> None:
    """Read the job from stdin, run its tests, and report ``{"passed", "reason"}`` on stdout."""
    report, job = os.dup(1), loads(sys.stdin.buffer.read())
    silence()
    passed, reason = _judged(job)
    os.write(report, dumps({"passed": passed, "reason": reason}).encode())
    os._exit(0)


def _judged(job: dict[str, Any]) -> tuple[bool, str]:
    channel = Channel(*job["channel"])
    limits = {name: job[name] for name in ("seconds", "memory_mb", "confined")}
    try:
        confine(job["test_modules"], **limits)
        channel.send({"code": job["code"], "modules": job["modules"], **limits})
        code = Code(channel)
        code.reply()
        names: dict[str, Any] = {"__name__": "__test__"}
        for test in job["tests"]:
            compiled = compile(test, "<test>", "exec")
            for name in _names(compiled):
                if name not in names:
                    names.update(_found(code, name, job["tested"]))
            exec(compiled, names)
    except EOFError:
        return False, "the code ended its process before its tests had passed"
    except MessageError as error:
        return False, f"the code sent {error}"
    except BaseException as error:  # whatever a test raises
        kind, message = reason_of(error)
        if kind == CodeError.__name__:
            return False, message
        return False, f"{kind}: {message}" if message else kind
    return True, "passed"


def _found(code: Code, name: str, tested: list[str]) -> dict[str, Any]:
    """The object with a name, if the code defines it. Python's own come from here: the code could replace them."""
    if name not in tested and hasattr(builtins, name):
        return {}
    if code.ask("has", name=name) is not True:
        return {}
    if name not in tested and name in sys.stdlib_module_names:
        return {name: import_module(name)}
    return {name: code.ask("name", name=name)}


def _names(compiled: CodeType) -> Iterator[str]:
    """The names that a statement uses, with those of the functions and comprehensions in it."""
    yield from compiled.co_names
    for constant in compiled.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _error(given: Any) -> Exception:
    kind, message = (str(part) for part in given)
    built_in = getattr(builtins, kind, None)
    if isinstance(built_in, type) and issubclass(built_in, Exception):
        try:
            return built_in(message) if message else built_in()
        except TypeError:  # such as a UnicodeDecodeError
            pass
    return CodeError(f"{kind}: {message}" if message else kind)


def _number_of(value: Any) -> int:
    if isinstance(value, Remote):
        number: int = object.__getattribute__(value, "_number")
        return number
    raise TypeError(f"a test passes a {type(value).__name__} to the code: only plain data and the code's own objects")
