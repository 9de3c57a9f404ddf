"""The registry of decoding methods: `MethodName`, the files of `cocoa_engine.methods` and `METHODS` agree."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import get_args

import pytest

from cocoa_engine import METHODS, CocoaConfig, ConfigError, methods
from cocoa_engine.config import MethodName
from cocoa_engine.methods import DecodingMethod

NAMES = get_args(MethodName)


def test_every_name_has_its_class():
    assert list(METHODS) == list(NAMES)
    for name, method in METHODS.items():
        assert isinstance(method, DecodingMethod)
        assert method.name == name
        assert type(method).__module__ == f"cocoa_engine.methods.{name.replace('-', '_')}"


def test_every_file_that_defines_a_method_is_registered():
    defined = set()
    for file in iter_modules(methods.__path__):
        module = import_module(f"cocoa_engine.methods.{file.name}")
        for found in vars(module).values():
            is_method = isinstance(found, type) and issubclass(found, DecodingMethod)
            if is_method and found.__module__ == module.__name__ and file.name != "base":
                defined.add(found)
    assert defined == {type(method) for method in METHODS.values()}


def test_unknown_methods_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown method 'coca' \(did you mean 'cocoa'\?\); known are greedy, cocoa,"
    ):
        CocoaConfig(method="coca")
    with pytest.raises(ConfigError, match="method: Input should be 'greedy', 'cocoa'"):
        CocoaConfig(method=None)


def test_settings_methods_and_names_for_integrations_load_without_torch() -> None:
    modules = "cocoa_engine.config, cocoa_engine.methods, cocoa_engine.integration, cocoa_engine.report"
    heavy = {"torch", "transformers", "numpy", "tokenizers", "rich", "typer", "llguidance", "jsonschema"}
    code = f"import sys, {modules}; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
