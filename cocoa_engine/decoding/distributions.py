"""The distributions of the next tokens of one request, from the output of a pass, and its hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cocoa_engine.decoding.next_tokens import NextTokens, contrasted, next_tokens, non_finite
from cocoa_engine.decoding.request import Rules
from cocoa_engine.execution.backends import Path, StepOutput
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.risk import RiskCalibrator


@dataclass(frozen=True)
class StateReader:
    """Reads captured states of W tokens, or of W pooled spans, ``[captured layers + 1, W, d]``.

    Attributes:
        window: the rows of the MLDS's layers m..n; `None` if no other layers are captured.
        row, weights, intercept: the row that the probe reads, and its weights, ``[d]`` float32; `None` without a probe.
    """

    window: slice | None = None
    row: int = 0
    weights: Tensor | None = None
    intercept: float = 0.0

    @classmethod
    def of(cls, spec: CaptureSpec, calibrator: RiskCalibrator | None) -> "StateReader":
        """The reader of the states that ``spec`` captures, with the calibrator's probe."""
        window = None
        if spec.window is not None:
            m, n = spec.window
            window = slice(m - spec.first, n - spec.first + 1)
        probe = None if calibrator is None else calibrator.probe
        if probe is None:
            return cls(window)
        return cls(window, probe.layer - spec.first, torch.tensor(probe.weights), probe.intercept)

    def of_mlds(self, states: Tensor) -> Tensor:
        """The states of layers m..n, then of the final layer: ``[N + 1, W, d]``."""
        return states if self.window is None else torch.cat([states[:-1][self.window], states[-1:]])

    def probe_scores(self, states: Tensor) -> list[float] | None:
        """The probe's score of each token or span; `None` without a probe. A span's is the mean of its tokens'."""
        if self.weights is None:
            return None
        scores: list[float] = (states[self.row].float() @ self.weights.to(states.device) + self.intercept).tolist()
        return scores


MLDS_ALONE = StateReader()  # reads states of which all are the MLDS's


@dataclass(frozen=True)
class TokenOutput:
    """The model's output for one fed token.

    Attributes:
        logits: ``[V]``; `None` if they are not needed any more.
        hidden: ``[N + 1, d]``, the states of layers m..n and the final one; `None` for the prompt's last token.
        others: ``[K, V]``, the logits that a contrasting method contrasts with; kept only together with ``logits``.
        source: the token's source attention; `None` if the backend does not measure it.
        passages: the token's attention on each passage; empty if there are none, or if it is not measured.
        probe: the score of the calibrator's probe; `None` without one.
        next: the next-token distribution; `None` if logits processors still have to be applied or the token drawn,
            or if it is not finite.
    """

    logits: Tensor | None
    hidden: Tensor | None = None
    next: NextTokens | None = None
    others: Tensor | None = None
    source: float | None = None
    passages: Sequence[float] = ()
    probe: float | None = None


class Distributions:
    """Computes the next-token distributions of one request.

    Args:
        native: rank tokens with the native kernel; see :func:`~cocoa_engine.decoding.next_tokens.next_tokens`.
        states: divides the captured states.
    """

    def __init__(self, rules: Rules, *, native: bool = False, states: StateReader = MLDS_ALONE) -> None:
        self.rules = rules
        self._states = states
        self._method = METHODS[rules.config.method]
        self._count = max(2, rules.config.max_candidates, rules.config.top_logprobs)
        self._native = native
        # the distribution after a token is formed only when the loop asks for it
        self._needs_paths = bool(rules.processors) or rules.sampler is not None

    def outputs(self, step: StepOutput) -> list[TokenOutput]:
        """The output of a forward pass, split into one entry for each fed token."""
        source, passages = source_values(step), passage_values(step)
        hidden, probe = self._states.of_mlds(step.hidden), self._states.probe_scores(step.hidden)
        distributions = [None] * len(step.logits) if self._needs_paths else self._top(step.logits, step.others)
        outputs = []
        for row, distribution in enumerate(distributions):
            again = distribution is None or self._method.reads_back
            logits = step.logits[row] if again else None
            others = step.others[:, row] if again and step.others is not None else None
            score = None if probe is None else probe[row]
            outputs.append(TokenOutput(logits, hidden[:, row], distribution, others, source[row], passages[row], score))
        return outputs

    def after(self, prefix: Sequence[int], paths: Sequence[Path], outputs: Sequence[TokenOutput]) -> list[NextTokens]:
        """The next-token distribution after each path, with the logits processors applied.

        Args:
            prefix: the committed token ids before the paths, prompt included.
            outputs: the output for the last token of each path.
        """
        if self._needs_paths:
            others = [output.others for output in outputs if output.others is not None]
            stacked = torch.stack(others, dim=1) if others else None
            distributions = self._top(torch.stack([logits_of(output) for output in outputs]), stacked, prefix, paths)
        else:
            distributions = [
                output.next
                or self._top(logits_of(output)[None], None if output.others is None else output.others[:, None])[0]
                for output in outputs
            ]
        for path, distribution in zip(paths, distributions, strict=True):
            if distribution is None:
                raise non_finite(len(prefix) + len(path))
        return [distribution for distribution in distributions if distribution is not None]

    def _top(
        self, logits: Tensor, others: Tensor | None = None, prefix: Sequence[int] = (), paths: Sequence[Path] = ()
    ) -> list[NextTokens | None]:
        """The distribution of each row of ``[W, V]``, with the most probable tokens to record.

        A contrasting method needs ``others``, ``[K, W, V]``. Without paths, no processors are applied.
        """
        rules, config = self.rules, self.rules.config
        if others is None or not isinstance(self._method, ContrastingMethod):
            processed = rules.processed(prefix, paths, logits) if paths else logits
            rows = next_tokens(processed, self._count, native=self._native)
            if rules.sampler is not None and paths:
                rows = rules.sampler.drawn(rows, processed, [len(prefix) + len(path) for path in paths])
        else:
            contrasts = self._method.contrast(logits.float(), others, config)
            allowed = self._method.plausible(logits.float(), config)
            ranked = rules.processed(prefix, paths, contrasts.clone()) if paths else contrasts
            if allowed is not None:  # ignored in rows where the processors forbid every plausible token
                plausible = ranked.masked_fill(~allowed, -torch.inf)
                ranked = torch.where((plausible > -torch.inf).any(-1, keepdim=True), plausible, ranked)
            rows = contrasted(next_tokens(logits, self._count, native=self._native), logits, contrasts, ranked)
        if not (count := config.top_logprobs):
            return rows
        top = [() if row is None else zip(row.token_ids[:count], row.log_probs[:count], strict=True) for row in rows]
        return [row and replace(row, top=tuple(pairs)) for row, pairs in zip(rows, top, strict=True)]


def source_values(step: StepOutput) -> Sequence[float | None]:
    """The source attention of each fed token; `None` for each if it was not measured."""
    return [None] * len(step.logits) if step.source is None else step.source.tolist()


def passage_values(step: StepOutput) -> Sequence[Sequence[float]]:
    """The attention of each fed token on each passage; empty for each if there are none."""
    return [()] * len(step.logits) if step.passages is None else step.passages.tolist()


def logits_of(output: TokenOutput) -> Tensor:
    """The logits of an output that has kept them, ``[V]`` float32."""
    assert output.logits is not None
    return output.logits.float()
