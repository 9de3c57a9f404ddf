"""Scores of given texts under the methods that need more than the model's own distribution of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cocoa_engine.backends import Backend
from cocoa_engine.config import CocoaConfig
from cocoa_engine.hidden_states import Wanted
from cocoa_engine.measure import log_prob_and_score
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model import LanguageModel
from cocoa_engine.scores import span_log_prob
from cocoa_engine.shared_prompt import ScoredText
from cocoa_engine.teacher_forcing import score_text


def needs_more(config: CocoaConfig) -> bool:
    """Whether the configured method's score is not made of log p_S and the disagreement alone."""
    method = METHODS[config.method]
    return isinstance(method, ContrastingMethod) or method.reads_back


def rescored(
    backend: Backend, prompt: list[int], scored: Sequence[ScoredText], config: CocoaConfig, wanted: Wanted
) -> list[ScoredText]:
    """Scored texts with the configured method's score; the forward passes that takes are added."""
    method = METHODS[config.method]
    result = []
    if isinstance(method, ContrastingMethod):
        for decided, passes in scored:
            contrasts, more = _contrasts(backend, method, prompt, decided.token_ids, config, wanted)
            score = span_log_prob(contrasts, config.span_log_prob)
            result.append(ScoredText(replace(decided, score=score), passes + more))
        return result
    without = _log_prob(backend.model, prompt, prompt, config, wanted)
    for decided, passes in scored:
        pmi = _log_prob(backend.model, [*prompt, *decided.token_ids], prompt, config, wanted) - without
        _, score = log_prob_and_score(config, decided.token_log_probs, decided.con_mlds, decided.f_mlds, pmi=pmi)
        result.append(ScoredText(replace(decided, score=score), passes + 2))
    return result


def _contrasts(
    backend: Backend, method: ContrastingMethod, prompt: list[int], text: list[int], config: CocoaConfig, wanted: Wanted
) -> tuple[list[float], int]:
    """The contrast of each token of the text, all tokens allowed."""
    tree = backend.open([prompt[:-1]], len(text) + 1, wanted)[0]
    try:
        if len(prompt) > 1:
            backend.prefill(tree)
        fed = [prompt[-1], *text[:-1]]
        contrasts: list[float] = []
        width = max(1, backend.paths_per_step // (1 + len(wanted.early)))  # rows of logits for every layer
        for start in range(0, len(fed), width):
            ends = range(start + 1, min(start + width, len(fed)) + 1)
            output = backend.step([(tree, [tuple(fed[:end]) for end in ends])])[0]
            assert output.others is not None
            rows = method.contrast(output.logits.float(), output.others, config)
            targets = torch.tensor([text[end - 1] for end in ends], device=rows.device)
            contrasts += rows.gather(1, targets[:, None])[:, 0].tolist()
        return contrasts, tree.forward_passes
    finally:
        tree.close()


def _log_prob(model: LanguageModel, before: list[int], text: list[int], config: CocoaConfig, wanted: Wanted) -> float:
    return sum(score_text(model, before, text, config, wanted, 0).token_log_probs)
