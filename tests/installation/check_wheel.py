"""Install the wheel with each extra alone, and use it: ``make wheel``.

The wheel and the packages that it always needs go into one virtual environment. Each extra gets an environment of its
own in which that one's packages are visible too, so that torch is installed once. Nothing of this clone can be imported
in them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LIMIT = 1800
"""Seconds for one command, the longest being the installation of torch."""
ENGINE = "from cocoa_engine import CocoaConfig, CocoaEngine\nengine = CocoaEngine.from_pretrained()\n"

# The modules that only an extra brings.
OPTIONAL = {
    "langchain_core": {"langchain", "agents"},
    "langchain": {"agents"},
    "langgraph": {"agents"},
    "llama_index.core": {"llama-index"},
    "openai": {"remote"},
    "llguidance": {"tools", "serve", "ray"},
    "fastapi": {"serve", "ray"},
    "uvicorn": {"serve", "ray"},
    "ray": {"ray"},
    "opentelemetry": {"tracing", "serve", "ray"},  # FastAPI needs it too
    "matplotlib": {"plot", "risk"},
    "sklearn": {"risk", "eval"},
    "lm_eval": {"eval"},
    "datasets": {"eval"},
    "pyarrow": {"eval", "ray"},
    "rouge_score": {"eval"},
}

VISIBLE = f"""
import json
from importlib.util import find_spec
def there(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print(json.dumps([name for name in {list(OPTIONAL)} if there(name)]))
"""

# Without any extra, what needs one says how to install it; everything else works.
BASE = (
    ENGINE
    + """
import importlib
import cocoa_engine, cocoa_integrations.evaluation, cocoa_integrations.tool_calling, cocoa_integrations.transformers
from cocoa_engine.errors import CocoaError, MissingExtraError
from cocoa_integrations.evaluation.metrics import rouge_l
from cocoa_engine.lab.fit import fit

answer = engine.generate("Dune was written by", max_new_tokens=4)
for extra, call in {
    "serve": lambda: importlib.import_module("cocoa_integrations.server").create_app,
    "ray": lambda: importlib.import_module("cocoa_integrations.ray").app,
    "tools": lambda: engine.constrain(regex="a"),
    "plot": answer.plot,
    "risk": lambda: fit(None, ""),
    "eval": lambda: rouge_l("a", ["a"]),
}.items():
    try:
        call()
    except MissingExtraError as error:
        assert isinstance(error, CocoaError) and isinstance(error, ImportError)
        assert f"pip install 'cocoa-integrations[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"{extra} is not missing")
"""
)

CALLS = {
    "langchain": """
from cocoa_integrations.langchain import ChatCocoa
message = ChatCocoa(max_tokens=8).invoke("Who wrote Dune?")
assert message.text and message.response_metadata["cocoa_risk"]["spans"]
""",
    "llama-index": """
from cocoa_integrations.llama_index import CocoaLLM
answer = CocoaLLM(max_tokens=8).complete("The capital of France is")
assert answer.text and answer.additional_kwargs["cocoa_risk"]["spans"]
""",
    "agents": """
from langchain.agents import create_agent
from cocoa_integrations.langchain import ChatCocoa, RiskMiddleware, ToolRiskMiddleware
middleware = [RiskMiddleware(0.0, on_risk="abstain", answer="No idea."), ToolRiskMiddleware(0.5)]
agent = create_agent(ChatCocoa(max_tokens=8), [], middleware=middleware)
assert agent.invoke({"messages": [("user", "Who wrote Dune?")]})["messages"][-1].text == "No idea."
""",
    "remote": """
import openai
from cocoa_integrations.chat_service import ChatCall, RemoteChat
try:
    RemoteChat("http://127.0.0.1:9/v1", max_retries=0).answer(ChatCall(prompt="Dune was written by"))
except openai.APIConnectionError:
    pass
else:
    raise AssertionError("nothing listens there")
""",
    "tools": ENGINE
    + """
year = engine.generate("Dune was published in", max_new_tokens=8, logits_processor=[engine.constrain(regex="[0-9]{4}")])
assert year.text.isdigit() and len(year.text) == 4, year.text
""",
    "tracing": ENGINE
    + """
from cocoa_integrations.chat_service import ChatCall, LocalChat
from cocoa_integrations.tracing import RiskTrace
call = ChatCall(prompt="Dune was written by", config=CocoaConfig(max_new_tokens=4))
RiskTrace().record(LocalChat(engine).answer(call))
""",
    "serve": ENGINE
    + """
import asyncio
from cocoa_integrations.server import create_app

async def get(app, path):
    sent = []
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [(b"host", b"localhost")]}
    async def send(message):
        sent.append(message)
    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

status, page = asyncio.run(get(create_app(engine), "/"))
assert status == 200 and b"</html>" in page and b"class Column" in page and b".cocoa-level-3" in page, page[:200]
assert asyncio.run(get(create_app(engine), "/v1/models"))[0] == 200
""",
    "plot": ENGINE
    + """
assert engine.generate("Dune was written by", max_new_tokens=4).plot()._repr_png_().startswith(b"\\x89PNG")
""",
    "risk": """
import numpy as np
from cocoa_engine.lab.fit import FitSettings, LabelledFeatures, fit
from cocoa_engine.rendering.plot import reliability_curve
from cocoa_engine.risk.features import SPAN_FEATURES
figures = np.random.default_rng(0).normal(size=(200, len(SPAN_FEATURES)))
items = LabelledFeatures(SPAN_FEATURES, figures, figures[:, 1] > 0, [str(n // 4) for n in range(200)])
risk, _ = fit(items, "made up", FitSettings(draws=20))
reliability_curve(risk.validation, "span")
""",
    "eval": ENGINE
    + """
import pyarrow, pyarrow.parquet
from cocoa_integrations.evaluation import load_samples
from cocoa_integrations.evaluation.metrics import rouge_l
from cocoa_integrations.lm_eval import CocoaLM
from lm_eval.api.instance import Instance
row = {"question": "Who?", "sub_context": "It was Ann.", "sub_answer": ["Ann"]}
pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), "nq.parquet")
assert load_samples("nq_swap", "nq.parquet")[0].references == ["Ann"]
assert rouge_l("the cat sat", ["the cat sat"]) == 1
asked = [Instance("loglikelihood", {}, ("Dune was written by", name), 0) for name in (" Frank", " xyz")]
likely, unlikely = CocoaLM(engine=engine).loglikelihood(asked)
assert likely[0] > unlikely[0]
""",
}


class Environment:
    """A virtual environment without pip; another one's packages are visible in it if that is given."""

    def __init__(self, folder: Path, below: Environment | None = None) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=LIMIT)
        self.folder = folder
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        if below is not None:
            (self.packages / "below.pth").write_text(f"{below.packages}\n", encoding="utf-8")

    def install(self, *what: str) -> None:
        """Install with this Python's pip: quietly, but for errors."""
        self.run(
            *(sys.executable, "-m", "pip", "--python", str(self.python), "install", "-qq", "--no-compile"),
            *("--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), *what),
        )

    def run(self, *command: str, fails: bool = False) -> str:
        """What a command prints, or its error if it is to fail. It runs outside of the clone, without any model hub."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=environment, check=False, timeout=LIMIT
        )
        if bool(done.returncode) != fails:
            raise SystemExit(
                f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n{self.folder.name}: exit code {done.returncode}"
            )
        return done.stderr if fails else done.stdout

    def call(self, program: str) -> str:
        """Run a Python program."""
        return self.run(str(self.python), "-c", program)


def check_base(base: Environment, wheel: Path) -> None:
    """Without extras: the engine and the command line."""
    visible = set(json.loads(base.call(VISIBLE)))
    assert not visible, f"{wheel.name} without extras brings {visible}"
    cocoa = str(base.folder / "bin" / "cocoa")
    version = wheel.name.split("-")[1]
    assert version in base.run(cocoa, "--version"), f"cocoa --version is not {version}"
    listed = base.run(cocoa, "--help")
    assert all(command in listed for command in ("ask", "eval", "judge"))
    assert "cannot be loaded" not in listed, listed
    error = base.run(cocoa, "ask", "Who wrote Dune?", fails=True)  # the embedded model is a package of its own
    command = re.search(r"`pip install (.*?)`", error)
    assert command, error
    base.install(*command[1].split())
    base.call(BASE)
    assert base.run(cocoa, "ask", "Who wrote Dune?", "--max-new-tokens", "8").strip()


def check_extra(extra: str, folder: Path, base: Environment, wheel: Path) -> Environment:
    """One extra alone: it brings what it says, and it works."""
    environment = Environment(folder / extra, base)
    environment.install(f"cocoa-integrations[{extra}] @ {wheel.as_uri()}")
    expected = {module for module, extras in OPTIONAL.items() if extra in extras}
    visible = set(json.loads(environment.call(VISIBLE)))
    assert visible == expected, f"[{extra}] brings {visible}, not {expected}"
    environment.call(CALLS[extra])
    print(f"[{extra}] works", flush=True)
    return environment


def check_all(folder: Path, layers: list[Environment], wheel: Path) -> None:
    """All extras together: what each one installed fits the others, and nothing is left to be installed."""
    environment = Environment(folder / "all", layers[0])
    with (environment.packages / "below.pth").open("a", encoding="utf-8") as file:
        file.writelines(f"{layer.packages}\n" for layer in layers[1:])
    pip = (sys.executable, "-m", "pip", "--python", str(environment.python))
    report = json.loads(
        environment.run(
            *(*pip, "install", "-qq", "--dry-run", "--report", "-", "-c", str(ROOT / "constraints.txt")),
            f"cocoa-integrations[all] @ {wheel.as_uri()}",
        )
    )

    wanted = {canonicalize_name(one["metadata"]["name"]) for one in report["install"]}
    # a package that several extras share may be there in a version that suits one of them only
    there = {canonicalize_name(one.name) for layer in layers for one in distributions(path=[str(layer.packages)])}
    missing = wanted - there - {"cocoa-integrations"}
    assert not missing, f"[all] brings more than its extras do: {missing}"


def main() -> None:
    """Build the wheel, and try it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("extras", nargs="*", help="only these", default=list(CALLS))
    chosen = arguments.parse_args().extras
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [sys.executable, "-m", "pip", "wheel", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=LIMIT)
        (wheel,) = folder.glob("cocoa_integrations-*.whl")
        base = Environment(folder / "base")
        base.install(str(wheel))
        check_base(base, wheel)
        print(f"{wheel.name} works without extras", flush=True)
        with ThreadPoolExecutor(2) as two:
            layers = [base, *two.map(lambda extra: check_extra(extra, folder, base, wheel), chosen)]
        if len(layers) == len(CALLS) + 1:
            check_all(folder, layers, wheel)
            print("[all] resolves")


if __name__ == "__main__":
    main()
