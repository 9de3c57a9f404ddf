"""The reference is complete: what it generates, and what its pages name, is all that the packages make public."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
from pydantic import BaseModel

from cocoa_engine import CocoaConfig, Runtime
from cocoa_integrations.ray.settings import RaySettings
from cocoa_integrations.server import ServerSettings
from docs._generate.command_line import command_line, commands, parameters
from docs._generate.error_classes import error_classes, public_errors
from docs._generate.markdown import type_name
from docs._generate.metadata_keys import entry_types, metadata_keys
from docs._generate.setting_tables import ray_settings, runtime_settings, server_settings, settings
from tests.helpers.pages import DOCS

API = {page.name: page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("api-*.md")}
DOCUMENTED = re.findall(r"^::: (\S+)", "\n".join(API.values()), re.MULTILINE)
PACKAGES = {
    "cocoa_engine": "api-engine.md",
    "cocoa_integrations.langchain": "api-langchain.md",
    "cocoa_integrations.llama_index": "api-llama-index.md",
    "cocoa_integrations.transformers": "api-transformers.md",
    "cocoa_integrations.server": "api-server.md",
    "cocoa_integrations.ray": "api-server.md",
    "cocoa_integrations.evaluation": "api-more.md",
    "cocoa_integrations.lm_eval": "api-more.md",
    "cocoa_engine.lab.data": "api-more.md",
    "cocoa_engine.integration": "api-more.md",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package: str) -> None:
    module = import_module(package)
    errors = {error.__name__ for error in public_errors()}
    names = {*module.__all__, *getattr(module, "_LAZY", ())} - {"__version__"} - errors
    page = API[PACKAGES[package]]
    listed = {*re.findall(r"`(\w+)[`(]", page), *(path.removeprefix(f"{package}.") for path in DOCUMENTED)}
    missing = names - listed
    assert [name for name in missing if f"`{package}.{name}`" not in page] == []


@pytest.mark.parametrize("path", DOCUMENTED)
def test_what_is_documented_exists_and_has_a_docstring(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert getattr(import_module(module), name).__doc__


def sections(text: str) -> dict[str, str]:
    """The sections of a generated page, by the first word of code in their headings."""
    return dict(re.findall(r"^## `(?:cocoa )?([\w-]+)`.*?\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))


TABLES = [(CocoaConfig, settings), (Runtime, runtime_settings), (ServerSettings, server_settings)]


@pytest.mark.parametrize(("model", "table"), [*TABLES, (RaySettings, ray_settings)])
def test_tables_of_settings(model: type[BaseModel], table: Any) -> None:
    rows = re.findall(r"^\| `(\w+)`\{#\1\} \| `(.*?)` \| (.+?) \| (.+?) \|$", table(), re.MULTILINE)
    defaults = {
        name: repr(field.default).replace("'", '"')
        if field.default_factory is None
        else f"{type_name(field.annotation)}()"
        for name, field in model.model_fields.items()
    }
    assert [(name, default) for name, default, _, _ in rows] == list(defaults.items())
    assert all(len(meaning) > 10 for _, _, _, meaning in rows)


def test_values_of_settings() -> None:
    cells = dict(re.findall(r"^\| `(\w+)`\S* \| \S+ \| (.+?) \| ", settings(), re.MULTILINE))
    assert cells["gamma"] == "`float` >&nbsp;0, ≤&nbsp;1"
    assert cells["seed"] == "`int` ≥&nbsp;0, <&nbsp;2^63, `None`"
    assert cells["metric"] == '`"f_mlds"`, `"con_mlds"`'
    assert '`"cocoa-sig"`' in cells["method"]


def test_every_command_and_option_is_listed() -> None:
    found = sections(command_line())
    assert list(found) == list(commands())
    assert {"ask", "eval", "judge"} <= set(found)
    for name, command in commands().items():
        for parameter in parameters(command):
            words = [*parameter.opts, *parameter.secondary_opts]
            if parameter.param_type_name == "argument":
                words = [(parameter.metavar or parameter.name).strip("[]").upper()]
            for word in words:
                assert re.search(rf"`{re.escape(word)}[ `.]", found[name]), f"cocoa {name} {word}"


@pytest.mark.slow
def test_every_error_is_described() -> None:
    found = sections(error_classes())
    for error in public_errors():
        section = found[error.__name__]
        assert all(f"`{base.__name__}`" in section for base in error.__bases__)
        assert error.__doc__ is not None
        assert len(section) > len("Bases: ") + 40
    assert ">CocoaEngine.generate<" in found["PromptError"]


def test_every_metadata_key_is_described() -> None:
    found = sections(metadata_keys())
    for kind in entry_types():
        listed = re.findall(r"^\| `(\w+)`( \(optional\))? \|", found[kind.__name__], re.MULTILINE)
        fields = {field.alias or name: field for name, field in kind.model_fields.items()}
        assert {name for name, _ in listed} == set(fields)
        assert {name for name, optional in listed if optional} == {
            name for name, field in fields.items() if not field.is_required()
        }
