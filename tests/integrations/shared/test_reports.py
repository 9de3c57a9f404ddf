"""Reports are read from answers of both frameworks, whatever stands beside them."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from langchain_core.messages import AIMessage
from llama_index.core.base.response.schema import PydanticResponse
from pydantic import BaseModel

from cocoa_engine.errors import ConfigError
from cocoa_integrations.reports import get_risk
from tests.helpers.reports import made_report


def test_reports_are_read_beside_objects_with_any_fields() -> None:
    class Parsed(BaseModel):
        blocks: list[str] = ["a", "b"]
        additional_kwargs: None = None

    report = made_report([0.5])
    shown = PydanticResponse(response=Parsed(), metadata={"cocoa_risk": report.to_dict()})
    assert get_risk(shown) == report
    with pytest.raises(ConfigError, match="no risk report"):
        get_risk(MagicMock())


def test_a_compact_report_is_completed_wherever_it_is() -> None:
    report = made_report([0.5, 0.25])
    compact = report.compact().to_dict()
    whole = get_risk(AIMessage("", response_metadata={"cocoa_risk": compact}))
    assert compact != whole.to_dict()
    assert get_risk(compact) == whole == get_risk({"text": "", "risk": compact})
