"""Tool calls that were read from an answer."""

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4


def new_id() -> str:
    """An id for a call: nine letters and digits, as Mistral's templates require."""
    return uuid4().hex[:9]


@dataclass(frozen=True)
class Call:
    """One call, which may be partial. It has ``id`` and ``text``, all of it, once the answer is complete."""

    name: str | None = None  # None before the key of the arguments
    written: str = ""  # the JSON of the arguments so far; all of a call that has no name
    arguments: dict[str, Any] | None = None  # None until they are complete
    offsets: tuple[int, int] = (0, 0)  # in the text of the answer
    values: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each argument; without the quotes of strings
    error: str | None = None  # why it is invalid; in a partial answer, why the request does not allow it
    id: str = ""
    text: str = ""
    is_bare: bool = False  # JSON without the tags of the format


@dataclass(frozen=True)
class CallDelta:
    """The new part of the call with a number in the answer. The first part has ``id`` and ``name``."""

    number: int
    id: str | None
    name: str | None
    written: str
    error: str | None = None  # in the last part of an invalid call


@dataclass(frozen=True)
class Reading:
    """A parsed answer: its text outside of calls, and its calls in order."""

    content: str
    calls: list[Call]
