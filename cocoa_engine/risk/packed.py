"""Lists of numbers that a calibrator's file holds as one text: base64 of little-endian float32."""

from __future__ import annotations

import binascii
import math
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer


def _decoded(value: Any) -> Any:
    """The numbers of a text; another value as it is."""
    if not isinstance(value, str):
        return value
    try:
        numbers = array("f", b64decode(value, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"it is not base64 of float32 numbers: {error}") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)


def _rounded(values: tuple[float, ...]) -> tuple[float, ...]:
    numbers = tuple(array("f", values))
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number is infinite or NaN")
    return numbers


def _write(values: Sequence[float]) -> str:
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode("ascii")


Floats32 = Annotated[
    tuple[float, ...], BeforeValidator(_decoded), AfterValidator(_rounded), PlainSerializer(_write, when_used="json")
]
"""A tuple of finite numbers, rounded to float32; base64 in JSON."""
