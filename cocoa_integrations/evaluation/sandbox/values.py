"""The messages between worker and judge: JSON with a length before it. They carry plain data only.

Python's built-in values, deques, ranges, decimals and fractions cross by value. Subclasses become their base class, so
that no method of the code, such as ``__eq__``, reaches the judge. Iterators cross as their items. Everything else
crosses as the number of an object that stays in the worker.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView
from decimal import Decimal
from fractions import Fraction
from json import dumps, loads
from typing import Any

MAX_MESSAGE = 2**20  # bytes
MAX_ITEMS = 100_000  # of one iterator; an endless one ends here, and is then too long for a message or a wrong answer
_SMALL = 2**53  # JSON's numbers are exact below it
_ITERATE: dict[type, Callable[[Any], Iterator[Any]]] = {
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
}


class MessageError(Exception):
    """A message is too long, is not JSON, or has no value in it."""


class Channel:
    """Two file descriptors to read messages from and write them to."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target

    def send(self, message: dict[str, Any]) -> None:
        """Write a message.

        Raises:
            MessageError: it is longer than :data:`MAX_MESSAGE`.
        """
        body = dumps(message).encode()
        if len(body) > MAX_MESSAGE:
            raise MessageError(f"a value of more than {MAX_MESSAGE} bytes")
        data = memoryview(len(body).to_bytes(4, "big") + body)
        while data:
            data = data[os.write(self._target, data) :]

    def receive(self) -> dict[str, Any]:
        """Read the next message. Never reads more than :data:`MAX_MESSAGE` bytes.

        Raises:
            EOFError: the other process has ended.
            MessageError: the message is too long, or not a JSON object.
        """
        length = int.from_bytes(self._read(4), "big")
        if length > MAX_MESSAGE:
            raise MessageError(f"a message of {length} bytes; at most {MAX_MESSAGE} are read")
        try:
            message = loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise MessageError(f"a message that is not JSON ({error})") from None
        if not isinstance(message, dict):
            raise MessageError("a message that is not a JSON object")
        return message

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = os.read(self._source, count - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON.

    Args:
        value: any object.
        keep: returns the number of an object that does not cross by value.
    """

    def each(items: Iterable[Any]) -> list[Any]:
        return [encode(item, keep) for item in items]

    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_SMALL < number < _SMALL else {"int": hex(number)}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, list):
        return each(list.__iter__(value))
    if isinstance(value, dict):
        return {"dict": [each(pair) for pair in dict.items(value)]}
    for kind in _ITERATE:
        if isinstance(value, kind):
            return {kind.__name__: each(_ITERATE[kind](value))}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes" if isinstance(value, bytes) else "bytearray": bytes(value).hex()}
    if isinstance(value, range):
        return {"range": each((value.start, value.stop, value.step))}
    if isinstance(value, Decimal):
        return {"Decimal": Decimal.__str__(value)}
    if isinstance(value, Fraction):
        return {"Fraction": each((value.numerator, value.denominator))}
    if isinstance(value, (KeysView, ItemsView)):
        return {"set": each(value)}
    if isinstance(value, Iterator):
        return {"iterator": [encode(item, keep) for item, _ in zip(value, range(MAX_ITEMS), strict=False)]}
    return {"object": keep(value)}


def decode(value: Any, find: Callable[[int], Any]) -> Any:
    """The value of :func:`encode`.

    Args:
        value: what :func:`encode` returned.
        find: returns the object with a number.

    Raises:
        MessageError: it is not a value of :func:`encode`.
    """
    try:
        return _decode(value, find)
    except MessageError:
        raise
    except (ValueError, TypeError, ArithmeticError, RecursionError, LookupError) as error:
        raise MessageError(f"a value that is no plain data ({type(error).__name__}: {error})") from None


def _decode(value: Any, find: Callable[[int], Any]) -> Any:
    if isinstance(value, float):
        raise MessageError("a number that is not written as a value")
    if isinstance(value, list):
        return [_decode(one, find) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in ("int", "float", "bytes", "bytearray", "Decimal") and isinstance(content, str):
        return _TEXTS[kind](content)
    if kind == "object":
        return find(int(content))
    if kind == "dict":
        return {_decode(key, find): _decode(one, find) for key, one in content}
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind in _KINDS and isinstance(content, list):
        return _KINDS[kind]([_decode(one, find) for one in content])
    raise MessageError(f"a value of the unknown kind {kind!r}")


_TEXTS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "Decimal": Decimal,
}
_KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "iterator": iter,
    "range": lambda parts: range(*parts),
    "Fraction": lambda parts: Fraction(*parts),
}
