"""Loading the model of a command, and cocoa info."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.output import output, print_json
from cocoa_engine.cli.progress import Progress
from cocoa_engine.model import load_options
from cocoa_engine.runtime import Runtime
from cocoa_engine.safe_text import safe

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

NO_CALIBRATOR = "none"
"""The value of ``--calibrator`` that loads none."""


def load_engine(
    model: str | None,
    options: LoadOptions,
    calibrator: Path | None = None,
    *,
    progress: Progress,
    **of_runtime: Any,
) -> CocoaEngine:
    """Load a model. torch and transformers are imported here, so that ``--help`` and errors in settings are fast."""
    declared = declared_options(model, options, calibrator, **of_runtime)
    named = "the embedded model" if model is None else Path(model).name if Path(model).exists() else model
    with progress.stage(f"loading {named} (slower the first time)"):
        import torch
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
        from huggingface_hub.utils import logging as hub_logging
        from transformers.utils import logging as transformers_logging

        from cocoa_engine import CocoaEngine

        if options.threads:
            torch.set_num_threads(options.threads)
        if not options.debug:
            transformers_logging.set_verbosity_error()
            hub_logging.set_verbosity(logging.CRITICAL)  # hide retry messages; the final error is reported anyway
            transformers_logging.disable_progress_bar()  # there is one bar
            disable_progress_bars()
        return CocoaEngine.from_pretrained(**load_options.loading_arguments(declared))


def declared_options(
    model: str | None, options: LoadOptions, calibrator: Path | None = None, **of_runtime: Any
) -> load_options.LoadOptions:
    """How a model is loaded, as the engine declares it. The arguments are those of :func:`load_engine`."""
    named = "auto" if calibrator is None else str(calibrator)
    return load_options.LoadOptions(
        model_name=model,
        tokenizer_name=options.tokenizer,
        model_kwargs={"revision": options.revision} if options.revision else {},
        dtype=options.dtype,
        device_map=options.device_map,
        runtime=Runtime(forward=options.forward, weights=options.weights, **of_runtime),
        allow_pickle=options.allow_pickle,
        trust_remote_code=options.trust_remote_code,
        calibrator=None if named == NO_CALIBRATOR else named,
    )


@with_options()
def info(
    loading: LoadOptions,
    model: Model = None,
    json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Describe a model: its layers, its middle window, and how its branches run."""
    found = load_engine(model, loading, progress=Progress("info")).info()
    if json:
        print_json(found.model_dump_json())
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in found.model_dump().items():
        lacking = "none" if name == "native_obstacle" else "unknown"
        table.add_row(name.replace("_", " "), Text(lacking if value is None else _shown(value)))
    output(no_color).print(table)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return "..".join(str(part) for part in value)
    return f"{value:,}" if isinstance(value, int) else safe(str(value))
