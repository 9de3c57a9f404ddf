"""A callback handler that is kept for the life of a service."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.outputs import ChatGenerationChunk

from cocoa_engine.errors import ConfigError
from cocoa_integrations.langchain import ChatCocoa, RiskCallbackHandler, get_risk_callback


def test_the_latest_reports_are_kept_and_the_highest_risk_of_all(quick_chat: ChatCocoa) -> None:
    with get_risk_callback() as all_of_them:
        handler = RiskCallbackHandler(max_reports=2)
        for length in (12, 1, 2, 3):
            quick_chat.invoke("Who invented the telephone?", {"callbacks": [handler]}, max_tokens=length)
    assert handler.reports == all_of_them.reports[-2:]
    assert handler.max_risk == all_of_them.max_risk == all_of_them.reports[0].max_risk
    assert handler.max_risk > max(report.max_risk or 0.0 for report in handler.reports)


@pytest.mark.slow
def test_nothing_else_grows_with_the_number_of_runs(quick_chat: ChatCocoa) -> None:
    handler = RiskCallbackHandler(max_reports=1)
    [chunk, *_] = quick_chat.stream("a", max_tokens=2)
    generation = quick_chat.generate([[HumanMessage("a")]], max_tokens=2)
    for _ in range(3000):
        run_id = uuid.uuid4()
        handler.on_llm_new_token("", chunk=ChatGenerationChunk(message=chunk), run_id=run_id)
        handler.on_llm_end(generation, run_id=run_id)
        handler.on_llm_new_token(
            "", chunk=ChatGenerationChunk(message=chunk), run_id=run_id
        )  # late, from another thread
    held = {name: len(value) for name, value in vars(handler).items() if hasattr(value, "__len__")}
    assert held["reports"] == 1
    assert sum(held.values()) < 1100, held


@pytest.mark.parametrize("max_reports", [0, -1, True, 1.5, "all"])
def test_other_limits_are_refused(max_reports: Any) -> None:
    with pytest.raises(ConfigError, match="max_reports"):
        RiskCallbackHandler(max_reports=max_reports)


def test_reports_have_the_run_and_the_model(quick_chat: ChatCocoa) -> None:
    run_id = uuid.uuid4()
    with get_risk_callback() as risk:
        quick_chat.invoke("a", {"run_id": run_id}, max_tokens=1)
        next(stream := quick_chat.stream("a"))
        stream.close()
    whole, partial = risk.reports
    assert (whole.run_id, whole.model_name) == (str(run_id), "quick")
    assert uuid.UUID(partial.run_id) != run_id


def test_a_block_can_keep_fewer_reports_than_the_block_around_it(quick_chat: ChatCocoa) -> None:
    with get_risk_callback(max_reports=None) as outer, get_risk_callback(max_reports=1) as inner:
        for _ in range(3):
            quick_chat.invoke("a", max_tokens=1)
    assert (len(outer.reports), len(inner.reports)) == (3, 1)
