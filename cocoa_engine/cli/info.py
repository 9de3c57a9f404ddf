"""Loading the model of a command, and cocoa info."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column
from rich.text import Text

from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.output import output, plain_table, print_json
from cocoa_engine.cli.progress import Progress
from cocoa_engine.model import load_options
from cocoa_engine.runtime import Runtime
from cocoa_engine.safe_text import safe

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine


def load_engine(
    model: str | None,
    options: LoadOptions,
    calibrator: Path | None = None,
    *,
    progress: Progress,
    **of_runtime: Any,
) -> CocoaEngine:
    """Load a model. Only here are torch and transformers imported, so that ``--help`` and bad input are fast."""
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
        calibrator=None if named == "none" else named,
    )


@with_options()
def info(loading: LoadOptions, model: Model = None, json: Json = False, no_color: NoColor = False) -> None:
    """Describe a model: its layers, its middle window, and how its branches run."""
    about = load_engine(model, loading, progress=Progress("info")).info()
    if json:
        print_json(about.model_dump_json())
        return
    table = plain_table(Column(style="bold", no_wrap=True), Column(overflow="fold"))
    for name, value in about.model_dump().items():
        match value:
            case None:
                shown = "none" if name == "native_obstacle" else "unknown"
            case bool():
                shown = "yes" if value else "no"
            case tuple() | list():
                shown = "..".join(map(str, value))
            case _:
                shown = f"{value:,}" if isinstance(value, int) else safe(str(value))
        table.add_row(name.replace("_", " "), Text(shown))
    output(no_color).print(table)
