"""The real model, loaded once for the whole run."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test waits for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread for each process, those that tests start included; before NumPy is imported. Two tests run at once, and
# threads that wait for each other's turn on the processor take more of it than they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # the process that only hands the tests out waits for neither torch nor the package
    from cocoa_engine import CocoaEngine

pytest.register_assert_rewrite("tests.helpers")
# a slow machine is no failure; the examples are the same in every run, and `make fuzz` tries more
settings.register_profile("cocoa", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("cocoa")
gc.disable()  # while the tests are imported: it would take a third of the time
with contextlib.suppress(ImportError):
    from absl import logging as absl_logging

    # its handler closes the stream that it was made with, pytest's, when `cocoa serve` configures logging in a test
    absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture(scope="session", autouse=True)
def cache_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is made of the tests' random GGUF files, and what interrupted commands leave, is not kept beyond the run."""
    from cocoa_engine.cli import measured
    from cocoa_engine.model import gguf_tokenizer

    gguf_tokenizer.FOLDER = str(tmp_path_factory.mktemp("gguf"))
    measured.FOLDER = str(tmp_path_factory.mktemp("unfinished"))


@pytest.fixture(scope="session")
def float32_engine() -> CocoaEngine:
    """The embedded SmolLM2-135M-Instruct in float32, for what is compared with other programs or depends on kernels."""
    from cocoa_engine import CocoaEngine, Runtime

    return CocoaEngine.from_pretrained(runtime=Runtime(weights="float32"), device_map=None)


@pytest.fixture(scope="module")
def tiny() -> CocoaEngine:
    """A llama with random weights. It keeps nothing of one call for the next."""
    from tests.helpers.tiny_models import engine_of, tiny_model

    return engine_of(tiny_model("llama"))


@pytest.fixture(scope="session")
def engine(block_engine: CocoaEngine) -> CocoaEngine:
    """The model of most tests. A package or a module may take another as its own."""
    return block_engine


@pytest.fixture(scope="session")
def block_engine() -> CocoaEngine:
    """The same model with its weights in the blocks of its file. It decodes twice as fast."""
    from cocoa_engine import CocoaEngine
    from cocoa_engine.model.load_options import find_embedded_file

    assert find_embedded_file() is not None, "make .venv/.demo installs the embedded model"
    return CocoaEngine.from_pretrained(device_map=None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs the real model is slow, if only because each process loads it."""
    for item in items:
        if {"engine", "block_engine", "float32_engine"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What was imported stays: it is not looked through again by each collection of garbage.

    What tests import stays, too: collections that look through everything old are a tenth as frequent.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without slow tests, a module or folder of nothing else is not imported either: some import for seconds."""
    if config.option.markexpr != "not slow":
        return None
    modules = [*collection_path.rglob("test_*.py")] if collection_path.is_dir() else [collection_path]
    return True if modules and all(_all_slow(module) for module in modules) else None


def _all_slow(module: Path) -> bool:
    text = module.read_text(encoding="utf-8") if module.name.startswith("test_") else ""
    return re.search(r"^pytestmark = (pytest\.mark\.slow$|\[[^]]*pytest\.mark\.slow\b)", text, re.MULTILINE) is not None
