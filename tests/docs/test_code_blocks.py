"""The code on the pages works: Python runs, commands and their options exist."""

import builtins
import gc
import importlib.util
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from cocoa_engine import CocoaEngine
from cocoa_integrations.server import create_app
from docs._generate.command_line import commands
from tests.helpers.live_server import served
from tests.helpers.pages import PAGES, ROOT, SHELLS, anchors, blocks, code_spans, command_lines, name_of
from tests.helpers.paths import PYPROJECT, tomllib

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
PARSERS = {"yaml": yaml.safe_load, "toml": tomllib.loads}
SERVER = "http://127.0.0.1:8000"  # the address of `cocoa serve` on the pages
HARNESS = "--apply_chat_template --batch_size --confirm_run_unsafe_code --fewshot_as_multiturn --system_instruction"
OPTIONS_OF_OTHERS = {
    "docs/explanation/signal/details.md": {"--keep", "--nq-swap"},  # python -m benchmarks.embedded_calibrator
    "docs/how-to/evaluate.md": set(HARNESS.split()),  # lm-evaluation-harness
    "docs/how-to/gpu.md": {"--bandwidth", "--device", "--prompt-tokens", "--tiny"},  # python -m benchmarks.gpu
    "docs/how-to/serve.md": {"--model_args"},  # lm-evaluation-harness
    "docs/how-to/speed.md": {"--preload"},  # gunicorn
}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_run(
    page: Path,
    engine: CocoaEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The blocks of a page run in order and share their names, in an empty folder that has the examples' files."""
    gc.collect()  # what an earlier page holds in cycles (agents) would share its engine
    load = CocoaEngine.from_pretrained

    def already_loaded(model_name: str | None = None, **options: Any) -> CocoaEngine:
        if model_name is not None:
            return load(model_name, **options)
        own = {name: options.get(name) for name in ("config", "runtime", "calibrator")}
        if not any(own.values()):
            return engine
        return CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, **own)

    monkeypatch.setattr(CocoaEngine, "from_pretrained", already_loaded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    module = ModuleType("code_of_a_page")  # pydantic looks up annotations in a class's module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with ExitStack() as stack:
        server = None
        for block in blocks(page):
            if block.language != "python" or block.reason is not None:
                continue
            source = block.code
            if SERVER in source:
                server = server or stack.enter_context(served(create_app(engine)))
                source = source.replace(SERVER, server)
            # so that a traceback names the line on the page
            code = compile("\n" * (block.line - 1) + source, name_of(page), "exec")
            exec(code, vars(module))
            if re.search(r"^(for .*\n( .*\n)*? +)?print\(", source, re.MULTILINE):
                assert capsys.readouterr().out.strip(), f"{name_of(page)}:{block.line} prints nothing"


FOLDERS = [path.name for path in ROOT.iterdir() if (path / "__init__.py").exists() or path.name in ("docs", "examples")]
_PATH = re.compile(rf"(?<![\w./:-])((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*[\w/])(#[\w-]+)?")


_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OPTIONS = {
    name: {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    for name, command in commands().items()
}


def _missing_paths(text: str) -> list[str]:
    """The paths of the repository in a text that do not exist. A name in capitals stands for any; so does a star."""
    found = {path: anchor for path, anchor in _PATH.findall(text) if not re.search(r"\b[A-Z]+\b(?!\.md)", path)}
    return sorted(
        path + anchor
        for path, anchor in found.items()
        if not (ROOT / path).exists() or (anchor and anchor[1:] not in anchors(ROOT / path))
    )


def _wrong_options(page: Path, spans: list[str]) -> list[str]:
    """Options after ``cocoa COMMAND`` are that command's. Options alone are those of any command, or listed above."""
    of_others, of_commands = OPTIONS_OF_OTHERS.get(name_of(page), set()), set().union(*OPTIONS.values())
    named = {
        (re.match(r"(?:cocoa ([a-z][a-z-]*))?", span)[1], option)
        for span in spans
        for option in _OPTION.findall(span)
        if re.match(r"--|cocoa [a-z]", span)
    }
    alone = {option for command, option in named if command is None} - of_commands
    return sorted({*alone} ^ of_others) + [
        f"{option} of {command}" for command, option in named if command and option not in OPTIONS.get(command, set())
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_exists_its_settings_can_be_parsed_and_what_is_not_run_has_a_reason(page: Path) -> None:
    spans, code = code_spans(page), blocks(page)
    assert [block.line for block in code if block.reason is not None and len(block.reason.split()) < 2] == []
    settings = [PARSERS[block.language](block.code) for block in code if block.language in PARSERS]
    assert all(parsed and isinstance(parsed, dict) for parsed in settings)
    words = [span.split() for span in spans if re.match(r"(make|pip|python\S*) ", span)]
    words += [line for block in code if block.language in SHELLS for line in command_lines(block)]
    faults = {" ".join(command): fault for command in words if (fault := _fault(command)) is not None}
    missing = _missing_paths("\n".join([*spans, *(block.code for block in code)]))
    assert (missing, faults, _wrong_options(page, spans)) == ([], {}, [])


TEXTS = [
    path
    for folder in (*FOLDERS, "deploy")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".mjs") or path.name.startswith("Dockerfile")
] + [ROOT / name for name in ("Makefile", "CHANGELOG.md", "pyproject.toml", "mkdocs.yml")]
_COMMAND = re.compile(
    r"""(?:(?<!\w)`|\$ ?)(make [a-z][\w-]*)(?=[` "\n])"""
    r"""|(?:[`"]|^\s*|\$ )((?:\.venv/bin/)?python -m [a-z_.]+)(?![\w.])""",
    re.MULTILINE,
)
_COCOA = re.compile(r"([`\"]?)\bcocoa ([a-z][a-z-]*)(?!\w)((?:\s+(?!cocoa\b)(?:[\w./=,-]+|\"[\w ?]+\"(?= --)))*)")
FORMER = {"cocoa_engine.grounding", "cocoa_engine.labelled"}  # in the changelog
_DOTTED = re.compile(r"(?<![\w./\"-])(?:cocoa_engine|cocoa_integrations|benchmarks)(?:\.[a-zA-Z_]\w*)+")


def _faults(text: str) -> list[str]:
    """What is wrong with the paths, the commands and the modules that a text of any kind names."""
    commands_of_text = [(make or python).split() for make, python in _COMMAND.findall(text)]
    wrong = [
        " ".join(words) for words in commands_of_text if _fault(["python", *words[1:]] if "-m" in words else words)
    ]
    for quote, command, rest in _COCOA.findall(text):
        if command not in OPTIONS:
            wrong += [f"cocoa {command}"] if quote else []  # prose may go on after the name
        else:
            wrong += [f"cocoa {command} {one}" for one in _OPTION.findall(rest) if one not in OPTIONS[command]]
    names = {name for name in _DOTTED.findall(text) if "NAME" not in name} - FORMER
    return [*_missing_paths(text), *wrong, *(name for name in names if not _exists(name))]


def _exists(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one. Modules of missing packages count."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            return _has(importlib.import_module(".".join(parts[:count])), parts[count:])
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or ""):
                return True
        except ImportError:
            return True
    return False


def _has(owner: Any, names: Sequence[str]) -> bool:
    """Whether an object has an attribute, a field or an annotation, which may be of one that it has."""
    for name in names:
        if isinstance(owner, type) and any(name in vars(one).get("__annotations__", {}) for one in owner.__mro__):
            return True
        if not hasattr(owner, name):  # an attribute of instances is named in the docstring
            return isinstance(owner, type) and f" {name}: " in str(owner.__doc__)
        owner = getattr(owner, name)
    return True


@pytest.mark.slow
def test_paths_and_commands_in_code_and_messages_exist() -> None:
    made_up = (
        Path(__file__),
        ROOT / "tests/model/test_gguf_model.py",
        ROOT / "tests/integrations/shared/test_marks_and_markers.py",
        ROOT / "tests/integrations/ray/test_ray_settings.py",
    )
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in TEXTS if path not in made_up}
    assert {name: faults for name, text in texts.items() if (faults := _faults(text))} == {}
    assert len(texts) > 500


_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`(?:[^`]*<)?~?\.?([^`>]+)>?`")


def _wrong_roles(path: Path, text: str) -> list[str]:
    """The roles in a module's docstrings that name nothing in the module, its classes or the packages around it."""
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    try:
        module = importlib.import_module(name)
    except ImportError:  # of an extra that is not installed
        return []
    packages = ["cocoa_engine", *(name.rsplit(".", up)[0] for up in range(name.count(".") + 1))]
    owners = [module, builtins, *(one for one in vars(module).values() if isinstance(one, type))]
    return [
        role
        for role in set(_ROLE.findall(text))
        if not any(_has(one, role.split(".")) for one in owners)
        and not any(_exists(one) for one in (role, *(f"{package}.{role}" for package in packages)))
    ]


@pytest.mark.slow
def test_roles_in_docstrings_exist() -> None:
    files = [path for path in TEXTS if path.suffix == ".py" and path.name != "__main__.py"]
    files = [path for path in files if path.relative_to(ROOT).parts[0] in ("cocoa_engine", "cocoa_integrations")]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    assert {name_of(path): found for path, text in texts.items() if (found := _wrong_roles(path, text))} == {}
    assert _wrong_roles(ROOT / "cocoa_engine/engine.py", "See :meth:`CocoaEngine.generat` and :func:`nothing`.") != []


def test_wrong_commands_are_seen(tmp_path: Path) -> None:
    wrong = ["cocoa ask hello --gama 1", "cocoa asc hello", "cocoa calibrate --model X --miss", "make everything"]
    wrong += ["cocoa eval nq --out runs", "pip install '.[riks]'", "python examples/none.py", "python -m benchmarks.no"]
    page = tmp_path / "page.md"
    page.write_text("\n".join(["```bash", *(f"X=1 {line} > out.txt" for line in wrong), "```"]), encoding="utf-8")
    (commands_of_page,) = [list(command_lines(block)) for block in blocks(page)]
    assert len(commands_of_page) == len(wrong)
    assert [words for words in commands_of_page if _fault(words) is None] == []


def _fault(words: list[str]) -> str | None:
    """What is wrong with a command line; None where nothing is, or nothing is known of the program."""
    program, *rest = words
    if program == "cocoa":
        if rest[:1] in (["--help"], ["--version"]):
            return None
        if not rest or rest[0] not in commands():
            return "no such command"
        try:
            "--help" in rest or commands()[rest[0]].make_context(rest[0], rest[1:])  # parsed, not run
        except Exception as error:  # usage errors are Typer's own, or click's in its earlier versions
            return repr(error)
        return None
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        return next((f"no target {word}" for word in rest if "=" not in word and word not in targets), None)
    if rest[:1] == ["install"]:
        known = PYPROJECT["project"]["optional-dependencies"]
        listed = re.findall(r"(?:^|\s)(?:\.|cocoa-integrations)\[([\w,-]+)\]", " ".join(rest))
        extras = [extra for each in listed for extra in each.split(",")]
        return next((f"no extra {extra}" for extra in extras if extra not in known), None)
    if program.startswith("python"):
        if rest[:1] == ["-m"] and rest[1].split(".")[0] in ("cocoa_engine", "cocoa_integrations", "benchmarks", "docs"):
            return None if importlib.util.find_spec(rest[1]) else f"no module {rest[1]}"
        if rest and rest[0].endswith(".py"):
            return None if (ROOT / rest[0]).exists() else f"no file {rest[0]}"
    return None
