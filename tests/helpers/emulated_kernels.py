"""Kernels that were compiled for another processor, called in a process of an emulator."""

import ctypes
import gc
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers.processes import LIMIT

DRIVER = Path(__file__).with_suffix(".cpp")
"""The program that the emulator runs, to be linked with the kernels."""


class EmulatedKernels:
    """Stands for the ``ctypes.CDLL`` of the kernels.

    A call sends the memory that its arguments lead to, and writes what comes back to the tensors among it. Both
    processors must lay out structures in the same way. Memory is found among the objects that the garbage collector
    knows and that were made after this one.
    """

    def __init__(self, command: Sequence[str]) -> None:
        gc.freeze()  # older objects are not looked at: a call would take a second
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> "_Function":
        if not name.startswith("cocoa_"):
            raise AttributeError(name)
        function = _Function(self, name)
        setattr(self, name, function)
        return function

    def exchange(self, request: bytes, answer: int) -> bytes:
        """Send a request and receive an answer of so many bytes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request)
        self._process.stdin.flush()
        received = self._process.stdout.read(answer)
        if len(received) != answer:
            raise RuntimeError(f"the emulator ended with {self._process.wait(LIMIT)}")
        return received

    def close(self) -> None:
        self._process.communicate(timeout=LIMIT)
        gc.unfreeze()


class _Function:
    argtypes: Sequence[Any] = ()
    restype: Any = None

    def __init__(self, kernels: EmulatedKernels, name: str) -> None:
        self._kernels, self._name = kernels, name

    def __call__(self, *given: Any) -> int:
        image = _Image(given)
        arguments = [_word(image, value, kind) for value, kind in zip(given, self.argtypes, strict=True)]
        sizes = struct.pack("=32s3q", self._name.encode(), len(arguments), len(image.pointers), len(image.memory))
        pointers = b"".join(struct.pack("=2q", *pair) for pair in image.pointers)
        request = b"".join((sizes, *arguments, pointers, bytes(image.memory)))
        received = self._kernels.exchange(request, 8 + len(image.memory))
        image.write_back(received[8:])
        return int(struct.unpack("=q", received[:8])[0])


def _word(image: "_Image", value: Any, kind: Any) -> bytes:
    if kind is ctypes.c_float:
        return struct.pack("=d", value)
    if kind is ctypes.c_char_p:
        return struct.pack("=q", image.append(value + b"\0"))
    if kind is not ctypes.c_void_p:
        return struct.pack("=q", value)
    address = value if isinstance(value, int) or value is None else ctypes.cast(value, ctypes.c_void_p).value
    return struct.pack("=q", image.offset(address) if address else -1)


class _Image:
    """A copy of all memory that some addresses lead to: tensors and ctypes objects.

    Attributes:
        memory: the copy.
        pointers: pairs (offset of a pointer in the copy, offset of what it points to).
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self.memory, self.pointers = bytearray(), []
        self._copied: dict[int, tuple[int, int]] = {}  # offset and size by address
        self._known: dict[int, tuple[int, Any]] = {}  # size and ctypes type, if it is not a tensor, by address
        for each in (*gc.get_objects(), *given):
            kind = type(each)
            if kind is torch.Tensor and each.device.type == "cpu":
                storage = each.untyped_storage()
                self._known[storage.data_ptr()] = storage.nbytes(), None
            elif issubclass(kind, (ctypes.Array, ctypes.Structure)) and each._b_base_ is None:  # else a part of one
                self._known[ctypes.addressof(each)] = ctypes.sizeof(each), kind

    def append(self, data: bytes, alignment: int = 0) -> int:
        self.memory += bytes((alignment - len(self.memory)) % 64)
        self.memory += data
        return len(self.memory) - len(data)

    def offset(self, address: int) -> int:
        """The offset of an address in the image. Copies the tensor or object around it if necessary."""
        start, (size, kind) = next(
            (start, known) for start, known in self._known.items() if start <= address < start + known[0]
        )
        if start not in self._copied:
            offset = self.append(ctypes.string_at(start, size), start)
            self._copied[start] = offset, size
            for place in _pointers(kind):
                if target := ctypes.c_uint64.from_address(start + place).value:
                    self.pointers.append((offset + place, self.offset(target)))
        return self._copied[start][0] + address - start

    def write_back(self, memory: bytes) -> None:
        for start, (offset, size) in self._copied.items():
            if self._known[start][1] is None:
                ctypes.memmove(start, memory[offset : offset + size], size)


def _pointers(kind: Any) -> Iterator[int]:
    """The offsets of the pointers in a ctypes type."""
    if kind is ctypes.c_void_p:
        yield 0
    elif kind is not None and issubclass(kind, ctypes.Structure):
        for name, part, *_ in kind._fields_:
            yield from (getattr(kind, name).offset + place for place in _pointers(part))
    elif kind is not None and issubclass(kind, ctypes.Array):
        size = ctypes.sizeof(kind._type_)
        yield from (number * size + place for number in range(kind._length_) for place in _pointers(kind._type_))
