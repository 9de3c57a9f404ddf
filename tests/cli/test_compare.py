"""``cocoa compare``, and the pages that it and ``cocoa ask`` write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import Result

from cocoa_engine import CocoaConfig, CocoaEngine, Generation

Cocoa = Callable[..., Result]

QUESTION = "Why is the sky blue?"
SHORT = ("--max-new-tokens", "12")


def expected(engine: CocoaEngine, *methods: str) -> list[Generation]:
    messages = [{"role": "user", "content": QUESTION}]
    return [engine.chat(messages, max_new_tokens=12, method=method) for method in methods]


def test_json_is_the_list_of_answers_and_the_model_is_loaded_once(
    cocoa: Cocoa, engine: CocoaEngine, loads: list[object]
) -> None:
    result = cocoa("compare", QUESTION, "--json", "--methods", "cocoa-sig, greedy,cocoa", *SHORT)
    answers = TypeAdapter(list[Generation]).validate_json(result.stdout)
    assert answers == expected(engine, "cocoa-sig", "greedy", "cocoa")
    for shown, answer in zip(TypeAdapter(list[dict[str, Any]]).validate_json(result.stdout), answers, strict=True):
        assert shown["verdict"] == answer.verdict
        assert shown["claims"] == [claim.model_dump(mode="json") for claim in answer.claims]
        assert [one["text"] for one in shown["check"]] == [one.text for one in answer.check_these()]
        assert [one["text"] for one in shown["sentences"]] == [one.text for one in answer.sentences]
    assert len(loads) == 1


def test_answers_stand_side_by_side(cocoa: Cocoa, engine: CocoaEngine) -> None:
    result = cocoa("compare", QUESTION, "--details", *SHORT)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["greedy", "cocoa-sig"]
    assert "\x1b" not in result.stdout
    greedy, cocoa_sig = expected(engine, "greedy", "cocoa-sig")
    assert ("{" in result.stdout) == (greedy.text != cocoa_sig.text)
    for span in cocoa_sig.spans:
        for candidate in span.candidates:
            assert f"{candidate.score:.2f} " in result.stdout


def test_page_of_a_comparison(cocoa: Cocoa, engine: CocoaEngine, tmp_path: Path) -> None:
    page = tmp_path / "answers.html"
    page.write_text("an older one")
    assert cocoa("compare", QUESTION, "--html", str(page), *SHORT).exit_code == 0
    greedy, cocoa_sig = expected(engine, "greedy", "cocoa-sig")
    assert page.read_text(encoding="utf-8") == greedy.to_html(compared=[cocoa_sig], title=QUESTION)
    assert cocoa("ask", QUESTION, "--html", str(page), *SHORT).stdout == cocoa_sig.text + "\n"
    assert page.read_text(encoding="utf-8") == cocoa_sig.to_html(title=QUESTION)


@pytest.mark.parametrize("json", [False, True])
def test_complete_answers_survive_an_interrupt(
    cocoa: Cocoa, engine: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json: bool
) -> None:
    stream, page = engine.stream_chat, tmp_path / "page.html"

    def until_ctrl_c(messages: Any, *, config: CocoaConfig, **options: Any) -> Any:
        if config.method == "cocoa":
            raise KeyboardInterrupt
        return stream(messages, config=config, **options)

    monkeypatch.setattr(engine, "stream_chat", until_ctrl_c)
    options = [QUESTION, *SHORT, "--html", str(page), *(["--json"] if json else [])]
    (greedy,) = expected(engine, "greedy")
    compared = cocoa("compare", "--methods", "greedy,cocoa", *options)
    assert compared.exit_code == 130
    assert "1 of 2 answers were complete" in compared.stderr
    assert page.read_text(encoding="utf-8") == greedy.to_html(title=QUESTION)
    if json:
        assert TypeAdapter(list[Generation]).validate_json(compared.stdout) == [greedy]
    else:
        assert greedy.text in re.sub(r"\[(.*?)\|\d\]", r"\1", " ".join(compared.stdout.split()))


def test_nothing_is_shown_where_no_answer_was_complete(
    cocoa: Cocoa, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "stream_chat", ctrl_c)
    result = cocoa("compare", QUESTION, *SHORT)
    assert (result.exit_code, result.stdout) == (130, "")
    assert "no answer was complete" in result.stderr
