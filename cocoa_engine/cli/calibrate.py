"""``cocoa calibrate``: fit a risk in [0, 1] on labelled answers, and say honestly what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cocoa_engine.cli.labelled import Chat, DataPath, Draws, Format, Prompts, Seed, fed, make_folder, read
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.terminal import output, print_json
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.extras import need
from cocoa_engine.risk.calibrator import Estimate, RiskCalibrator, Settings


@with_options("gamma", "max_candidates", "middle_layers", "final_layer")
def calibrate(
    config: CocoaConfig,
    loading: LoadOptions,
    data: DataPath,
    out: Annotated[Path, typer.Option(help="The calibrator's JSON file.", dir_okay=False)],
    format: Format = None,
    prompts: Prompts = None,
    chat: Chat = False,
    isotonic: Annotated[bool, typer.Option("--isotonic", help="An isotonic map on top of the logistic model.")] = False,
    precision: Annotated[
        float | None, typer.Option(min=0, max=1, help="Choose the lowest threshold with this precision.")
    ] = None,
    recall: Annotated[
        float | None, typer.Option(min=0, max=1, help="Choose the highest threshold with this recall.")
    ] = None,
    miss: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Choose a threshold that misses at most this share, by conformal risk control."
        ),
    ] = None,
    folds: Annotated[int, typer.Option(min=2, help="Of the cross-validation, grouped by prompt.")] = 5,
    draws: Draws = 1000,
    seed: Seed = 0,
    model: Model = None,
    json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Fit a calibrator: the risk of a span in [0, 1], from its layers, log-probabilities, entropy and margin.

    Its figures are those on prompts left out of the fit, beside what ranks spans without any fit.
    """
    threshold = _threshold(precision, recall, miss)
    need("sklearn", extra="risk", what="cocoa calibrate")
    records = read(data, format, prompts, seed)
    make_folder(out.parent)
    engine = load_engine(model, loading)
    from cocoa_engine.risk.fitting import fit
    from cocoa_engine.risk.spans import labelled_features
    from cocoa_engine.signal.indicators import Layers

    Layers.of(config, engine.num_layers)  # refused before the work, not after
    unit: Literal["span", "answer"] = "answer" if records[0].spans is None else "span"
    with fed(engine, records, config, chat=chat) as answers:
        spans = labelled_features(answers, config, engine.num_layers, unit)
    calibrator = fit(
        spans,
        model_name=engine.model_name,
        settings=Settings.of(config, engine.num_layers),
        data=f"{data.name}, {len(records)} answers, {'as a chat' if chat else 'plain prompts'}",
        unit=unit,
        isotonic=isotonic,
        folds=folds,
        draws=draws,
        seed=seed,
        threshold=threshold,
    )
    calibrator.save(out)
    if json:
        print_json(calibrator.model_dump_json())
    else:
        output(no_color).print(_shown(calibrator, out))


def _threshold(
    precision: float | None, recall: float | None, miss: float | None
) -> tuple[Literal["precision", "recall", "conformal"], float] | None:
    given: list[tuple[Literal["precision", "recall", "conformal"], float]] = []
    if precision is not None:
        given.append(("precision", precision))
    if recall is not None:
        given.append(("recall", recall))
    if miss is not None:
        given.append(("conformal", miss))
    if len(given) > 1:
        raise ConfigError("--precision, --recall and --miss each choose the threshold: give one of them")
    return given[0] if given else None


def _shown(calibrator: RiskCalibrator, path: Path) -> RenderableType:
    found = calibrator.validation
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="")
    table.title = (
        f"{found.spans} {calibrator.unit}s of {found.prompts} prompts, {found.hallucinated} hallucinated; "
        f"{found.folds} folds of prompts"
    )
    for name in ("", "AUROC", "risk less that"):
        table.add_column(name, no_wrap=True)
    table.add_row("calibrated risk", _interval(found.auroc), "")
    for name, rival in found.rivals.items():
        table.add_row(name, _interval(rival.auroc), _interval(rival.difference, "+.3f"))
    lines = [
        f"AUPRC {_interval(found.auprc)}; Brier {found.brier:.4f} (of the base rate {found.brier_of_base_rate:.4f}); "
        f"ECE {found.ece:.4f}"
    ]
    if calibrator.threshold:
        one = calibrator.threshold
        precision = "no span is flagged" if one.precision is None else f"precision {one.precision:.3f}"
        lines.append(
            f"threshold {one.value:.4f} ({one.rule}, target {one.target:g}): {precision}, recall {one.recall:.3f} on "
            f"{one.prompts} prompts"
        )
    return Group(table, *(Text(line) for line in [*lines, f"Written to {path}."]))


def _interval(value: Estimate, form: str = ".3f") -> str:
    return f"{value.estimate:{form}} ({value.low:{form}} – {value.high:{form}})"
