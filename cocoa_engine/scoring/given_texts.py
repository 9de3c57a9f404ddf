"""Scores of given texts, as generations."""

from collections.abc import Sequence

import torch

from cocoa_engine.arguments import given_or_new
from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import log_prob_and_score, span_score, with_source_attention
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.decoding.result_builder import complete_span, make_generation, token_ends
from cocoa_engine.decoding.speculation import AnswerHistory
from cocoa_engine.decoding.task import require_ability
from cocoa_engine.equations import span_log_prob
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.execution.backends import Backend
from cocoa_engine.execution.session import Session
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model import prompts
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.process_exit import at_work
from cocoa_engine.results import Generation
from cocoa_engine.risk.policy import RiskMeasure, RiskPolicy, reaches
from cocoa_engine.scoring.candidates import CandidateGrower
from cocoa_engine.scoring.teacher_forcing import score_spans, score_texts
from cocoa_engine.scoring.text_tree import fed
from cocoa_engine.spans import Candidate, Span


@at_work
def score(
    session: Session,
    prompt: prompts.Prompt,
    text: str | Sequence[int] | prompts.Texts,
    config: CocoaConfig,
    risk: RiskPolicy,
    source: prompts.Source | None = None,
    divide: bool = False,
    cancellation: Cancellation | None = None,
) -> Generation | list[Generation]:
    """Score a text, or each of several texts; see :meth:`CocoaEngine.score`."""
    cancellation = given_or_new(cancellation, Cancellation, "cancellation")
    texts = list(text) if prompts.is_many(text) else [text]
    scored = cancellation.run(
        _scored, session, prompt, texts, prompts.is_many(text), config, risk, source, divide, cancellation
    )
    return scored if prompts.is_many(text) else scored[0]


def _scored(
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
    measure = risk.measure(config, source, of_given_text=True)
    calibrator = measure.calibrator
    capture = capture_spec(model, config, calibrator)
    if method.needs_own_passes or (calibrator is not None and calibrator.heads):
        require_ability(config.method, session.backend, capture, calibrator)
    # the probabilities are those of the model's own distribution
    settings = (config, capture._replace(early=(), masked=()), passages, calibrator)
    if many and not divide:
        scored = score_texts(session.backend, before, ids, *settings, cancellation=cancellation)
        spans, passes = [[span] for span, _ in scored], [count for _, count in scored]
    else:
        spans = [score_spans(model, before, text, None if divide else [len(text)], *settings) for text in ids]
        passes = [1] * len(ids)
    if method.needs_own_passes:
        alone = [span for (span,) in spans]
        scores = _rescored(session.backend, before, ids, config, capture, alone, cancellation)
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
                contrasts[number] += of_step[torch.tensor(rows), torch.tensor(targets)].tolist()
                passes[number] += step.passes[number] + (0 if done else step.prompt_passes)
    values = [span_log_prob(of_text, config.span_log_prob) for of_text in contrasts]
    return list(zip(values, passes, strict=True))
