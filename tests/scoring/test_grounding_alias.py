"""`cocoa_engine.grounding`, the former module of the context lift."""

from __future__ import annotations

import importlib

import pytest

import cocoa_engine


def test_the_former_module_has_the_names_and_warns() -> None:
    grounding = importlib.import_module("cocoa_engine.grounding")
    assert dir(grounding) == ["ContextLift", "context_lift", "context_lift_of_text"]
    for name in dir(grounding):
        with pytest.warns(DeprecationWarning, match=f"import {name} from there") as caught:
            assert getattr(grounding, name) is getattr(cocoa_engine, name)
        assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = grounding.nothing
