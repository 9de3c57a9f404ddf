"""Scores of given texts: they are fed after a prompt, alone or as branches of one tree, and measured as spans."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import (
    NOT_PLACED,
    log_prob_and_score,
    mlds,
    passage_means,
    span_score,
    with_source_attention,
)
from cocoa_engine.decoding.next_tokens import most_probable, token_statistics
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.decoding.speculation import AnswerHistory
from cocoa_engine.decoding.task import complete_span, make_generation, require_ability
from cocoa_engine.decoding.token_feed import StateReader
from cocoa_engine.equations import mean_pooled, mean_pooled_sum, span_log_prob
from cocoa_engine.errors import ConfigError, NonFiniteLogitsError, PromptError
from cocoa_engine.execution.backends import Backend
from cocoa_engine.execution.backends.unshared import Recompute
from cocoa_engine.execution.session import Session
from cocoa_engine.interruptions import Cancellation, at_work
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model import prompts
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel
from cocoa_engine.model.tokenizer import token_ends
from cocoa_engine.results import Generation
from cocoa_engine.risk import RiskCalibrator
from cocoa_engine.risk.policy import RiskMeasure, RiskPolicy, reaches
from cocoa_engine.scoring.text_tree import CandidateGrower, Step, fed, fed_alone
from cocoa_engine.spans import Candidate, Span

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
    source, passages = step.output.source, step.output.passages
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
            :func:`cocoa_engine.lab.measured.spans` does: a span begins where several tokens compete by
            ``config.gamma``, and before a token that is not the most probable one.
        config: the method and its settings.
        spec: the hidden states of the MLDS.
        passages: the positions of passages of the prompt whose attention mass is measured.
        calibrator: its probes are measured, from the states that ``spec`` captures for it.
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
    probes = reader.probe_scores(pooled)
    spans = []
    for number, (own, own_con, own_f) in enumerate(zip(rows, con, f, strict=True)):
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
            top_log_probs=top if top[0] else None,
            **{name: scores[number] for name, scores in probes.items()},
        )
        spans.append(span)
    return spans


@at_work
def score(
    session: Session,
    prompt: prompts.Prompt,
    texts: Sequence[object],
    many: bool,
    config: CocoaConfig,
    risk: RiskPolicy,
    source: prompts.Source | None,
    divide: bool,
    cancellation: Cancellation,
) -> list[Generation]:
    """Score texts, of which messages name one by its index if there may be ``many``; see :meth:`CocoaEngine.score`."""
    model, method = session.model, METHODS[config.method]
    if divide and method.needs_own_passes:
        raise ConfigError(
            f"method={config.method!r} scores a text as one span; leave divide=True out, or use 'cocoa-sig'."
        )
    capture_spec(model, config)  # checks that the settings fit the model
    before = prompts.prompt_ids(model, session.tokens, prompt)
    passages = prompts.passage_positions(session.tokens, prompt, before, source)
    ids, shown, window = [], [], model.context_window
    for number, text in enumerate(texts):
        name = f"text to score at index {number}" if many else "text to score"
        token_ids, shown_text = prompts.text_ids(model, session.tokens, prompt, before, text, name)
        if method.reads_back and window is not None and 2 * len(before) + len(token_ids) > window:
            raise PromptError(
                f"the prompt ({len(before)} tokens), which method={config.method!r} reads twice, and the text to score "
                f"({len(token_ids)}) exceed the model's context window of {window}."
            )
        ids.append(token_ids)
        shown.append(shown_text)
    cancellation.check()  # what follows runs the model
    backend = session.backend  # once for a call: it reads the model's state
    measure = risk.measure(config, source, of_given_text=True, backend=backend)
    calibrator = measure.calibrator
    capture = capture_spec(model, config, calibrator)
    if method.needs_own_passes or (calibrator is not None and calibrator.heads):
        require_ability(config.method, backend, capture, calibrator)
    # the probabilities are those of the model's own distribution
    settings = (config, capture._replace(early=(), masked=()), passages, calibrator)
    if many and not divide:
        scored = score_texts(backend, before, ids, *settings, cancellation=cancellation)
        spans, passes = [[span] for span, _ in scored], [count for _, count in scored]
    else:
        spans = [score_spans(model, before, text, None if divide else [len(text)], *settings) for text in ids]
        passes = [1] * len(ids)
    if method.needs_own_passes:
        alone = [span for (span,) in spans]
        scores = _rescored(backend, before, ids, config, capture, alone, cancellation)
        for number, (value, count) in enumerate(scores):
            spans[number] = [spans[number][0].model_copy(update={"score": value})]
            passes[number] += count
    grown: list[list[list[Candidate]]] = [[[]] * len(token_ids) for token_ids in ids]
    if divide and calibrator is not None and calibrator.span is not None and method.branches:
        grown = CandidateGrower(session, config, cancellation)(before, ids)
    return [
        make_generation(
            _complete(session, before, of_text, shown_text, rivals, config, measure),
            config,
            measure,
            {"prompt_tokens": len(before), "forward_passes": count, "fed_tokens": len(token_ids)},
            finish_reason=None,
            model_name=session.model_name,
            question_tokens=prompt.question_tokens if isinstance(prompt, prompts.ChatTokens) else None,
        )
        for token_ids, count, of_text, shown_text, rivals in zip(ids, passes, spans, shown, grown, strict=True)
    ]


def _complete(
    session: Session,
    before: list[int],
    spans: Sequence[Span],
    shown: str,
    grown: Sequence[list[Candidate]],
    config: CocoaConfig,
    measure: RiskMeasure,
) -> list[Span]:
    """The spans of a text with their texts, risks, candidates and what depends on the spans before them.

    Args:
        before: token ids of the prompt.
        shown: the text.
        grown: for each token, the candidates there, if they were grown.
    """
    history = AnswerHistory(before)
    text, ends = token_ends(session.tokens, [token_id for span in spans for token_id in span.token_ids])
    dropped = shown[:1].isspace() and not text[:1].isspace()  # some tokenizers drop the space that a text begins with
    ends = [min(end + dropped, len(shown)) for end in ends]
    complete: list[Span] = []
    start = first = 0
    for span in spans:
        copied, preceding = history.extend(span.token_ids, span.token_log_probs, span.token_entropies)
        after = first + len(span.token_ids)
        end = len(shown) if after == len(ends) else ends[after - 1]
        chosen = (index for index, rival in enumerate(grown[first]) if rival.token_ids[:1] == span.token_ids[:1])
        values = {"token_copied": copied, "preceding": preceding, "token_ends": ends[first:after]}
        values |= {"candidates": [*grown[first]], "chosen": next(chosen, None)}
        measured = with_source_attention(span.model_copy(update=values), measure.calibrator)
        complete.append(complete_span(measured, (start, end, shown[start:end]), config, measure))
        start, first = end, after
    return complete


def rescore(span: Span, config: CocoaConfig) -> Span:
    """A scored text under another method, metric, alpha or ``span_log_prob``, without a forward pass.

    Args:
        span: the span of :meth:`CocoaEngine.score`. Its log-probabilities, MLDS and risk stay as they are.
        config: the settings that give the new score. The layers must be those of ``span``.

    Returns:
        A copy with the new ``log_prob`` and ``score``.

    Raises:
        ConfigError: the method's score takes forward passes of its own (``dola``, ``decore``, ``diver``).
    """
    if METHODS[config.method].needs_own_passes:
        raise ConfigError(f"method={config.method!r} takes forward passes of its own; use CocoaEngine.score.")
    log_prob, score = log_prob_and_score(config, span.token_log_probs, span.con_mlds, span.f_mlds)
    limited = reaches(span.risk, config.max_risk)
    return span.model_copy(update={"log_prob": log_prob, "score": score, "reaches_max_risk": limited})


def _rescored(
    backend: Backend,
    prompt: list[int],
    texts: Sequence[list[int]],
    config: CocoaConfig,
    capture: CaptureSpec,
    spans: Sequence[Span],
    cancellation: Cancellation,
) -> list[tuple[float, int]]:
    """The scores of texts by a method that needs passes of its own, and the number of these passes.

    A method that reads back (Diver) scores the prompt again after each text, for the mutual information
    log p(prompt | prompt, text) - log p(prompt | prompt). A contrasting method scores the contrasts of the tokens, with
    none excluded as implausible. The prompt is prefilled once without its last token, which is fed with every text,
    because its output is contrasted too.
    """
    method = METHODS[config.method]
    if not isinstance(method, ContrastingMethod):
        inputs = [[*text, *prompt] for text in ([], *texts)]
        of_inputs = score_texts(backend, prompt, inputs, config, capture, cancellation=cancellation)
        (without, passes_without), *after = of_inputs
        scores = []
        for span, (read, count) in zip(spans, after, strict=True):
            pmi = sum(read.token_log_probs[len(span.token_ids) :]) - sum(without.token_log_probs)
            value = span_score(config, span.log_prob, span.con_mlds, span.f_mlds, pmi)
            scores.append((value, max(count, passes_without)))  # usually the two are fed together
        return scores
    inputs = [[prompt[-1], *text[:-1]] for text in texts]
    width = max(1, backend.paths_per_step // (1 + len(capture.early)))  # rows of logits for every layer
    contrasts: list[list[float]] = [[] for _ in texts]
    passes = [0] * len(texts)
    with fed(backend, prompt[:-1], inputs, capture, rows_per_step=width, cancellation=cancellation) as steps:
        for step in steps:
            assert step.output.others is not None
            of_step = method.contrast(step.output.logits.float(), step.output.others, config)  # [W, V]
            for number, rows in step.rows.items():
                done = len(contrasts[number])
                targets = texts[number][done : done + len(rows)]
                contrasts[number] += of_step[rows, targets].tolist()
                passes[number] += step.passes[number] + (0 if done else step.prompt_passes)
    values = [span_log_prob(of_text, config.span_log_prob) for of_text in contrasts]
    return list(zip(values, passes, strict=True))
