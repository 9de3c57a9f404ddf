"""Scores of given texts under the methods that need more than the model's own distribution of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from cocoa_engine.backends import Backend
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decode import Decided
from cocoa_engine.hidden_states import Wanted
from cocoa_engine.measure import log_prob_and_score
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model import LanguageModel
from cocoa_engine.scores import span_log_prob
from cocoa_engine.teacher_forcing import score_text


def needs_more(config: CocoaConfig) -> bool:
    """Whether the configured method's score is not made of log p_S and the disagreement alone."""
    method = METHODS[config.method]
    return isinstance(method, ContrastingMethod) or method.reads_back


def rescored(
    backend: Backend, prompt: list[int], decided: Decided, config: CocoaConfig, wanted: Wanted
) -> tuple[Decided, int]:
    """A scored text with the configured method's score, and the forward passes that took."""
    method = METHODS[config.method]
    text = decided.token_ids
    if isinstance(method, ContrastingMethod):
        contrasts, passes = _contrasts(backend, method, prompt, text, config, wanted)
        return replace(decided, score=span_log_prob(contrasts, config.span_log_prob)), passes
    pmi = _log_prob(backend.model, [*prompt, *text], prompt, config, wanted)
    pmi -= _log_prob(backend.model, prompt, prompt, config, wanted)
    _, score = log_prob_and_score(config, decided.token_log_probs, decided.con_mlds, decided.f_mlds, pmi=pmi)
    return replace(decided, score=score), 2


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
