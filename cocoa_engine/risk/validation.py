"""How good a fitted risk is on prompts that it was not fitted on."""

from __future__ import annotations

from pydantic import Field

from cocoa_engine.risk.part import Part


class Estimate(Part):
    """An estimate with its 95 % bootstrap interval over prompts."""

    estimate: float
    low: float
    high: float


class Baseline(Part):
    """A baseline that needs no fit: its AUROC, and the calibrated risk's AUROC minus the baseline's."""

    auroc: Estimate
    difference: Estimate


class ReliabilityBin(Part):
    """Items of similar risk: their number, their mean risk, and the share of them that is hallucinated."""

    items: int
    mean_risk: float
    share_hallucinated: float


class Validation(Part):
    """The quality of the risk on prompts that it was not fitted on, by grouped cross-validation.

    AUROC and AUPRC, also those of the baselines (``rivals``), compare items of the same fold only, because the risks of
    two folds come from two fits.
    """

    folds: int = Field(description="Folds of the cross-validation; 0 if the risk was fitted on other data.")
    repeats: int = Field(
        1, description="How often the prompts were divided into folds; the values cover all divisions."
    )
    prompts: int
    items: int = Field(description="Spans, or answers as wholes.")
    hallucinated: int
    auroc: Estimate
    auprc: Estimate
    brier: float = Field(description="Mean squared error of the risk.")
    brier_of_base_rate: float = Field(description="The same for a constant risk, the share of hallucinated items.")
    ece: float = Field(description="Expected calibration error over the reliability bins.")
    reliability: list[ReliabilityBin]
    rivals: dict[str, Baseline]

    @property
    def division(self) -> str:
        """A description of the folds; empty if the risk was fitted on other data."""
        again = f", divided {self.repeats} times" if self.repeats > 1 else ""
        return f"{self.folds} folds of prompts{again}" if self.folds else ""
