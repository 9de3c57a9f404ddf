"""llama.cpp's vocabularies, each with texts and the ids that they must have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cocoa_engine import ModelLoadError
from cocoa_engine.model.loading import load_tokenizer
from tests.conformance.tools import SuiteError, Tools

_BETWEEN = "\n__ggml_vocab_test__\n"


def folder_of(source: Path) -> Path:
    """The folder of the vocabularies in the source of llama-cpp-python."""
    return source / "vendor" / "llama.cpp" / "models"


def expected(vocabulary: Path) -> Iterator[tuple[str, list[int]]]:
    """The texts of a vocabulary, and their ids; nothing if it has none."""
    texts, ids = (vocabulary.with_name(f"{vocabulary.name}.{ending}") for ending in ("inp", "out"))
    if texts.is_file():
        lines = ids.read_text(encoding="utf-8").split("\n")
        for text, line in zip(texts.read_bytes().decode().split(_BETWEEN), lines, strict=True):
            yield text, [int(number) for number in line.split()]


def check(vocabulary: Path) -> int | None:
    """How many texts of a vocabulary have their ids; ``None`` if it is refused."""
    try:
        tokenizer = load_tokenizer(str(vocabulary), {})
    except ModelLoadError as error:
        if str(vocabulary) not in str(error) or "tokenizer.ggml." not in str(error):
            raise SuiteError(f"{vocabulary.name} is refused without its key: {error}") from error
        return None
    count = 0
    for text, ids in expected(vocabulary):
        if (found := tokenizer.encode(text, add_special_tokens=False)) != ids:
            raise SuiteError(f"{vocabulary.name}: {text!r} has the ids {found}, not {ids}")
        count += 1
    return count


def run_vocabularies(tools: Tools) -> str:
    """Every vocabulary is read with the ids that llama.cpp expects, or refused."""
    files = sorted(folder_of(tools.source("llama-cpp-python")).glob("ggml-vocab-*.gguf"))
    counts = {file.name: check(file) for file in files}
    read = [count for count in counts.values() if count]
    refused = [name for name, count in counts.items() if count is None]
    if not read:
        raise SuiteError("no vocabulary has texts")
    untested = len(counts) - len(read) - len(refused)
    return f"{len(read)} equal on {sum(read)} texts, {untested} without texts, {len(refused)} refused"
