"""Hypothesis strategies for files that are broken on purpose: good ones with one or a few changes, and any bytes.

The ordinary tests take few examples, the same in every run. ``make fuzz`` takes more, other ones in each run: it sets
``COCOA_FUZZ_EXAMPLES``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, settings
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
    """What a call returns, or one of the package's own errors, checked to be one short line for a terminal.

    Any other exception is raised, and fails the test.
    """
    try:
        return call()
    except CocoaError as error:
        refused = error
    message = str(refused)
    assert type(refused) is not CocoaError
    assert 0 < len(message) <= MESSAGE_LIMIT, f"{len(message)} characters: {message[:200]!r}"
    assert not CONTROLS.search(message), repr(message)
    message.encode()  # a terminal cannot show half of a surrogate pair
    return refused


_STRANGE_TEXTS = [
    "",
    " ",
    ESCAPES,
    "\ud800",
    "x" * 5000,
    "\u202e" * 900,
    "null",
    "../../etc/passwd",
    "a\0b",
    "日本",
    "é",
]

strange: st.SearchStrategy[Any] = st.sampled_from(
    [
        *_STRANGE_TEXTS,
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        10**30,
        -(10**300),
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        [],
        {},
        [None],
        [[]],
        [1, 2],
        [0, -1],
        [2**40, 1],
        ["a"] * 3,
        {"a": 1},
        {"": {}},
        {ESCAPES: ESCAPES},
    ]
)
"""A value that a field should not have."""

_TOKENS: list[bytes] = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\n",
    b"\r",
    b'"',
    b",",
    b"{",
    b"}",
    b"[",
    b"]]",
    b"\\ud800",
    b"\\",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"null",
    b"\x1b[2J",
    "\u202e".encode(),
    "\u2028".encode(),
    b"[" * 100_000,
    b'{"a":' * 990,
    b"\x80" * 9,
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

    Args:
        good: the value.
        more: fields that it may have, each with values that it may have. If there are any, one is added half the time.
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


_OTHER_VALUES: list[Any] = [
    *(None, True, 0, -1, 3, 0.5, 10**400, -(10**30), 2**63, 1e308, float("nan"), float("-inf")),
    *("", "x", "1", "\ud800", [], [None], [[]], [0, -1], ["a"], [10**400], {}, {"a": 1}),
]


def each_change(good: Any) -> Iterator[tuple[str, Any]]:
    """A JSON value with each of its parts replaced by each other kind of value, removed, or with a field more.

    Yields:
        What was changed, and the value. Of a list, the first and the last element are changed.
    """
    parts: list[tuple[str, Any, Any]] = [("the whole", None, None)]
    for parent, key in _places(good):
        if isinstance(parent, dict) or key in (0, len(parent) - 1):
            parts.append((str(key), parent, key))
    for name, parent, key in parts:
        for other in _OTHER_VALUES:
            yield f"{name} = {str(other)[:40]}", _with(good, parent, key, lambda value, other=other: other)
        if parent is not None:
            yield f"without {name}", _with(good, parent, key, None)
        yield f"{name} with more", _with(good, parent, key, _with_more)


def _with_more(value: Any) -> Any:
    if isinstance(value, dict):
        return {**value, "x": 1, "": None}
    return [*value, *value, None] if isinstance(value, list) else [value]


def _with(value: Any, parent: Any, key: Any, change: Callable[[Any], Any] | None) -> Any:
    """A copy with a changed part, or without it."""
    if parent is None:
        return change(value) if change else None
    if isinstance(value, dict):
        found = {k: _with(v, parent, key, change) for k, v in value.items()}
    elif isinstance(value, list):
        found = [_with(v, parent, key, change) for v in value]
    else:
        return value
    if value is parent:
        if change is None:
            del found[key]
        else:
            found[key] = change(found[key])
    return found


def _places(value: Any) -> Any:
    """Each (container, key) in a JSON value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        for key in list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ():
            yield one, key
            waiting.append(one[key])


def broken(good: bytes) -> st.SearchStrategy[bytes]:
    """A broken file: any bytes, or a good file that was changed."""
    return st.one_of(mutated(good), mutated(good), mutated(good), st.binary(max_size=200))


def broken_json(good: Any, more: Mapping[str, Sequence[Any]] | None = None) -> st.SearchStrategy[bytes]:
    """A broken JSON file: a changed value four times out of five, otherwise changed or any bytes.

    Args:
        good, more: as for :func:`mutated_json`.
    """
    text = st.one_of(*[mutated_json(good, more)] * 4).map(_dumped)
    return st.one_of(text, text, text, text, broken(_dumped(good)))


def broken_lines(good: list[Any]) -> st.SearchStrategy[bytes]:
    """The same as :func:`broken_json` for a file of JSON lines."""
    lines = mutated_json(good).map(
        lambda rows: b"\n".join(map(_dumped, rows if isinstance(rows, list) else [rows])) + b"\n"
    )
    return st.one_of(lines, lines, lines, lines, broken(b"\n".join(map(_dumped, good)) + b"\n"))


def _dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 2000
