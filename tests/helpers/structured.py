"""A nested schema for structured output, small enough for a model with random weights."""

import json
from functools import cache
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from cocoa_engine import CocoaEngine
from cocoa_engine.report import RiskReport, ValueReport
from tests.helpers.tiny_models import TEMPLATE, tiny_model, tiny_tokenizer


class Item(BaseModel):
    name: Literal["tea", "milk"]


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 42]


class Order(BaseModel):
    """An order."""

    person: Person
    items: list[Item] = Field(min_length=2, max_length=2)
    paid: bool


PATHS = [
    "$.person",
    "$.person.name",
    "$.person.age",
    "$.items",
    "$.items[0]",
    "$.items[0].name",
    "$.items[1]",
    "$.items[1].name",
    "$.paid",
]


@cache
def engine_for_schemas() -> CocoaEngine:
    """Random weights, a chat template, and room for a prompt that contains a schema."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return CocoaEngine(tiny_model("llama", seed=6, max_position_embeddings=4096), tokenizer, model_name="quick")


def value_at(value: Any, path: str) -> Any:
    """The value at one of :data:`PATHS`."""
    for key in path.removeprefix("$").replace("[", ".").replace("]", "").split(".")[1:]:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def check_fields(fields: dict[str, ValueReport], order: Order, report: RiskReport, text: str) -> None:
    """Every field has the risk of the spans that contain it, under its path and at its offsets in the text."""
    assert list(fields) == PATHS
    for path, measured in fields.items():
        written, value = text[measured.start : measured.end], value_at(order.model_dump(), path)
        assert (written if isinstance(value, str) else json.loads(written)) == value
        within = [
            (number, span)
            for number, span in enumerate(report.spans)
            if span.start < measured.end and span.end > measured.start
        ]
        assert measured.spans == [number for number, _ in within]
        assert measured.risk == max(span.risk for _, span in within)
        assert measured.f_mlds == pytest.approx(sum(span.f_mlds for _, span in within) / len(within))
        assert measured.log_prob <= 0
    assert sum(fields[path].log_prob for path in ("$.person", "$.items", "$.paid")) < 0  # words were chosen
    assert fields["$.person"].log_prob <= fields["$.person.name"].log_prob + fields["$.person.age"].log_prob
