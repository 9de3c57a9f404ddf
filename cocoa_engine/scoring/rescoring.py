"""Scores of given texts under methods that need more than the text's own log-probabilities: DoLa, DeCoRe, Diver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.span_scoring import log_prob_and_score
from cocoa_engine.equations import span_log_prob
from cocoa_engine.errors import ConfigError
from cocoa_engine.execution.backends import Backend
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.risk.policy import reaches
from cocoa_engine.scoring.shared_prompt import GivenText, ScoredText, score_texts
from cocoa_engine.scoring.text_tree import TextTree
from cocoa_engine.spans import Span


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


def rescored(
    backend: Backend,
    prompt: list[int],
    scored: Sequence[ScoredText],
    config: CocoaConfig,
    capture: CaptureSpec,
    cancellation: Cancellation | None = None,
) -> list[ScoredText]:
    """Replace the scores of texts by the configured method's, and add its forward passes to theirs.

    A contrasting method scores the contrasts of the tokens. A method that reads back (Diver) scores the prompt again
    after the text, for the mutual information log p(prompt | prompt, text) - log p(prompt | prompt).
    """
    method = METHODS[config.method]
    texts = [decided.token_ids for decided, _ in scored]
    result = []
    if isinstance(method, ContrastingMethod):
        found = _contrasts(backend, method, prompt, texts, config, capture, cancellation)
        for (decided, passes), (contrasts, more) in zip(scored, found, strict=True):
            score = span_log_prob(contrasts, config.span_log_prob)
            result.append(ScoredText(replace(decided, score=score), passes + more))
        return result
    read_back = [GivenText([*text, *prompt], 0) for text in ([], *texts)]
    without, *after = score_texts(backend, prompt, read_back, config, capture, cancellation=cancellation)
    log_prob_without = sum(without.decided.token_log_probs)
    for (decided, passes), read in zip(scored, after, strict=True):
        pmi = sum(read.decided.token_log_probs[len(decided.token_ids) :]) - log_prob_without
        _, score = log_prob_and_score(config, decided.token_log_probs, decided.con_mlds, decided.f_mlds, pmi=pmi)
        more = max(read.forward_passes, without.forward_passes)  # usually the two are fed together
        result.append(ScoredText(replace(decided, score=score), passes + more))
    return result


def _contrasts(
    backend: Backend,
    method: ContrastingMethod,
    prompt: list[int],
    texts: Sequence[list[int]],
    config: CocoaConfig,
    capture: CaptureSpec,
    cancellation: Cancellation | None,
) -> list[tuple[list[float], int]]:
    """The contrasts of each text's tokens, with no token excluded as implausible, and the forward passes they took.

    The prompt is prefilled once without its last token. That token is fed with every text, because its output is
    contrasted too.
    """
    fed = [[prompt[-1], *text[:-1]] for text in texts]
    width = max(1, backend.paths_per_step // (1 + len(capture.early)))  # rows of logits for every layer
    contrasts: list[list[float]] = [[] for _ in texts]
    passes = [0] * len(texts)
    with TextTree(backend, prompt[:-1], fed, capture, rows_per_step=width, cancellation=cancellation) as tree:
        for group in tree.groups():
            for step in group.steps():
                assert step.output.others is not None
                of_step = method.contrast(step.output.logits.float(), step.output.others, config)  # [W, V]
                for number in group.numbers:
                    if here := group.within(step, number):
                        done = len(contrasts[number])
                        rows = torch.tensor(here, device=of_step.device)
                        targets = torch.tensor(texts[number][done : done + len(here)], device=of_step.device)
                        contrasts[number] += of_step[rows, targets].tolist()
                        passes[number] += group.passes(step, number)
        return [(found, tree.prompt_passes + more) for found, more in zip(contrasts, passes, strict=True)]
