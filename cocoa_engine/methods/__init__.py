"""The registry of decoding methods. A further method is one new file here and one line below."""

from __future__ import annotations

from cocoa_engine.methods.base import ContrastingMethod, DecodingMethod
from cocoa_engine.methods.cocoa import Cocoa
from cocoa_engine.methods.cocoa_sig import CocoaSig
from cocoa_engine.methods.decore import Decore
from cocoa_engine.methods.diver import Diver
from cocoa_engine.methods.dola import Dola
from cocoa_engine.methods.greedy import Greedy

METHODS: dict[str, DecodingMethod] = {
    method.name: method
    for method in (
        Greedy(),
        Cocoa(),
        CocoaSig(),
        Dola(),
        Decore(),
        Diver(),
    )
}

__all__ = ["METHODS", "ContrastingMethod", "DecodingMethod"]
