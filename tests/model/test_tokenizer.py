"""The engine's tokenizer and that of its user."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cocoa_engine import CocoaEngine
from cocoa_engine.model.tokenizer import Tokens, not_shared
from tests.helpers.tiny_gguf import write_tiny_gguf
from tests.helpers.tiny_models import tiny_tokenizer


def test_a_tokenizer_that_was_given_is_copied() -> None:
    given = tiny_tokenizer()
    tokens = Tokens(given)
    assert tokens.tokenizer is given
    assert tokens._own is not given


def test_one_that_was_just_loaded_is_copied_for_its_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    real = copy.deepcopy

    def counted(value: Any, *rest: Any) -> Any:
        copies.append(value)
        return real(value, *rest)

    loaded = not_shared(tiny_tokenizer())
    monkeypatch.setattr(copy, "deepcopy", counted)
    tokens = Tokens(loaded)
    text = "a text that is longer than two tokens"
    expected = tokens.encode(text)
    assert tokens.has_chat_template == bool(loaded.chat_template)
    assert not copies
    shown = tokens.tokenizer
    assert copies[0] is loaded
    assert tokens.tokenizer is shown
    assert shown is not loaded
    shown.backend_tokenizer.enable_truncation(2)
    assert tokens.encode(text) == expected
    assert shown.backend_tokenizer.truncation is not None
    assert Tokens(loaded)._own is not loaded  # shared since


def test_what_the_user_changes_applies() -> None:
    tokens = Tokens(not_shared(tiny_tokenizer()))
    tokens.tokenizer.chat_template = "{{ messages[0].content }}!"
    assert tokens.has_chat_template
    assert tokens.render([{"role": "user", "content": "Hi"}]).text == "Hi!"


def test_an_engine_that_loads_its_tokenizer_does_not_copy_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("cocoa_engine.model.tokenizer._copy", lambda tokenizer: pytest.fail("it is copied"))
    engine = CocoaEngine.from_pretrained(tmp_path / "tiny.gguf")
    assert engine.generate("he lo", max_new_tokens=4).token_ids
    monkeypatch.undo()
    assert engine.tokenizer is engine.tokenizer
    assert engine.tokenizer is not engine.session.tokens._own


def test_a_tokenizer_that_cannot_be_hashed() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(text)]}

        def decode(self, ids: list[int]) -> str:
            return ""

    odd: Any = Odd()
    assert Tokens(not_shared(odd)).encode("abc") == [3]
