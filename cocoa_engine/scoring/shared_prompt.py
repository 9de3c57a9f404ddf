"""Log-probability and disagreement of many given texts after one prompt, which is prefilled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import DecidedSpan, passage_means
from cocoa_engine.decoding.span_scoring import log_prob_and_score, mlds
from cocoa_engine.decoding.state_reader import StateReader
from cocoa_engine.decoding.token_statistics import TokenStatistics, most_probable, token_statistics
from cocoa_engine.equations import mean_pooled_sum
from cocoa_engine.errors import NonFiniteLogitsError
from cocoa_engine.execution.backends import Backend
from cocoa_engine.execution.backends.recompute import Recompute
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.risk import RiskCalibrator
from cocoa_engine.scoring.teacher_forcing import score_text
from cocoa_engine.scoring.text_tree import TextGroup, TextTree


class GivenText(NamedTuple):
    """A text to score: its token ids, and its length in characters."""

    token_ids: list[int]
    text_end: int


class ScoredText(NamedTuple):
    """A text as one measured span, and the number of forward passes it took, including the prompt's."""

    decided: DecidedSpan
    forward_passes: int


class _Measured(NamedTuple):
    """The measurements of one text."""

    tokens: TokenStatistics
    hidden: Tensor  # [captured layers + 1, d] float32: sums over the text's tokens
    source: list[float]  # of each token; empty if it was not measured
    passages: list[list[float]]  # of each token, by passage; empty without passages
    top: list[list[tuple[int, float]]]  # of each token, the most probable ones; empty unless they are asked for
    forward_passes: int


def score_texts(
    backend: Backend,
    prompt: list[int],
    texts: Sequence[GivenText],
    config: CocoaConfig,
    capture: CaptureSpec,
    passages: Sequence[range] = (),
    calibrator: RiskCalibrator | None = None,
    *,
    cancellation: Cancellation | None = None,
) -> list[ScoredText]:
    """Score each text as one span after ``prompt``, as :func:`.score_text` does for one text.

    A forward pass over tokens of several texts counts for each of them.

    Raises:
        NonFiniteLogitsError: a token's log-probability is NaN or infinite. The message names the text.
    """
    if isinstance(backend, Recompute):  # it caches no prompt: each text takes one pass by itself
        more = (config, capture, passages, calibrator)
        return [ScoredText(_alone(backend, prompt, texts, number, *more), 1) for number in range(len(texts))]
    reader = StateReader.of(capture, calibrator)
    scored: dict[int, ScoredText] = {}
    ids = [text.token_ids for text in texts]
    with TextTree(backend, prompt, ids, capture, passages=passages, cancellation=cancellation) as tree:
        for group in tree.groups():
            measured = _measure(group, config.top_logprobs)
            if not all(-float("inf") < value <= 0 for one in measured for value in one.tokens.log_probs):
                _raise_of_first_bad(backend, prompt, texts, group.numbers, config, capture)
            pooled = torch.stack([mean_pooled_sum(one.hidden, len(one.tokens.log_probs)) for one in measured], dim=1)
            con, f = mlds(reader.of_mlds(pooled))
            probe: Sequence[float | None] = reader.probe_scores(pooled) or [None] * len(measured)
            for number, one, c, final, probed in zip(group.numbers, measured, con, f, probe, strict=True):
                log_prob, score = log_prob_and_score(config, one.tokens.log_probs, c, final)
                text = texts[number]
                decided = DecidedSpan(
                    text.token_ids,
                    *one.tokens,
                    log_prob,
                    c,
                    final,
                    score,
                    [],
                    None,
                    text.text_end,
                    token_source_attention=one.source,
                    passage_attention=passage_means(one.passages),
                    probe=probed,
                    top_log_probs=one.top or None,
                )
                scored[number] = ScoredText(decided, tree.prompt_passes + one.forward_passes)
    return [scored[number] for number in range(len(texts))]


def _measure(group: TextGroup, top_count: int) -> list[_Measured]:
    """Feed a group of texts, and measure each of them."""
    statistics = TokenStatistics([], [], [])
    hidden: dict[int, Tensor] = {}
    source: list[float] = []
    passages: list[list[float]] = []
    top: list[list[tuple[int, float]]] = []
    passes = dict.fromkeys(group.numbers, 0)
    for step in group.steps():
        for values, more in zip(statistics, token_statistics(step.logits, step.token_ids, step.parents), strict=True):
            values.extend(more)
        if top_count:
            top += most_probable(step.logits, step.parents, top_count)
        if step.output.source is not None:
            source += step.output.source.tolist()
        if step.output.passages is not None:
            passages += step.output.passages.tolist()
        for number in group.numbers:
            if here := group.within(step, number):
                state = step.output.hidden[:, here].sum(dim=1)
                hidden[number] = hidden[number] + state if number in hidden else state
                passes[number] += group.passes(step, number)
    return [
        _Measured(
            TokenStatistics(*([values[row] for row in group.rows[number]] for values in statistics)),
            hidden[number],
            [source[row] for row in group.rows[number]] if source else [],
            [passages[row] for row in group.rows[number]] if passages else [],
            [top[row] for row in group.rows[number]] if top else [],
            passes[number],
        )
        for number in group.numbers
    ]


def _raise_of_first_bad(
    backend: Backend,
    prompt: list[int],
    texts: Sequence[GivenText],
    numbers: Sequence[int],
    config: CocoaConfig,
    capture: CaptureSpec,
) -> None:
    """Raise an error that names the text whose logits are not finite.

    In a pass over several texts, a NaN of one text reaches all (attention multiplies it by 0), so each text is run
    again by itself.
    """
    for number in sorted(numbers):
        _alone(backend, prompt, texts, number, config, capture)
    raise NonFiniteLogitsError(
        f"the logits of the texts to score at {', '.join(map(str, sorted(numbers)))} are NaN or infinite when the "
        "texts are fed together; load the model in float32 or bfloat16."
    )


def _alone(
    backend: Backend,
    prompt: list[int],
    texts: Sequence[GivenText],
    number: int,
    config: CocoaConfig,
    capture: CaptureSpec,
    passages: Sequence[range] = (),
    calibrator: RiskCalibrator | None = None,
) -> DecidedSpan:
    text = texts[number]
    try:
        return score_text(backend.model, prompt, text.token_ids, config, capture, text.text_end, passages, calibrator)
    except NonFiniteLogitsError as error:
        raise NonFiniteLogitsError(f"text to score at index {number}: {error}") from None
