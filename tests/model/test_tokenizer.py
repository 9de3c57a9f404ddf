"""The engine's tokenizer and that of its user."""

from __future__ import annotations

from typing import Any

import pytest

from cocoa_engine import CocoaEngine
from cocoa_engine.model.tokenizer import Tokens
from tests.helpers.tiny_gguf import write_tiny_gguf
from tests.helpers.tiny_models import tiny_tokenizer


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_the_user_sets_applies_to_the_template_and_not_to_encoding(is_shared: bool) -> None:
    given = tiny_tokenizer()
    tokens = Tokens(given, is_shared=is_shared)
    text = "a text that is longer than two tokens"
    expected = tokens.encode(text)
    assert (tokens.tokenizer is given) == is_shared
    assert tokens.tokenizer is tokens.tokenizer
    tokens.tokenizer.backend_tokenizer.enable_truncation(2)
    tokens.tokenizer.chat_template = "{{ messages[0].content }}!"
    assert tokens.encode(text) == expected
    assert tokens.tokenizer.backend_tokenizer.truncation is not None
    assert tokens.render([{"role": "user", "content": "Hi"}]).text == "Hi!"


def test_an_engine_that_loads_its_tokenizer_does_not_copy_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("cocoa_engine.model.tokenizer._copy", lambda tokenizer: pytest.fail("it is copied"))
    engine = CocoaEngine.from_pretrained(tmp_path / "tiny.gguf")
    assert engine.generate("he lo", max_new_tokens=4).token_ids
    monkeypatch.undo()
    assert engine.tokenizer is engine.tokenizer
