"""The servers of the comparison, as their tables and targets name them."""

from __future__ import annotations

OURS, OURS_SIG = "cocoa serve, greedy", "cocoa serve, cocoa-sig"
RIVAL, RIVAL_BATCHES = "transformers serve", "transformers serve, continuous batching"
AT_ONCE = (1, 8, 32)
"""Numbers of requests at once."""
