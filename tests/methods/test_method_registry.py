"""The registry of decoding methods: `MethodName`, the files of `cocoa_engine.methods` and `METHODS` agree."""

import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import get_args

import pytest

from cocoa_engine import METHODS, CocoaConfig, ConfigError, methods
from cocoa_engine.config import MethodName
from cocoa_engine.methods import DecodingMethod


def test_names_classes_and_files_agree():
    assert list(METHODS) == list(get_args(MethodName))
    defined = set()
    for file in iter_modules(methods.__path__):
        module = import_module(f"cocoa_engine.methods.{file.name}")
        kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, DecodingMethod)]
        defined |= {kind for kind in kinds if kind.__module__ == module.__name__ and file.name != "base"}
    assert defined == {type(method) for method in METHODS.values()}
    for name, method in METHODS.items():
        assert method.name == name
        assert type(method).__module__ == f"cocoa_engine.methods.{name.replace('-', '_')}"


def test_unknown_methods_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown method 'coca' .*mean 'cocoa'\?\); known are greedy, cocoa,"):
        CocoaConfig(method="coca")
    with pytest.raises(ConfigError, match="method: Input should be 'greedy', 'cocoa'"):
        CocoaConfig(method=None)


def test_settings_methods_and_names_for_integrations_load_without_torch() -> None:
    modules = "cocoa_engine.config, cocoa_engine.methods, cocoa_engine.integration, cocoa_engine.report"
    heavy = {"torch", "transformers", "numpy", "tokenizers", "rich", "typer", "llguidance", "jsonschema"}
    code = f"import sys, {modules}; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
