"""What integrations of the engine use besides its public classes: LangChain's and LlamaIndex's adapters, and yours.

Neither torch nor transformers is imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from cocoa_engine.confined import one_budget
from cocoa_engine.confined import run as run_confined
from cocoa_engine.decoding.matchers import unenforced_here, written
from cocoa_engine.errors import need, safe_logger, short_repr, shortened
from cocoa_engine.interruptions import free_in_child
from cocoa_engine.model.callables import Criterion, Processor
from cocoa_engine.model.load_options import (
    ACCESS_OPTIONS,
    MODEL_NAME,
    SOURCE_OPTIONS,
    DeviceMap,
    LoadOptions,
    changed_options,
    loading_arguments,
)
from cocoa_engine.model.text import block_text, require_unicode
from cocoa_engine.risk.clauses import clauses, marked_stretches, open_block, open_inline
from cocoa_engine.risk.words import is_unspaced

__all__ = [
    "ACCESS_OPTIONS",
    "MODEL_NAME",
    "SOURCE_OPTIONS",
    "Criterion",
    "DeviceMap",
    "LoadOptions",
    "Processor",
    "block_text",
    "changed_options",
    "clauses",
    "free_in_child",
    "is_unspaced",
    "loading_arguments",
    "marked_stretches",
    "need",
    "one_budget",
    "open_block",
    "open_inline",
    "require_unicode",
    "run_confined",
    "safe_logger",
    "short_repr",
    "shortened",
    "unenforced_here",
    "usable",
    "written",
]


@contextmanager
def usable(what: str) -> Iterator[None]:
    """Convert errors of wrong values of ``what`` in transformers, which checks few, to a :class:`.ConfigError`."""
    from cocoa_engine.model import generation_config

    with generation_config.usable(what):
        yield
