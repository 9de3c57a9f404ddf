"""What a judge's provider says about tokens may be anything; the verdict counts all the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cocoa_integrations.evaluation.judge_calls import Asked, Asking
from cocoa_integrations.evaluation.judge_prompts import yes_or_no


@pytest.mark.parametrize("usage", [None, 3, [], {"input_tokens": None}, {"input_tokens": "x", "output_tokens": [1]}])
def test_a_verdict_counts_whatever_its_usage_is(usage: object) -> None:
    judge: Any = SimpleNamespace(temperature=0, invoke=lambda prompt: SimpleNamespace(text="yes", usage_metadata=usage))
    asking = Asking(judge, "judge", attempts=1, timeout=60.0, concurrency=1)
    [[line]] = asking.replies([Asked.of("judge", "Is it?", yes_or_no)])
    assert line["verdict"] is True
    assert line["tokens"] is None
