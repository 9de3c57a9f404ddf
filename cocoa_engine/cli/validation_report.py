"""How good a calibrator is, as tables and as reliability curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cocoa_engine.cli.terminal import output
from cocoa_engine.output_files import draft_of
from cocoa_engine.risk.features import Level
from cocoa_engine.risk.fitted import Estimate, FittedRisk, Threshold, Validation

if TYPE_CHECKING:
    from cocoa_engine.lab.fit_calibrator import Verdict


@dataclass(frozen=True)
class ValidationReport:
    """How ``cocoa calibrate`` shows how good a calibrator is.

    Attributes:
        plot: the file that those of the reliability curves are named after; `None`: none is written.
        json: print JSON instead of tables.
        no_color: without colour.
        strict: end with status 1 if a risk is poor.
    """

    plot: Path | None
    json: bool
    no_color: bool
    strict: bool

    def plot_of(self, level: Level) -> list[Path]:
        """The file of a level's reliability curve, if one is written."""
        return [] if self.plot is None else [self.plot.with_stem(f"{self.plot.stem}-{level}")]

    def draw(self, found: Mapping[Level, Validation]) -> list[Path]:
        """Write the reliability curve of each level, and return the files."""
        from cocoa_engine.rendering.plot import reliability_curve

        files = []
        for level, validation in found.items():
            for file in self.plot_of(level):
                with draft_of(file) as draft:
                    reliability_curve(validation, level).savefig(draft, format=file.suffix[1:])
                files.append(file)
        return files

    def show(self, tables: Sequence[Group | Text], written: Sequence[Path], after: Sequence[Text] = ()) -> None:
        """Print tables, the names of written files, and some lines after them."""
        files = [Text(f"Written to {', '.join(map(str, written))}.")] if written else []
        output(self.no_color).print(Group(*tables, *files, *after))

    def exit_if_poor(self, found: Mapping[Level, Verdict]) -> None:
        """End the command with status 1 if a risk is poor, and :attr:`strict`.

        Raises:
            Exit: that is so.
        """
        if self.strict and any(one.finding != "holds" for one in found.values()):
            raise typer.Exit(1)


def validation_table(found: Validation, unit: str) -> Group:
    """How well a risk ranks and is calibrated, compared with the unfitted baselines."""
    from cocoa_engine.lab.ranking import caution

    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="")
    folds = f"; {found.division}" if found.division else ""
    table.title = f"{found.items} {unit}s of {found.prompts} prompts, {found.hallucinated} hallucinated{folds}"
    for name in ("", "AUROC", "risk minus that"):
        table.add_column(name, overflow="fold")
    table.add_row("calibrated risk", _interval(found.auroc), "")
    for name, baseline in found.rivals.items():
        table.add_row(name, _interval(baseline.auroc), _interval(baseline.difference, "+.3f"))
    line = (
        f"AUPRC {_interval(found.auprc)}; Brier {found.brier:.4f} (base rate {found.brier_of_base_rate:.4f}); "
        f"ECE {found.ece:.4f}"
    )
    return Group(table, Text(line), *([] if (warning := caution(found.prompts)) is None else [Text(warning)]))


def risk_table(fitted: FittedRisk, unit: str) -> Group:
    """The validation of a fitted risk, and its threshold."""
    validation = validation_table(fitted.validation, unit)
    if fitted.threshold is None:
        return validation
    one = fitted.threshold
    precision = f"no {unit} is flagged" if one.precision is None else f"precision {one.precision:.3f}"
    line = (
        f"threshold {one.value:.4f} ({one.rule}, target {one.target:g}): {precision}, recall {one.recall:.3f} on "
        f"{one.prompts} prompts"
    )
    return Group(validation, Text(line), *([Text(_guarantee(one, unit))] if one.rule == "conformal" else []))


def _guarantee(threshold: Threshold, unit: str) -> str:
    """The guarantee of conformal risk control, in words."""
    promise = (
        f"Guarantee: for a new prompt exchangeable with these {threshold.prompts}, the expected share of hallucinated "
        f"{unit}s below the threshold is at most {threshold.target:g}. It holds on average over prompts, not for each "
        "prompt, and for texts measured in the same way."
    )
    if threshold.target * (threshold.prompts + 1) >= 1:
        return promise
    return f"{promise} {threshold.prompts} prompts are too few for a threshold above 0, which flags everything."


def _interval(value: Estimate, form: str = ".3f") -> str:
    from cocoa_engine.lab.ranking import Interval

    return Interval(value.estimate, value.low, value.high).shown(form)
