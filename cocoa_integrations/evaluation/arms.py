"""The arms of a comparison: decoding methods with the settings that change their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cocoa_engine import METHODS, CocoaConfig
from cocoa_engine.errors import ConfigError


class Arm(NamedTuple):
    """A decoding method, with metric and alpha if the method depends on them."""

    method: str
    metric: str | None = None
    alpha: float | None = None

    def config(self, base: CocoaConfig) -> CocoaConfig:
        """The settings of this arm; the others are taken from ``base``."""
        own = {name: value for name, value in self._asdict().items() if value is not None}
        return base.replace(**own)

    @property
    def mode(self) -> str:
        """Metric and alpha as the paper's tables write them."""
        if self.metric is None:
            return "-"
        name = {"f_mlds": "fMLDS", "con_mlds": "ConMLDS"}.get(self.metric, self.metric)
        short = f"{self.alpha:g}"  # not used if rounding changes the value
        return f"{name} (α={short if float(short) == self.alpha else self.alpha})"

    def __str__(self) -> str:
        return self.method if self.metric is None else f"{self.method} {self.mode}"


def make_arms(methods: Sequence[str], metrics: Sequence[str], alphas: Sequence[float]) -> list[Arm]:
    """All combinations of methods, metrics and alphas. A method without a disagreement penalty occurs once.

    Raises:
        ConfigError: a method or a metric is unknown, an alpha is out of range, or a list is empty.
    """
    if not (methods and metrics and alphas):
        raise ConfigError("an evaluation needs at least one method, one metric and one alpha")
    arms: list[Arm] = []
    for method in methods:
        CocoaConfig(method=method)  # raises an error for an unknown method
        for metric in metrics if _penalises(method) else [None]:
            for alpha in alphas if metric is not None else [None]:
                arm = Arm(method, metric, alpha)
                arm.config(CocoaConfig())
                arms.append(arm)
    return list(dict.fromkeys(arms))


def _penalises(method: str) -> bool:
    """Whether the score of the method depends on the disagreement and its weight."""
    score = METHODS[method].score
    return score(-1.0, 0.5, 1.0) != score(-1.0, 0.5, 2.0)
