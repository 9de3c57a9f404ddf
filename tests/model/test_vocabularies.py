"""llama.cpp's vocabularies, where `make conformance` has unpacked them: read as it reads them, or refused."""

from __future__ import annotations

import pytest

from tests.conformance.tools import source_if_there
from tests.conformance.vocabularies import check, folder_of

READ = ("gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder")
REFUSED = ("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READ, *REFUSED])
def test_a_vocabulary_has_the_ids_of_llama_cpp(name: str) -> None:
    found = check(folder_of(source_if_there("llama-cpp-python")) / f"ggml-vocab-{name}.gguf")
    assert (found is None) == (name in REFUSED)
    assert found is None or found >= 47
