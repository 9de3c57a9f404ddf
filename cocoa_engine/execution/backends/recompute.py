"""A backend without a cache: every step runs the whole sequence again. It is correct for every causal model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, StepOutput, TokenTree, only_paths
from cocoa_engine.execution.forward.observed_attention import observed_attention
from cocoa_engine.execution.forward.source_attention import of_segments, probe_of
from cocoa_engine.model.hidden_states import CaptureSpec, capture


class RecomputedTree(TokenTree):
    """The token ids of one sequence."""

    def __init__(self, prompt: Sequence[int], capture: CaptureSpec) -> None:
        super().__init__(prompt)
        self.token_ids = list(prompt)
        self.capture = capture

    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        self.token_ids.extend(path)
        self.committed += len(path)

    def close(self) -> None:
        """There is nothing to free."""


class Recompute(Backend[RecomputedTree]):
    """Runs the whole sequence in every step, for models with an unknown kind of cache."""

    name = "recompute"

    def open(self, prompts: Sequence[Sequence[int]], reserve_tokens: int, capture: CaptureSpec) -> list[RecomputedTree]:
        return [RecomputedTree(prompt, capture) for prompt in prompts]

    def prefill_some(self, tree: RecomputedTree, max_tokens: int | None = None) -> Tensor:
        return self.feed(tree, ()).logits[0]

    def step(self, requests: Sequence[tuple[RecomputedTree, FeedRequest]]) -> list[StepOutput]:
        outputs = []
        for tree, asked in requests:
            paths = only_paths(asked)
            outputs.append(joined([self.feed(tree, path) for path in paths]))
            tree.fed_tokens += len(paths)
        return outputs

    def feed(self, tree: RecomputedTree, path: Path, rows: int = 1) -> StepOutput:
        """Run the whole sequence with a path. The output is that of the last ``rows`` tokens."""
        token_ids = torch.tensor([[*tree.token_ids, *path]], device=self.model.device)
        inputs = {"use_cache": False} if "use_cache" in self.model.forward_parameters else {}
        probe = probe_of(tree.capture.source_heads, tree.prompt_tokens, tree.passages) if path else None
        with (
            self.model.exclusive(),
            capture(self.model, tree.capture, keep=slice(-rows, None)) as captured,
            observed_attention(self.model, probe, rows, token_ids.shape[1]),
        ):
            output = self.model.forward(token_ids, logits_to_keep=rows, **inputs)
            tree.forward_passes += 1
            logits = output.logits[0, -rows:].float()
            early = captured.early_logits(self.model, logits.device)
            return StepOutput(
                logits,
                captured.stacked(logits.device)[:, 0],
                None if early is None else early[:, 0],
                *of_segments([(probe, rows)]),
            )


def joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """The rows of several outputs of one tree."""
    logits, hidden, *others = zip(*outputs, strict=True)
    return StepOutput(
        torch.cat(logits),
        torch.cat(hidden, dim=1),
        *(None if part[0] is None else torch.cat(part, dim=dim) for part, dim in zip(others, (1, 0, 0), strict=True)),
    )
