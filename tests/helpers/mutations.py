"""Hypothesis strategies for files that are broken on purpose: good ones with one or a few changes, and any bytes.

The ordinary tests take few examples, the same in every run. ``make fuzz`` takes more, other ones in each run: it sets
``COCOA_FUZZ_EXAMPLES``.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cocoa_engine import CocoaError

EXAMPLES = os.environ.get("COCOA_FUZZ_EXAMPLES")

MESSAGE_LIMIT = 1000  # characters

ESCAPES = "\x1b[31m\x1b]0;t\x07\x9b2J\u202e\u2066\x00\r\x7f\x85"
"""Terminal codes, characters that reverse the direction of text, and other control characters."""

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What no message and no rendering may contain."""


def fuzz(examples: int = 25) -> settings:
    """The number of examples of a test: ``examples``, or that of ``make fuzz``."""
    return settings(
        max_examples=int(EXAMPLES or examples),
        derandomize=EXAMPLES is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or one of the package's own errors, checked to be one short line for a terminal."""
    try:
        return call()
    except CocoaError as error:
        refused, message = error, str(error)
    assert type(refused) is not CocoaError
    assert 0 < len(message) <= MESSAGE_LIMIT, f"{len(message)} characters: {message[:200]!r}"
    assert not CONTROLS.search(message), repr(message)
    message.encode()  # a terminal cannot show half of a surrogate pair
    return refused


def survives(
    file: Path,
    data: st.SearchStrategy[bytes],
    read: Callable[[], Any],
    check: Any = None,  # of what was read: whether it is right
    examples: int = 25,
    worst: Iterable[bytes] = (),  # what is tried in any case
    refusal: type[CocoaError] = CocoaError,
) -> None:
    """What is written to a file is read, or refused by one of the package's errors."""

    def tried(data: bytes) -> None:
        file.write_bytes(data)
        found = outcome(read)
        assert isinstance(found, refusal if isinstance(found, Exception) else object)
        assert check is None or isinstance(found, Exception) or check(found)

    read()
    for bad in worst:
        tried(bad)
    fuzz(examples)(given(data)(tried))()


_OTHER_VALUES: list[Any] = [
    *(None, True, 0, -1, 3, 0.5, 10**400, -(10**30), 2**63, 1e308, float("nan"), float("-inf")),
    *("", "x", "1", "\ud800", [], [None], [[]], [0, -1], ["a"], [10**400], {}, {"a": 1}),
]

strange: st.SearchStrategy[Any] = st.sampled_from(
    [
        *_OTHER_VALUES,
        *(False, 1, 2**31, float("inf"), [1, 2], [2**40, 1], ["a"] * 3, {"": {}}, {ESCAPES: ESCAPES}),
        *(" ", ESCAPES, "x" * 5000, "\u202e" * 900, "null", "../../etc/passwd", "a\0b", "日本", "é"),
    ]
)
"""A value that a field should not have."""

_TOKENS: list[bytes] = [
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b"9" * 5000, b"\x1b[2J", b"\x80" * 9),
    *b'" , { } [ ]] \\ud800 \\ NaN -Infinity 1e999 null'.split(),
    *("\u202e".encode(), "\u2028".encode(), b"[" * 100_000, b'{"a":' * 990),
]


@st.composite
def mutated(draw: st.DrawFn, good: bytes) -> bytes:
    """A good file with one to three places changed: bytes set, removed, repeated or inserted, or the rest cut off."""
    data = good
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 1, 2, 8, 40]))
        before, there, after = data[:start], data[start : start + length], data[start + length :]
        kind = draw(st.sampled_from(["insert", "set", "repeat", "cut", "end"]))
        if kind == "insert":
            there = draw(st.sampled_from(_TOKENS)) + there
        elif kind == "set":
            there = draw(st.binary(min_size=len(there), max_size=len(there)))
        elif kind == "repeat":
            there *= 3
        elif kind == "cut":
            there = b""
        else:
            after = b""
        data = before + there + after
    return data


@st.composite
def mutated_json(draw: st.DrawFn, good: Any, more: Mapping[str, Sequence[Any]] | None = None) -> Any:
    """A JSON value with one or two of its parts replaced, removed, renamed or nested deeply.

    Half the time, one of the fields of ``more`` is added, with one of its values.
    """
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 2))):
        if more and draw(st.booleans()):
            name = draw(st.sampled_from(list(more)))
            value[name] = deepcopy(draw(st.one_of(st.sampled_from(more[name]), strange)))
            continue
        places = list(_places(value))
        if not places:
            break
        parent, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "nest"]))
        if kind == "replace":
            parent[key] = deepcopy(draw(strange))
        elif kind == "remove":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["x", "", ESCAPES, "\ud800", "y" * 3000]))] = parent.pop(key)
        elif kind == "nest":
            for _ in range(draw(st.one_of(st.just(1), st.integers(700, 990)))):
                parent[key] = [parent[key]]
    return value


def each_change(good: Any) -> Iterator[tuple[str, Any]]:
    """What was changed, and a JSON value with that part replaced by another kind of value, removed or extended.

    Of a list, the first and the last element are changed.
    """
    text = json.dumps([good])

    def copy(number: int) -> tuple[Any, Any, Any]:
        whole = json.loads(text)
        return whole, *list(_places(whole))[number]

    for number, (parts, place) in enumerate(list(_places([good]))):
        if isinstance(parts, list) and place not in (0, len(parts) - 1):
            continue
        name = str(place) if number else "the whole"
        values = {f"{name} = {str(other)[:40]}": other for other in _OTHER_VALUES}
        for what, value in {**values, f"{name} with more": _with_more(parts[place])}.items():
            whole, parent, key = copy(number)
            parent[key] = value
            yield what, whole[0]
        if number:
            whole, parent, key = copy(number)
            del parent[key]
            yield f"without {name}", whole[0]


def _with_more(value: Any) -> Any:
    if isinstance(value, dict):
        return {**value, "x": 1, "": None}
    return [*value, *value, None] if isinstance(value, list) else [value]


def _places(value: Any) -> Any:
    """Each (container, key) in a JSON value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        for key in list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ():
            yield one, key
            waiting.append(one[key])


def broken(good: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(*[mutated(good)] * 3, st.binary(max_size=200))


def broken_json(good: Any, more: Mapping[str, Sequence[Any]] | None = None) -> st.SearchStrategy[bytes]:
    """A broken JSON file: a changed value (as of :func:`mutated_json`) four times out of five, else changed bytes."""
    return st.one_of(*[mutated_json(good, more).map(_dumped)] * 4, broken(_dumped(good)))


def broken_lines(good: list[Any]) -> st.SearchStrategy[bytes]:

    def joined(rows: Any) -> bytes:
        return b"\n".join(map(_dumped, rows if isinstance(rows, list) else [rows])) + b"\n"

    return st.one_of(*[mutated_json(good).map(joined)] * 4, broken(joined(good)))


def _dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 2000
