"""The decoding methods: one file each, named after the method (``cocoa-sig`` is ``cocoa_sig.py``).

To add a method, write its file here and add its name to :data:`~cocoa_engine.config.MethodName`.
"""

from importlib import import_module
from typing import get_args

from cocoa_engine.config import MethodName
from cocoa_engine.methods.base import ContrastingMethod, DecodingMethod, SamplingMethod


def _load(name: MethodName) -> DecodingMethod:
    """Import the file of a method and create the one :class:`DecodingMethod` that it defines."""
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    (method,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, DecodingMethod) and value.__module__ == module.__name__
    )
    return method()


METHODS: dict[str, DecodingMethod] = {name: _load(name) for name in get_args(MethodName)}
"""All decoding methods by name."""

__all__ = ["METHODS", "ContrastingMethod", "DecodingMethod", "SamplingMethod"]
