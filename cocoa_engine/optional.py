"""Optional packages: one error for a missing package, and no log messages from unused ones."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from cocoa_engine.errors import MissingExtraError

DISTRIBUTIONS = {
    "jsonschema_specifications": "jsonschema-specifications",
    "langchain_core": "langchain-core",
    "llama_index": "llama-index-core",
    "lm_eval": "lm-eval",
    "opentelemetry": "opentelemetry-api",
    "rouge_score": "rouge-score",
    "sklearn": "scikit-learn",
}
"""The packages whose name on the package index differs from the name of their module.

A module of a package that several distributions share is listed by its full name."""


def need(module: str, *, extra: str, what: str) -> Any:
    """Import and return a module of an optional package, which an extra of this package installs.

    Raises:
        MissingExtraError: the package is not installed. The message says ``what`` needs it.
    """
    top = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # the package is installed, but one of its own imports is missing
        distribution = DISTRIBUTIONS.get(module) or DISTRIBUTIONS.get(top, top)
        raise MissingExtraError(
            f"{what} needs {distribution}: pip install 'cocoa-integrations[{extra}]'", name=error.name
        ) from None


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Suppress the log messages of torchao while it is imported.

    transformers imports torchao with its model classes, wherever it is installed. Its warnings, about kernels for other
    machines, do not concern a model that is not quantised.
    """

    def drop(record: logging.LogRecord) -> bool:
        return False

    with ExitStack() as stack:
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).addFilter(drop)
            stack.callback(logging.getLogger(name).removeFilter, drop)
        yield
