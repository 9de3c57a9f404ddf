"""Templates and vocabularies of llama.cpp, where `make conformance` has unpacked them: the quick part of that suite."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance.llama_cpp_files import MODELS, TEMPLATES, check, compared, forged
from tests.conformance.tools import OMITTED, source_if_there

pytestmark = pytest.mark.slow

READ = ("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt")
READ += ("phi-3", "qwen2", "qwen35", "refact", "starcoder")
WITHOUT_TEXTS = ("aquila", "baichuan", "gpt-neox")
REFUSED = ("bert-bge", "nomic-bert-moe")  # of encoders


def test_templates_are_rendered_as_transformers_does() -> None:
    outcomes = list(compared(source_if_there("llama-cpp-python") / TEMPLATES))
    different = {name for name, _, outcome in outcomes if outcome == "differs"}
    assert different == OMITTED["templates"].keys()
    assert Counter(outcome for *_, outcome in outcomes)["equal"] > 300


def test_no_text_makes_a_control_token() -> None:
    attempts = list(forged(source_if_there("llama-cpp-python") / TEMPLATES, each=False))
    assert len(attempts) > 400
    assert [(name, kind) for name, kind, _, made in attempts if made] == []


@pytest.mark.parametrize("name", [*READ, *WITHOUT_TEXTS, *REFUSED])
def test_a_vocabulary_has_the_ids_of_llama_cpp(name: str) -> None:
    """Read as llama.cpp reads it, or refused."""
    compared_texts = check(source_if_there("llama-cpp-python") / MODELS / f"ggml-vocab-{name}.gguf")
    assert (compared_texts is None) == (name in REFUSED)
    assert name not in READ or (compared_texts is not None and compared_texts >= 46)
