"""The spans that cover an answer."""

from __future__ import annotations

import pytest

from cocoa_integrations._shared.limits import covering


@pytest.mark.parametrize("tag", ["</think>", "ink>", ">"])
def test_a_boundary_inside_the_closing_tag(tag: str) -> None:
    spans = [
        {"text": "So" + "</think>".removesuffix(tag), "part": "reasoning"},
        {"text": f"{tag}\n\nHe", "part": "answer"},
        {"text": "llo", "part": "answer"},
    ]
    covered = covering("Hello", spans)
    assert covered is not None
    assert [span["text"] for span in covered] == ["He", "llo"]


def test_other_text_before_the_answer_is_not_cut_off() -> None:
    spans = [{"text": "So", "part": "reasoning"}, {"text": "Well, hello", "part": "answer"}]
    assert covering("hello", spans) is None
