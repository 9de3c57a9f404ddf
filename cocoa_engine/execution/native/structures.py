"""The structures that Python and kernels.cpp share."""

from __future__ import annotations

import ctypes
from typing import Any

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
    memory: Any
    """What the addresses point to."""


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
    memory: Any
    """What the addresses point to."""


class Tap(ctypes.Structure):
    """A layer, and the address to which the states before it are copied."""

    _fields_ = (("layer", _LONG), ("to", _POINTER))


class Head(ctypes.Structure):
    """An attention head."""

    _fields_ = (("layer", _LONG), ("head", _LONG))


KINDS = {name: number for number, name in enumerate(("F32", *BLOCK_KINDS, "BF16_BOTH"))}
"""The types of weights that the kernels read, and the numbers that they give them. BF16_BOTH is bfloat16 whose inputs
may be rounded to it, too."""
