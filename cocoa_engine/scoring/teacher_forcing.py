"""Feeding given texts after a prompt, alone or as branches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import DecidedSpan, log_prob_and_score, mlds, passage_means
from cocoa_engine.decoding.distributions import StateReader
from cocoa_engine.decoding.next_tokens import TokenStatistics, most_probable, token_statistics
from cocoa_engine.equations import mean_pooled, mean_pooled_sum
from cocoa_engine.errors import NonFiniteLogitsError
from cocoa_engine.execution.backends import Backend
from cocoa_engine.execution.backends.unshared import Recompute
from cocoa_engine.execution.forward.observed_attention import observed_attention
from cocoa_engine.execution.forward.source_attention import probe_of
from cocoa_engine.model.hidden_states import CaptureSpec, capture
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.risk import RiskCalibrator
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
    masses = None if probe is None else probe.means()
    source = [] if masses is None else masses[:, 0].tolist()
    by_passage = [] if masses is None or not passages else masses[:, 1:].tolist()
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
