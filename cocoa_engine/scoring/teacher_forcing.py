"""Measures given texts after a prompt, alone or as branches of one tree, as spans."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import NOT_PLACED, log_prob_and_score, mlds, passage_means
from cocoa_engine.decoding.distributions import StateReader, passage_values, source_values
from cocoa_engine.decoding.next_tokens import most_probable, token_statistics
from cocoa_engine.equations import mean_pooled, mean_pooled_sum
from cocoa_engine.errors import NonFiniteLogitsError
from cocoa_engine.execution.backends import Backend
from cocoa_engine.execution.backends.unshared import Recompute
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.process_exit import at_work
from cocoa_engine.risk import RiskCalibrator
from cocoa_engine.scoring.text_tree import Step, fed, fed_alone
from cocoa_engine.spans import Span

_CHUNK = 256  # rows of float32 logits held at once: 256 x 128k is 128 MiB


class TokenRow(NamedTuple):
    """The measurements of one token, by the names of :class:`~cocoa_engine.spans.Measured`.

    ``source`` is `None`, ``passages`` and ``top``, the most probable tokens, are empty where they are not measured.
    """

    token_id: int
    log_prob: float
    entropy: float
    margin: float
    source: float | None
    passages: Sequence[float]
    top: list[tuple[int, float]]


def token_rows(step: Step, top_count: int = 0) -> list[TokenRow]:
    """The measurements of each token of a step."""
    assert step.logits is not None
    rows: list[TokenRow] = []
    source, passages = source_values(step.output), passage_values(step.output)
    for start in range(0, len(step.token_ids), _CHUNK):
        part = slice(start, start + _CHUNK)
        token_ids, predicting = step.token_ids[part], step.logits[step.parents[part]]
        top = most_probable(predicting, top_count) if top_count else [[]] * len(token_ids)
        columns = token_ids.tolist(), *token_statistics(predicting, token_ids), source[part], passages[part], top
        rows += map(TokenRow._make, zip(*columns, strict=True))
    return rows


def require_finite(texts: Sequence[Sequence[TokenRow]], what: str) -> None:
    """Check that all tokens of some texts have a log-probability.

    Raises:
        NonFiniteLogitsError: one has none. The message says ``what``, with the indices of such texts.
    """
    bad = [number for number, rows in enumerate(texts) if not all(-math.inf < row.log_prob <= 0 for row in rows)]
    if bad:
        raise NonFiniteLogitsError(
            f"the logits of {what.format(', '.join(map(str, bad)))} are NaN or infinite; check the weights, or load "
            "the model in float32 or bfloat16."
        )


def score_texts(
    backend: Backend,
    prompt: list[int],
    texts: Sequence[list[int]],
    config: CocoaConfig,
    capture: CaptureSpec,
    passages: Sequence[range] = (),
    calibrator: RiskCalibrator | None = None,
    *,
    cancellation: Cancellation | None = None,
) -> list[tuple[Span, int]]:
    """Score each text as one span after ``prompt``, as :func:`score_spans` does for one text.

    Returns:
        For each text its span, and the number of forward passes that it took, including the prompt's. A pass over
        tokens of several texts counts for each of them.
    """
    if isinstance(backend, Recompute):  # it caches no prompt: each text takes one pass by itself
        more = (config, capture, passages, calibrator)
        return [(score_spans(backend.model, prompt, text, [len(text)], *more)[0], 1) for text in texts]
    rows: list[list[TokenRow]] = [[] for _ in texts]
    hidden: list[Tensor | int] = [0] * len(texts)
    passes = [0] * len(texts)
    with fed(backend, prompt, texts, capture, passages=passages, cancellation=cancellation) as steps:
        for step in steps:
            of_step = token_rows(step, config.top_logprobs)
            for number, own in step.rows.items():
                rows[number] += [of_step[row] for row in own]
                hidden[number] = hidden[number] + step.output.hidden[:, own].sum(dim=1)
                passes[number] += step.passes[number]
    require_finite(rows, "one of the texts to score at index {}")
    pooled = [mean_pooled_sum(state, len(own)) for state, own in zip(hidden, rows, strict=True)]  # type: ignore[arg-type]
    spans = _spans(rows, torch.stack(pooled, dim=1), config, StateReader.of(capture, calibrator))
    return [(span, step.prompt_passes + own) for span, own in zip(spans, passes, strict=True)]


@at_work
def score_spans(
    model: LanguageModel,
    prompt: list[int],
    text: list[int],
    lengths: Sequence[int] | None,
    config: CocoaConfig,
    spec: CaptureSpec,
    passages: Sequence[range] = (),
    calibrator: RiskCalibrator | None = None,
) -> list[Span]:
    """Score consecutive spans of a text, each after ``prompt`` and the spans before it, in one forward pass.

    The spans have no texts and risks yet.

    Args:
        model: the model.
        prompt, text: token ids, at least one of the text.
        lengths: the number of tokens of each span. `None` divides the text at its risk points, as
            :func:`cocoa_engine.lab.forced.spans` does: a span begins where several tokens compete by ``config.gamma``,
            and before a token that is not the most probable one.
        config: the method and its settings.
        spec: the hidden states of the MLDS.
        passages: the positions of passages of the prompt whose attention mass is measured.
        calibrator: its probe is measured, from the states that ``spec`` captures for it.
    """
    step = fed_alone(model, prompt, text, spec, passages)
    rows = token_rows(step, config.top_logprobs)
    require_finite([rows], "the text to score")
    if lengths is None:
        assert step.logits is not None
        is_best = (step.logits[:-1].argmax(dim=1) == step.token_ids).tolist()
        competes = [row.margin <= -math.log(config.gamma) for row in rows]
        starts = [at for at in range(len(text)) if at == 0 or competes[at] or not is_best[at]]
        lengths = [end - start for start, end in pairwise([*starts, len(text)])]
    pooled = [mean_pooled(state) for state in torch.split(step.output.hidden, list(lengths), dim=1)]
    ranges = pairwise(accumulate(lengths, initial=0))
    of_spans = [rows[start:end] for start, end in ranges]
    return _spans(of_spans, torch.stack(pooled, dim=1), config, StateReader.of(spec, calibrator))


def _spans(rows: Sequence[list[TokenRow]], pooled: Tensor, config: CocoaConfig, reader: StateReader) -> list[Span]:
    """B spans, from their tokens and their mean states, ``[captured layers + 1, B, d]``."""
    con, f = mlds(reader.of_mlds(pooled))
    probe: Sequence[float | None] = reader.probe_scores(pooled) or [None] * len(rows)
    spans = []
    for own, own_con, own_f, probed in zip(rows, con, f, probe, strict=True):
        token_ids, log_probs, entropies, margins, source, passages, top = map(list, zip(*own, strict=True))
        log_prob, score = log_prob_and_score(config, log_probs, own_con, own_f)
        span = Span(
            **NOT_PLACED,
            kind="given",
            token_ids=token_ids,
            token_log_probs=log_probs,
            token_entropies=entropies,
            token_margins=margins,
            token_source_attention=[mass for mass in source if mass is not None],
            passage_attention=passage_means(passages),
            log_prob=log_prob,
            con_mlds=own_con,
            f_mlds=own_f,
            score=score,
            probe=probed,
            top_log_probs=top if top[0] else None,
        )
        spans.append(span)
    return spans
