"""A backend without a cache: every step runs the whole sequence again. It is correct for every causal model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, StepOutput, TokenTree, only_paths
from cocoa_engine.execution.forward.observed_attention import observed_attention
from cocoa_engine.execution.forward.source_attention import SourceProbe, of_segments, probe_of
from cocoa_engine.model.hidden_states import CaptureSpec, capture


class RecomputedTree(TokenTree):
    """The token ids of one sequence."""

    def __init__(self, prompt: Sequence[int], capture: CaptureSpec) -> None:
        super().__init__(prompt)
        self.token_ids = list(prompt)
        self.prompt_tokens = len(prompt)
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
        return self._feed(tree, ()).logits[0]

    def step(self, requests: Sequence[tuple[RecomputedTree, FeedRequest]]) -> list[StepOutput]:
        outputs = []
        for tree, asked in requests:
            paths = only_paths(asked)
            probes = [probe_of(tree.capture.source_heads, tree.prompt_tokens, tree.passages) for _ in paths]
            fed = [self._feed(tree, path, probe) for path, probe in zip(paths, probes, strict=True)]
            tree.fed_tokens += len(fed)
            others = [each.others for each in fed if each.others is not None]
            outputs.append(
                StepOutput(
                    torch.cat([each.logits for each in fed]),
                    torch.cat([each.hidden for each in fed], dim=1),
                    torch.cat(others, dim=1) if others else None,
                    *of_segments([(probe, 1) for probe in probes]),
                )
            )
        return outputs

    def _feed(self, tree: RecomputedTree, path: Path, probe: SourceProbe | None = None) -> StepOutput:
        token_ids = torch.tensor([[*tree.token_ids, *path]], device=self.model.device)
        inputs = {"use_cache": False} if "use_cache" in self.model.forward_parameters else {}
        with (
            self.model.exclusive(),
            capture(self.model, tree.capture, keep=slice(-1, None)) as captured,
            observed_attention(self.model, probe, 1, token_ids.shape[1]),
        ):
            output = self.model.forward(token_ids, logits_to_keep=1, **inputs)
            tree.forward_passes += 1
            logits = output.logits[:, -1].float()  # [1, V]
            early = captured.early_logits(self.model, logits.device)
            return StepOutput(logits, captured.stacked(logits.device)[:, 0], None if early is None else early[:, 0])
