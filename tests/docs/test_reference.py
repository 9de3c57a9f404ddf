"""The pages hang together; the reference has all that the packages make public, and the keys that adapters attach."""

import json
import pkgutil
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from langchain.agents import create_agent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from pydantic import BaseModel, TypeAdapter

import cocoa_engine
import cocoa_integrations
from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, RiskMiddleware
from cocoa_integrations.llama_index import CocoaLLM as LlamaCocoa
from cocoa_integrations.llama_index import RiskRetryQueryEngine
from cocoa_integrations.ray.settings import RaySettings
from cocoa_integrations.server import ServerSettings
from docs._generate.command_line import command_line, commands, parameters
from docs._generate.error_classes import error_classes, public_errors
from docs._generate.links import ROOT_PAGES, is_local, links, rewrite_links, target
from docs._generate.markdown import type_name
from docs._generate.metadata_keys import METADATA, entry_types, metadata_keys
from docs._generate.parts import PARTS, fill
from docs._generate.setting_tables import ray_settings, runtime_settings, server_settings, settings
from tests.helpers.pages import DOCS, PAGES, ROOT, SITE_PAGES, anchors, name_of
from tests.helpers.paths import PYPROJECT
from tests.helpers.reasoning_models import reasoning_engine, saying

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


QUESTION = "Who wrote Dune?"


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, TypeAdapter[Any]]]:
    """A validator of each metadata key that refuses further keys."""
    kinds = entry_types()
    for kind in kinds:
        monkeypatch.setitem(kind.model_config, "extra", "forbid")
    for _ in kinds:  # a type has the form that the types in it had when it was made
        for kind in kinds:
            kind.model_rebuild(force=True)
    yield {key: TypeAdapter(kind) for key, kind in METADATA.items()}
    monkeypatch.undo()
    for _ in kinds:
        for kind in kinds:
            kind.model_rebuild(force=True)


def _check(declared: dict[str, TypeAdapter[Any]], *holders: dict[str, Any]) -> set[str]:
    """Validates the metadata of some holders and returns the keys that had values."""
    seen = set()
    for holder in holders:
        json.dumps({key: holder.get(key) for key in declared}, allow_nan=False)
        for key in declared.keys() & holder.keys():
            declared[key].validate_python(holder[key], strict=True)
            seen.add(key)
    return seen


def test_langchain(engine: CocoaEngine, declared: dict[str, TypeAdapter[Any]]) -> None:
    chat = ChatCocoa(engine=engine, max_tokens=12)
    message = chat.invoke(QUESTION)
    assert _check(declared, message.additional_kwargs, message.response_metadata) == {"cocoa_risk"}
    message = chat.invoke(f"Dune is by Frank Herbert. {QUESTION}", risk_metadata="full")
    assert _check(declared, message.additional_kwargs, message.response_metadata) == {"cocoa_spans", "cocoa_risk"}
    *chunks, last = list(chat.stream(QUESTION))
    assert _check(declared, *(chunk.additional_kwargs for chunk in chunks)) == {"cocoa_spans"}
    assert _check(declared, last.response_metadata) == {"cocoa_risk"}
    text = CocoaLLM(engine=engine, max_tokens=8).generate([QUESTION]).generations[0][0]
    assert _check(declared, text.generation_info) == {"cocoa_spans", "cocoa_risk"}
    middleware = RiskMiddleware(0.0, retry_with={"alpha": 1.0}, on_risk="mark")
    agent = create_agent(ChatCocoa(engine=engine, max_tokens=6), tools=[], middleware=[middleware])
    state = agent.invoke({"messages": [("user", QUESTION)]})
    assert len(state["cocoa_risks"][0]["attempts"]) == 2
    assert _check(declared, state) == {"cocoa_risks"}


def test_reasoning_and_tool_calls(engine: CocoaEngine, declared: dict[str, TypeAdapter[Any]]) -> None:
    thinker = reasoning_engine()
    options = saying(thinker, "Well.</think>\n\nHello!")
    message = ChatCocoa(engine=thinker, **options).invoke(QUESTION, risk_metadata="full")
    assert message.response_metadata["cocoa_risk"]["reasoning"]["spans"]
    assert _check(declared, message.additional_kwargs, message.response_metadata) == {"cocoa_spans", "cocoa_risk"}
    *_, last = LlamaCocoa(engine=thinker).stream_chat([ChatMessage(content=QUESTION)], **options)
    assert _check(declared, last.additional_kwargs, last.raw) == {"cocoa_risk"}  # type: ignore[arg-type]

    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return city

    chat = ChatCocoa(engine=engine, max_tokens=8).bind_tools([get_weather], tool_choice="any")
    report = chat.invoke("What is the weather in Lyon?").response_metadata["cocoa_risk"]
    assert [call["error"] is None for call in report["tool_calls"]] == [False]  # it is cut off
    assert _check(declared, {"cocoa_risk": report}) == {"cocoa_risk"}


class _Fixed(BaseRetriever):
    similarity_top_k = 1

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text="Dune is by Frank Herbert."), score=1.0)]


def test_llama_index(engine: CocoaEngine, declared: dict[str, TypeAdapter[Any]]) -> None:
    llm = LlamaCocoa(engine=engine, max_new_tokens=8)
    answer = llm.complete(QUESTION, risk_metadata="full")
    assert _check(declared, answer.additional_kwargs, answer.raw) == {"cocoa_spans", "cocoa_risk"}
    *chunks, last = list(llm.stream_complete(QUESTION))
    assert _check(declared, *(chunk.additional_kwargs for chunk in chunks)) == {"cocoa_spans"}
    assert _check(declared, last.additional_kwargs, last.raw) == {"cocoa_risk"}
    retrying = RiskRetryQueryEngine(_Fixed(), llm, threshold=0.0, max_tries=2)
    metadata = retrying.query(QUESTION).metadata
    assert len(metadata["cocoa_tries"]) == 2
    assert _check(declared, metadata) == {"cocoa_risk", "cocoa_reports", "cocoa_tries"}


def test_every_page_is_in_the_navigation_once() -> None:
    assert [name for name in ROOT_PAGES if not (ROOT / name).exists()] == []
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = re.findall(r'"([^"]+\.md)"', json.dumps(nav))
    assert len(set(listed)) == len(listed)
    written = [page.relative_to(DOCS).as_posix() for page in SITE_PAGES]
    assert sorted(listed) == sorted([*written, *ROOT_PAGES.values()])


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_linked_files_exist(page: Path) -> None:
    found = [link for link in links(page.read_text(encoding="utf-8")) if is_local(link) or link.startswith("#")]
    to = {link: target(link, page) if is_local(link) else page for link in found}
    assert [link for link, file in to.items() if not file.exists()] == []
    to_parts = [link for link, file in to.items() if "#" in link and file.suffix == ".md"]
    assert [link for link in to_parts if link.partition("#")[2] not in anchors(to[link])] == []


def test_links_lead_to_the_same_file_on_the_site() -> None:
    page = (
        "[a](../../examples/chat.py) [b](settings.md#alpha) [`c`](../../cocoa_engine) [d](https://x.org) "
        "[e](../../CHANGELOG.md) ![f](../answer.svg)\n\n```text\n[a](../../examples/chat.py)\n```\n"
    )
    assert rewrite_links(page, DOCS / "reference" / "cli.md", "reference/cli.md") == (
        "[a](../files/examples/chat.py.txt) [b](settings.md#alpha) `c` [d](https://x.org) "
        "[e](../changelog.md) ![f](../answer.svg)\n\n```text\n[a](../../examples/chat.py)\n```\n"
    )


def test_every_generated_part_is_on_one_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in SITE_PAGES)
    for name in PARTS:
        assert text.count(f"<!-- generated: {name} -->\n") == 1
    note = "Note for readers of the plain file."
    filled = fill(f"before\n<!-- generated: runtime -->\n{note}\n<!-- end -->\nafter\n")
    assert note not in filled
    assert "`cuda_graphs`" in filled
    assert filled.startswith("before\n")
    assert filled.endswith("after\n")


@pytest.mark.slow
def test_the_tables_of_the_evaluation_are_those_of_the_measures_beside_them() -> None:
    text = (DOCS / "explanation" / "evaluation.md").read_text(encoding="utf-8")
    study = runpy.run_path(str(DOCS / "explanation" / "evaluation" / "tables.py"))
    for table in ("models", "latency", "rules"):
        shown = text.split(f"<!-- study: {table} -->\n")[1].split("<!-- end of the study -->")[0]
        assert shown.splitlines() == list(study[table]())


_PAGE = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
_ENGINE_ROW = re.compile(r"^\| (\d+) \| (.+?) \|", re.MULTILINE)
_ADAPTER_ROW = re.compile(r"^\| ((?:`\w+(?:/|\.py)`(?:, )?)+) \|", re.MULTILINE)


def _names(cell: str) -> list[str]:
    return [name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", cell)]


def _modules(package: ModuleType) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


LAYERS = [(int(number), name) for number, cell in _ENGINE_ROW.findall(_PAGE) for name in _names(cell)]
ADAPTERS = [name for cell in _ADAPTER_ROW.findall(_PAGE) for name in _names(cell)]


def test_every_module_is_in_the_table_once_in_the_order_of_the_contract() -> None:
    assert sorted(name for _, name in LAYERS) == _modules(cocoa_engine)
    assert sorted(ADAPTERS) == _modules(cocoa_integrations)
    (contract,) = (one for one in PYPROJECT["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    layer_of = {name: number for number, name in LAYERS}
    order = [[layer_of[name] for name in re.findall(r"\w+", layer)] for layer in contract["layers"]]
    assert sorted(name for layer in contract["layers"] for name in re.findall(r"\w+", layer)) == sorted(layer_of)
    for above, below in pairwise(order):
        assert min(above) >= max(below)


def test_the_lines_of_the_loop_are_those_of_the_files() -> None:
    shown = _PAGE.partition("```text\n")[2].partition("```")[0].strip().split("\n\n")
    assert len(shown) >= 5
    for part in shown:
        title, *lines = part.split("\n")
        file = ROOT / title.removeprefix("# ").partition(":")[0]
        code = [line.strip() for line in file.read_text(encoding="utf-8").split("\n")]
        assert [line for line in lines if line.strip() not in code] == []
