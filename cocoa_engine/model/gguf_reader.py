"""Reads the metadata and the tensors of a GGUF file. The tensors stay in the file, which is mapped into memory."""

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocoa_engine.errors import ModelLoadError, short_repr

SUFFIX = ".gguf"

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct's codes
_LENGTH = struct.Struct("<Q")
_SAMPLE = 256  # bytes
_ALIGNMENT = 32  # bytes, unless the metadata says otherwise


class Entry(NamedTuple):
    """A tensor: gguf's name of its type, its shape as in torch, and where its bytes are in a mapped file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int
    file: mmap.mmap


class GgufFile:
    """A GGUF file, mapped into memory, with its further parts if it is the first of a model that was split."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = [_Part(path)]
        self.metadata = files[0].metadata
        self.parts = max(1, _count(path, self.metadata, "split.count", 1))
        if self.parts > 1:
            names = parts_of(path.name)
            if len(names) != self.parts or self.metadata.get("split.no") != 0 or names[0] != path.name:
                raise ModelLoadError(
                    f"{path} is one of {self.parts} parts of a model; give them the names that they had "
                    f"(model-00001-of-{self.parts:05d}{SUFFIX}), and name the first"
                )
            files += [_Part(path.with_name(name)) for name in names[1:]]
        self.tensors = {name: entry for file in files for name, entry in file.tensors.items()}
        self._files = files
        numbers = [_count(file.path, file.metadata, "split.no", 0) for file in files]
        count = sum(len(file.tensors) for file in files)
        if numbers != list(range(len(files))) or count != _count(path, self.metadata, "split.tensors.count", count):
            raise ModelLoadError(f"the parts of {path} do not belong together; fetch them again")

    def metadata_digest(self) -> str:
        """SHA-256 of the metadata as it stands in the file, the vocabulary included."""
        with memoryview(self._files[0].bytes) as data:
            return hashlib.sha256(data[: self._files[0].metadata_end]).hexdigest()

    def sample_digest(self) -> str:
        """SHA-256 of the metadata, the table of tensors, and some bytes of each tensor, of all parts."""
        digest = hashlib.sha256(self.metadata_digest().encode())
        for part in self._files:
            with part.path.open("rb", buffering=0) as file:  # reading it where it is mapped would keep it in memory
                for name, entry in part.tensors.items():
                    digest.update(repr((name, entry.kind, entry.shape)).encode())
                    for start in (entry.start, (entry.start + entry.end) // 2):
                        file.seek(start)
                        digest.update(file.read(min(_SAMPLE, entry.end - start)))
        return digest.hexdigest()

    def blocks(self, name: str) -> Tensor:
        """The bytes of a tensor in the mapped file, uint8 ``[..., bytes of a row]``; a vector is one row."""
        _, shape, start, end, file = self.tensors[name]
        flat = torch.frombuffer(file, dtype=torch.uint8, count=end - start, offset=start)
        return flat.view(*(shape[:-1] or (1,)), -1)

    def floats(self, name: str) -> Tensor:
        """A tensor of type F32 in the mapped file, in its shape."""
        return self.blocks(name).view(torch.float32).view(self.tensors[name].shape)


def parts_of(file: str) -> list[str]:
    """The names of all parts of a model that was split, from the name of one; otherwise the name itself."""
    if (part := _PART.search(file)) is None:
        return [file]
    return [f"{file[: part.start()]}-{number:05d}-of-{part[2]}{SUFFIX}" for number in range(1, int(part[2]) + 1)]


def _count(path: Path, metadata: Mapping[str, Any], key: str, default: int, least: int = 0) -> int:
    """A whole number of the metadata, checked."""
    value = metadata.get(key, default)
    if type(value) is not int or value < least:
        raise ModelLoadError(f"{path}: {key} = {short_repr(value)} is no whole number of at least {least}")
    return value


class _Part:
    """One file: its bytes, metadata and tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # torch asks for writable memory; nothing writes to this private copy, so its pages stay the file's
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        if self.bytes[:4] != b"GGUF":
            raise ModelLoadError(
                f"{path} is not a GGUF file; it may be damaged, or a pointer of Git LFS "
                "(of other models, name the folder)"
            )
        self._at = 4
        try:
            if self._number("I") not in (2, 3):
                raise ModelLoadError(f"{path} has another version or byte order of GGUF; convert the model again")
            tensors, pairs = self._numbers("Q", 2)
            if max(tensors, pairs) > len(self.bytes):
                raise ValueError("it names more entries than it has bytes")
            self.metadata = {self._texts(1)[0]: self._value(self._number("I")) for _ in range(pairs)}
            self.metadata_end = self._at
            self.tensors = self._table(tensors)
        except (struct.error, KeyError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
            raise ModelLoadError(f"{path} is damaged or incomplete ({error}); fetch it again") from error

    def _table(self, count: int) -> dict[str, Entry]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        table = []
        for _ in range(count):
            (name,), dimensions = self._texts(1), self._number("I")
            table.append((name, tuple(self._numbers("Q", dimensions)[::-1]), self._number("I"), self._number("Q")))
        alignment = _count(self.path, self.metadata, "general.alignment", _ALIGNMENT, least=1)
        data = (self._at + alignment - 1) // alignment * alignment
        entries = {}
        for name, shape, number, offset in table:
            kind = GGMLQuantizationType(number)
            per_block, size = GGML_QUANT_SIZES[kind]
            length = math.prod(shape) // per_block * size
            if not shape or length == 0 or shape[-1] % per_block:
                raise ValueError(f"the tensor {name} has a shape {list(shape)} that {kind.name} cannot have")
            entries[name] = Entry(kind.name, shape, data + offset, data + offset + length, self.bytes)
            if entries[name].end > len(self.bytes):
                raise ValueError(f"the tensor {name} ends beyond the file")
        return entries

    def _numbers(self, code: str, count: int) -> list[Any]:
        layout = f"<{count}{code}"
        values = list(struct.unpack_from(layout, self.bytes, self._at))
        self._at += struct.calcsize(layout)
        return values

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _texts(self, count: int) -> list[str]:
        texts, data, at = [], self.bytes, self._at
        for _ in range(count):  # one for each token of the vocabulary
            (length,) = _LENGTH.unpack_from(data, at)
            start, at = at + 8, at + 8 + length
            if at > len(data):
                raise ValueError("a text ends beyond the file")
            texts.append(data[start:at].decode("utf-8", errors="replace"))
        self._at = at
        return texts

    def _value(self, kind: int) -> Any:
        if kind != _ARRAY:
            return self._texts(1)[0] if kind == _STRING else self._number(_NUMBERS[kind])
        kind, count = self._number("I"), self._number("Q")
        if count > len(self.bytes):
            raise ValueError("an array ends beyond the file")
        if kind == _STRING:
            return self._texts(count)
        return [self._value(kind) for _ in range(count)] if kind == _ARRAY else self._numbers(_NUMBERS[kind], count)
