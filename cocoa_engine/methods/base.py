"""What a decoding method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class DecodingMethod(ABC):
    """One way to rank candidate spans.

    Attributes:
        name: the name a user gives as ``CocoaConfig(method=...)``.
        branches: whether a risk point is branched at all; a method that does not takes the most probable token.
    """

    name: ClassVar[str]
    branches: ClassVar[bool] = True

    @abstractmethod
    def score(self, log_prob: float, mlds: float, alpha: float) -> float:
        """Score of a span, higher is better; ``log_prob`` is log p_S in nats, ``mlds`` the chosen metric."""
