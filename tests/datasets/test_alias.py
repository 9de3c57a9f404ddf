"""`cocoa_engine.labelled`, the former name of `cocoa_engine.datasets`."""

from __future__ import annotations

import importlib

import pytest

from cocoa_engine import datasets


def test_every_public_name_is_there_with_a_warning() -> None:
    labelled = importlib.import_module("cocoa_engine.labelled")
    assert dir(labelled) == sorted(datasets.__all__)
    for name in datasets.__all__:
        with pytest.warns(DeprecationWarning, match=rf"now cocoa_engine\.datasets: import {name} from there"):
            assert getattr(labelled, name) is getattr(datasets, name)


def test_importing_a_name_warns_at_the_importing_line() -> None:
    with pytest.warns(DeprecationWarning, match="import read_labelled from there") as caught:
        from cocoa_engine.labelled import read_labelled
    assert read_labelled is datasets.read_labelled
    assert {warning.filename for warning in caught} == {__file__}


def test_other_names_are_not_there() -> None:
    labelled = importlib.import_module("cocoa_engine.labelled")
    with pytest.raises(AttributeError, match="has no attribute 'read_json'"):
        _ = labelled.read_json
