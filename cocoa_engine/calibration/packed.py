"""Lists of numbers that a calibrator's file holds as one text: base64 of little-endian float32."""

from __future__ import annotations

import binascii
import math
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer


def _read(value: Any) -> tuple[float, ...]:
    if isinstance(value, str):
        try:
            numbers = array("f", b64decode(value, validate=True))
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"it is not base64 of float32 numbers: {error}") from None
        if sys.byteorder == "big":
            numbers.byteswap()
    elif isinstance(value, Sequence):
        numbers = array("f", value)
    else:
        raise ValueError(f"it must be a text or a list of numbers, not {type(value).__name__}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number is infinite or NaN")
    return tuple(numbers)


def _write(values: Sequence[float]) -> str:
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode("ascii")


Floats32 = Annotated[tuple[float, ...], BeforeValidator(_read), PlainSerializer(_write, when_used="json")]
"""A tuple of finite numbers, rounded to float32; base64 in JSON."""
