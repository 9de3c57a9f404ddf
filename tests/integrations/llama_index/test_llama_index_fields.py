"""The risk of every field of structured output, and how much of the risk responses carry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage

from cocoa_engine import ConfigError
from cocoa_integrations.llama_index import (
    CocoaLLM,
    CocoaRiskEvent,
    argument_risks,
    collect_risk,
    field_risks,
    get_risk,
)
from tests.helpers.alike import close
from tests.helpers.llama_index_helpers import Listener
from tests.helpers.structured import Order, check_fields, engine_for_schemas

ABOUT = [ChatMessage(content="An order of tea and milk.")]


@pytest.fixture(scope="module")
def quick() -> CocoaLLM:
    return CocoaLLM(engine=engine_for_schemas(), max_new_tokens=250)


def generated(report: dict[str, Any]) -> str:
    return "".join(span["text"] for span in report["spans"])


@pytest.mark.slow
async def test_every_field_of_a_structured_llm_has_its_risk(quick: CocoaLLM, heard: Listener) -> None:
    structured = quick.as_structured_llm(Order)
    response = structured.chat(ABOUT)
    report = get_risk(response).to_dict()
    check_fields(field_risks(response), response.raw, get_risk(response), generated(report))
    assert report["compact"] is True
    [arguments] = argument_risks(response).values()
    assert list(arguments)[:3] == ["person", "items", "paid"]
    with collect_risk() as reports:
        assert quick.structured_predict(Order, PromptTemplate("An order of tea and milk.")) == response.raw
    assert close(field_risks(reports[-1]), field_risks(response))
    assert heard.of(CocoaRiskEvent)[0].report["tool_calls"][0]["arguments"].keys() == arguments.keys()
    others = [
        await structured.achat(ABOUT),
        structured.complete("An order of tea and milk."),
        list(structured.stream_chat(ABOUT))[-1],
        [chunk async for chunk in await structured.astream_chat(ABOUT)][-1],
    ]
    for other in others:
        assert close(field_risks(other), field_risks(response))
        assert other.raw == response.raw
    with pytest.raises(ConfigError):
        field_risks(quick.as_structured_llm(Order).chat(ABOUT, risk_metadata="none"))


def test_each_entry_point_has_its_detail(quick: CocoaLLM, heard: Listener) -> None:
    full = quick.chat(ABOUT, max_new_tokens=12, risk_metadata="full")
    compact = quick.chat(ABOUT, max_new_tokens=12)
    assert set(full.additional_kwargs) == {"cocoa_spans", "cocoa_risk"}
    assert full.raw["cocoa_risk"] == full.additional_kwargs["cocoa_risk"]
    assert full.logprobs
    assert compact.logprobs is None
    assert set(compact.additional_kwargs) == {"cocoa_risk"}
    visible = [span for span in compact.additional_kwargs["cocoa_risk"]["spans"] if "text" in span]
    assert all(not span["text"].strip() for span in visible)
    theirs = full.additional_kwargs["cocoa_risk"]["spans"]
    for ours in (
        get_risk(compact).to_dict()["spans"],
        compact.raw["cocoa_risk"]["spans"],
    ):  # agents keep raw without the text
        assert [{**one, **other} for one, other in zip(theirs, ours, strict=True)] == theirs
        assert "".join(span["text"] for span in ours) == compact.message.content
    assert len(json.dumps(compact.raw)) < len(json.dumps(full.raw))
    chunks = list(quick.stream_chat(ABOUT, max_new_tokens=12))
    assert [chunk.additional_kwargs["cocoa_spans"][0] for chunk in chunks[:-1]] == theirs
    assert chunks[-1].additional_kwargs == {"cocoa_risk": full.additional_kwargs["cocoa_risk"]}
    assert chunks[-1].raw["cocoa_risk"] == compact.raw["cocoa_risk"]
    assert [event.report["spans"] for event in heard.of(CocoaRiskEvent)] == [theirs] * 3


def test_a_call_and_a_model_choose_the_detail(quick: CocoaLLM) -> None:
    silent = CocoaLLM(engine=quick.engine, max_new_tokens=12, risk_metadata="none", logprobs=True)
    for response in (silent.complete("Once"), *silent.stream_complete("Once")):
        assert response.additional_kwargs == {}
        assert "cocoa_risk" not in response.raw
        assert response.logprobs is not None
    with pytest.raises(ConfigError, match="risk_metadata='none'"):
        get_risk(silent.complete("Once")).to_dict()
    *before, last = silent.stream_complete("Once", risk_metadata="compact")
    assert all(chunk.additional_kwargs == {} for chunk in before)
    assert (
        get_risk(last).to_dict()["spans"][0]["text"] == get_risk(quick.complete("Once")).to_dict()["spans"][0]["text"]
    )
    for wrong in (lambda: quick.complete("Once", risk_metadata="some"), lambda: CocoaLLM(risk_metadata="some")):
        with pytest.raises(ConfigError, match="risk_metadata"):
            wrong()
