"""Values that are not finite numbers: in comparisons they are above every threshold, in metadata they are ``None``."""

from __future__ import annotations

import math
from typing import Any

UNLIKELY = -9999.0
"""What OpenAI's ``logprobs`` have instead of minus infinity."""


def finite(value: float | None) -> float | None:
    """The value as metadata can have it: JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None


def is_unmeasured(span: dict[str, Any]) -> bool:
    """Whether the risk of an entry of ``cocoa_spans`` was not measured, as after a prompt without a source.

    A risk that was measured and is not finite is `None` too.
    """
    source = span.get("risk_source", "source_attention")
    return span["risk"] is None and not span.get("flagged") and source == "source_attention"


def severity(value: float | None) -> float:
    """The value as it is compared: one that is unknown, NaN or infinite counts as infinitely risky."""
    return value if value is not None and math.isfinite(value) else math.inf
