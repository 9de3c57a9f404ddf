"""What a validation says about a risk, in one word and one sentence."""

from __future__ import annotations

from typing import Literal, NamedTuple

from cocoa_engine.risk.features import Level
from cocoa_engine.risk.validation import Validation

Finding = Literal["holds", "ranks", "chance"]


class Verdict(NamedTuple):
    """The finding, and a sentence for people.

    Attributes:
        finding: ``"holds"``: the risk ranks better than chance, and its Brier score is below that of the base rate.
            ``"ranks"``: it ranks better than chance, but a constant risk has no higher Brier score. ``"chance"``: the
            interval of its AUROC reaches 0.5.
        sentence: the finding with its values.
    """

    finding: Finding
    sentence: str


def verdict(validation: Validation, level: Level) -> Verdict:
    """The verdict on a risk of spans or of answers."""
    auroc = validation.auroc
    ranking = f"AUROC {auroc.estimate:.3f} ({auroc.low:.3f} – {auroc.high:.3f})"
    brier = f"Brier {validation.brier:.4f}, base rate {validation.brier_of_base_rate:.4f}"
    calibrated = validation.brier < validation.brier_of_base_rate
    if auroc.low <= 0.5:
        return Verdict("chance", f"Verdict: the risk of {level}s is no better than chance here: {ranking}; {brier}.")
    if not calibrated:
        return Verdict(
            "ranks",
            f"Verdict: the risk of {level}s ranks but is not calibrated here: it is no better than the base rate as a "
            f"probability ({brier}; {ranking}).",
        )
    return Verdict("holds", f"Verdict: the risk of {level}s holds here: {ranking}; {brier}.")
