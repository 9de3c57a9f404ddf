"""Log-probability and disagreement of a given text after a prompt, in one forward pass without generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import DecidedSpan, passage_means
from cocoa_engine.decoding.span_scoring import log_prob_and_score, mlds
from cocoa_engine.decoding.state_reader import StateReader
from cocoa_engine.decoding.token_statistics import TokenStatistics, most_probable, token_statistics
from cocoa_engine.equations import mean_pooled
from cocoa_engine.errors import NonFiniteLogitsError
from cocoa_engine.execution.forward.observed_attention import observed_attention
from cocoa_engine.execution.forward.source_attention import probe_of
from cocoa_engine.model.hidden_states import CaptureSpec, capture
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.risk import RiskCalibrator

_CHUNK = 256  # rows of float32 logits held at once: 256 x 128k is 128 MiB


def score_text(
    model: LanguageModel,
    prompt: list[int],
    text: list[int],
    config: CocoaConfig,
    spec: CaptureSpec,
    text_end: int,
    passages: Sequence[range] = (),
    calibrator: RiskCalibrator | None = None,
) -> DecidedSpan:
    """Score ``text`` as one span after ``prompt``, by the model's own distribution; see :func:`score_spans`."""
    return score_spans(model, prompt, [text], config, spec, [text_end], passages, calibrator)[0]


def score_spans(
    model: LanguageModel,
    prompt: list[int],
    spans: Sequence[list[int]],
    config: CocoaConfig,
    spec: CaptureSpec,
    text_ends: Sequence[int],
    passages: Sequence[range] = (),
    calibrator: RiskCalibrator | None = None,
) -> list[DecidedSpan]:
    """Score consecutive spans of a text, each after ``prompt`` and the spans before it, in one forward pass.

    Args:
        model: the model.
        prompt: token ids.
        spans: the token ids of each span, at least one.
        config: the method and its settings.
        spec: the hidden states of the MLDS.
        text_ends: for each span, the offset after its last character in the text.
        passages: the positions of passages of the prompt whose attention mass is measured.
        calibrator: its probe is measured, from the states that ``spec`` captures for it.

    Raises:
        NonFiniteLogitsError: a token's log-probability is NaN or infinite.
    """
    text = [token_id for span in spans for token_id in span]
    lengths = [len(span) for span in spans]
    return _score(
        model,
        prompt,
        text,
        config,
        spec,
        divide=lambda *_: lengths,
        text_ends=text_ends,
        passages=passages,
        calibrator=calibrator,
    )


def score_divided(
    model: LanguageModel,
    prompt: list[int],
    text: list[int],
    config: CocoaConfig,
    spec: CaptureSpec,
    passages: Sequence[range] = (),
    calibrator: RiskCalibrator | None = None,
) -> list[DecidedSpan]:
    """Score a text divided at its risk points, in one forward pass; see :func:`score_spans`.

    A span begins where several tokens compete by ``config.gamma``, and before a token that is not the most probable
    one, as in :func:`cocoa_engine.lab.forced.spans`. The spans' ``text_end`` is their number of tokens.
    """

    def lengths(statistics: TokenStatistics, predicting: Tensor) -> list[int]:
        is_best = (predicting.argmax(dim=1).cpu() == torch.tensor(text)).tolist()
        competes = [margin <= -math.log(config.gamma) for margin in statistics.margins]
        starts = [at for at in range(len(text)) if at == 0 or competes[at] or not is_best[at]]
        return [end - start for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]

    return _score(
        model, prompt, text, config, spec, divide=lengths, text_ends=None, passages=passages, calibrator=calibrator
    )


def _score(
    model: LanguageModel,
    prompt: list[int],
    text: list[int],
    config: CocoaConfig,
    spec: CaptureSpec,
    *,
    divide: Callable[[TokenStatistics, Tensor], list[int]],
    text_ends: Sequence[int] | None,
    passages: Sequence[range],
    calibrator: RiskCalibrator | None,
) -> list[DecidedSpan]:
    """Score the spans of a text; ``divide`` returns their lengths from the statistics and the logits of the tokens."""
    token_ids = torch.tensor([[*prompt, *text]], device=model.device)
    inputs = {"use_cache": False} if "use_cache" in model.forward_parameters else {}
    probe = probe_of(spec.source_heads, len(prompt), passages)
    with (
        model.exclusive(),
        capture(model, spec, keep=slice(len(prompt), None)) as captured,
        observed_attention(model, probe, len(text), len(prompt) + len(text)),
    ):
        logits = model.forward(token_ids, logits_to_keep=len(text) + 1, **inputs).logits[0]
        predicting = logits[-len(text) - 1 : -1]  # [t, V]: each row predicts one token of the text
        statistics = _in_chunks(predicting, torch.tensor(text, device=logits.device))
        top = _most_probable_in_chunks(predicting, config.top_logprobs)
        lengths = divide(statistics, predicting)
        states = torch.split(captured.stacked(logits.device)[:, 0], lengths, dim=1)
        pooled = torch.stack([mean_pooled(state) for state in states], dim=1)  # [captured layers + 1, B, d]
        reader = StateReader.of(spec, calibrator)
        con, f = mlds(reader.of_mlds(pooled))
        scores = reader.probe_scores(pooled)
    measured, of_passages = (None, None) if probe is None else (probe.mean(), probe.of_passages())
    source = [] if measured is None else measured.tolist()
    by_passage = [] if of_passages is None else of_passages.tolist()
    if not all(-float("inf") < value <= 0 for value in statistics.log_probs):
        position = len(prompt) + _first_bad(model, prompt, text)
        raise NonFiniteLogitsError(
            f"the logits for token {position} of the sequence (prompt included) are NaN or infinite; "
            "check the weights, or load the model in float32 or bfloat16."
        )
    decided = []
    start = 0
    for number, length in enumerate(lengths):
        rows = slice(start, start + length)
        start += length
        own = TokenStatistics(*(values[rows] for values in statistics))
        log_prob, score = log_prob_and_score(config, own.log_probs, con[number], f[number])
        decided.append(
            DecidedSpan(
                text[rows],
                *own,
                log_prob,
                con[number],
                f[number],
                score,
                [],
                None,
                start if text_ends is None else text_ends[number],
                token_source_attention=source[rows],
                passage_attention=passage_means(by_passage[rows]),
                probe=None if scores is None else scores[number],
                top_log_probs=top[rows] or None,
            )
        )
    return decided


def _in_chunks(logits: Tensor, token_ids: Tensor) -> TokenStatistics:
    """The statistics of each token under its row of ``logits`` ``[t, V]``."""
    statistics = TokenStatistics([], [], [])
    for start in range(0, len(token_ids), _CHUNK):
        rows, ids = logits[start : start + _CHUNK], token_ids[start : start + _CHUNK]
        of_chunk = token_statistics(rows, ids, torch.arange(len(ids), device=ids.device))
        for values, more in zip(statistics, of_chunk, strict=True):
            values.extend(more)
    return statistics


def _most_probable_in_chunks(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The most probable tokens of each row of ``logits`` ``[t, V]``; an empty list if none are asked for."""
    if not count:
        return []
    chunks = [logits[start : start + _CHUNK] for start in range(0, len(logits), _CHUNK)]
    return [row for chunk in chunks for row in most_probable(chunk, torch.arange(len(chunk)), count)]


def _first_bad(model: LanguageModel, prompt: list[int], text: list[int]) -> int:
    """The index of the first token of the text that is predicted by logits that are not finite.

    In the pass over the whole text, a NaN also reaches earlier positions (attention multiplies it by 0). Prefixes are
    therefore run by themselves, by bisection.
    """
    good, bad = -1, len(text) - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        token_ids = torch.tensor([[*prompt, *text[:middle]]], device=model.device)
        with model.exclusive():
            finite = bool(model.forward(token_ids, logits_to_keep=1).logits[0, -1].isfinite().all())
        good, bad = (middle, bad) if finite else (good, middle)
    return bad
