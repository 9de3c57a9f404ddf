"""The real model, loaded once for the whole run."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test waits for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

from cocoa_engine import CocoaEngine

settings.register_profile("cocoa", deadline=None, derandomize=True)  # a slow machine is no failure
settings.load_profile("cocoa")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session")
def engine() -> CocoaEngine:
    """The embedded SmolLM2-135M-Instruct."""
    return CocoaEngine.from_pretrained(dtype="float32")
