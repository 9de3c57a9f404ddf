"""A missing package is one clear error, and nothing imports a framework that it does not need."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from cocoa_engine.errors import CocoaError, MissingExtraError
from cocoa_engine.optional import need, quiet_torchao

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

frameworks = {"langchain_core", "langchain", "langgraph", "openai", "llama_index"}
missing = set()

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def without(*names):
    for name in [name for name in sys.modules if name.partition(".")[0] in {*frameworks, "cocoa_integrations"}]:
        del sys.modules[name]
    missing.clear()
    missing.update(names)

sys.meta_path.insert(0, Missing())
without(*frameworks, "lm_eval")  # neither framework
import cocoa_integrations.evaluation.command
import cocoa_integrations.evaluation.judge
import cocoa_integrations.tool_calling
import cocoa_integrations.tracing
import cocoa_integrations.transformers
from cocoa_engine import CocoaEngine
from cocoa_engine.errors import MissingExtraError

for module, package, extra in (
    ("langchain", "langchain-core", "langchain"),
    ("llama_index", "llama-index-core", "llama-index"),
    ("lm_eval", "lm-eval", "eval"),
):
    try:
        __import__(f"cocoa_integrations.{module}")
    except MissingExtraError as error:
        command = f"pip install 'cocoa-integrations[{extra}]'"
        assert str(error) == f"cocoa_integrations.{module} needs {package}: {command}", error
    else:
        raise AssertionError(module)
try:
    cocoa_integrations.evaluation.command.chat_model("openai:gpt")
except MissingExtraError as error:
    assert str(error) == "cocoa judge needs langchain: pip install 'cocoa-integrations[agents]'", error

without(*frameworks - {"langchain_core"})  # only langchain_core
import cocoa_integrations.server
from cocoa_integrations.langchain import ChatCocoa

try:
    import cocoa_integrations.langchain.agents
except MissingExtraError as error:
    assert "needs langchain: pip install 'cocoa-integrations[agents]'" in str(error), error
else:
    raise AssertionError("agents")

without(*frameworks - {"llama_index"})  # only llama_index
from cocoa_integrations.llama_index import CocoaLLM
"""


@pytest.mark.slow
def test_without_packages() -> None:
    """And nothing prints anything, be it torchao, which transformers imports where it is installed."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_error_names_the_distribution_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(
        MissingExtraError, match=r"^fitting needs scikit-learn: pip install 'cocoa-integrations\[risk\]'$"
    ) as caught:
        need("sklearn.linear_model", extra="risk", what="fitting")
    assert isinstance(caught.value, CocoaError)
    assert isinstance(caught.value, ImportError)
    assert need("json.decoder", extra="risk", what="nothing").JSONDecoder


def test_a_package_that_lacks_something_itself_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cocoa_made_up.py").write_text("import cocoa_made_up_too")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="cocoa_made_up_too") as caught:
        need("cocoa_made_up", extra="risk", what="nothing")
    assert not isinstance(caught.value, MissingExtraError)


def test_only_what_torchao_says_at_its_import_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("torchao", "cocoa_engine"):
        logging.getLogger(name).warning("before")
        with quiet_torchao():
            logging.getLogger(name).warning("while")
        logging.getLogger(name).warning("after")
    said = [(record.name, record.getMessage()) for record in caplog.records]
    assert said == [
        ("torchao", "before"),
        ("torchao", "after"),
        ("cocoa_engine", "before"),
        ("cocoa_engine", "while"),
        ("cocoa_engine", "after"),
    ]
