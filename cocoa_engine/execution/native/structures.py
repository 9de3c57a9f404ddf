"""The structures that Python and kernels.cpp share, and the check that both have the same layout."""

from __future__ import annotations

import ctypes

from cocoa_engine.model.blocks import BLOCK_KINDS

_LONG, _FLOAT, _POINTER = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class Joined(ctypes.Structure):
    """Linear layers that read the same input."""

    _fields_ = (
        ("count", _LONG),
        *((name, _POINTER) for name in ("weights", "biases", "outs", "kinds")),
        ("in", _LONG),
    )


class DecoderLayer(ctypes.Structure):
    """The weights of one decoder layer."""

    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, Joined) for name in ("qkv", "out", "gate_up", "down")),
        ("windowed", _LONG),
    )


class Stack(ctypes.Structure):
    """All decoder layers and the norm after them."""

    _fields_ = (
        *((name, _LONG) for name in ("layers", "width", "heads", "kv_heads", "dim", "inner")),
        *((name, _FLOAT) for name in ("eps", "scale")),
        *((name, _POINTER) for name in ("layer", "norm")),
    )


class Leaves(ctypes.Structure):
    """The tokens that one sequence feeds."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _LONG) for name in ("kv_head", "start", "count")),
        ("mask", _POINTER * 2),
        ("masked_from", _LONG * 2),
        ("parts", _LONG),
        ("ranges", _POINTER),
        ("range_count", _LONG),
    )


class Tap(ctypes.Structure):
    """A layer, and the address to which the states before it are copied."""

    _fields_ = (("layer", _LONG), ("to", _POINTER))


class Head(ctypes.Structure):
    """An attention head."""

    _fields_ = (("layer", _LONG), ("head", _LONG))


KINDS = {name: number for number, name in enumerate(("F32", *BLOCK_KINDS, "BF16_BOTH"))}
"""The types of weights that the kernels read, and the numbers that they give them. BF16_BOTH is bfloat16 whose inputs
may be rounded to it, too."""

SHARED: tuple[type[ctypes.Structure], ...] = (Joined, DecoderLayer, Stack, Leaves, Tap, Head)
"""All structures that the kernels read."""


def mismatch(library: ctypes.CDLL) -> str | None:
    """The first layout difference between the library and Python, or ``None``."""
    layout = library.cocoa_layout
    layout.argtypes, layout.restype = [ctypes.c_char_p], _LONG
    for structure in SHARED:
        name = structure.__name__
        offsets = {f"{name}.{field[0]}": getattr(structure, field[0]).offset for field in structure._fields_}
        for known, here in {name: ctypes.sizeof(structure), **offsets}.items():
            if (there := layout(known.encode())) != here:
                what = "offset" if "." in known else "size"
                return f"structure {name} differs: {what} of {known} is {there} in the library, {here} in Python"
    for name, number in KINDS.items():
        if (there := layout(f"Kind.{name}".encode())) != number:
            return f"the type of weights {name} differs: its number is {there} in the library, {number} in Python"
    return None
