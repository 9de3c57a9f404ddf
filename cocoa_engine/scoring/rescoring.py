"""Scores of given texts under the methods that need more than the model's own distribution of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.span_scoring import log_prob_and_score
from cocoa_engine.equations import span_log_prob
from cocoa_engine.execution.backends import Backend
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.scoring.text_tree import GivenText, ScoredText, beginnings, groups, score_texts


def needs_more(config: CocoaConfig) -> bool:
    """Whether the configured method's score is not made of log p_S and the disagreement alone."""
    method = METHODS[config.method]
    return isinstance(method, ContrastingMethod) or method.reads_back


def rescored(
    backend: Backend, prompt: list[int], scored: Sequence[ScoredText], config: CocoaConfig, wanted: CaptureSpec
) -> list[ScoredText]:
    """Scored texts with the configured method's score; the forward passes that takes are added."""
    method = METHODS[config.method]
    texts = [decided.token_ids for decided, _ in scored]
    result = []
    if isinstance(method, ContrastingMethod):
        found = _contrasts(backend, method, prompt, texts, config, wanted)
        for (decided, passes), (contrasts, more) in zip(scored, found, strict=True):
            score = span_log_prob(contrasts, config.span_log_prob)
            result.append(ScoredText(replace(decided, score=score), passes + more))
        return result
    read_back = [GivenText([*text, *prompt], 0) for text in ([], *texts)]
    without, *after = score_texts(backend, prompt, read_back, config, wanted)
    log_prob_without = sum(without.decided.token_log_probs)
    for (decided, passes), read in zip(scored, after, strict=True):
        pmi = sum(read.decided.token_log_probs[len(decided.token_ids) :]) - log_prob_without
        _, score = log_prob_and_score(config, decided.token_log_probs, decided.con_mlds, decided.f_mlds, pmi=pmi)
        more = max(read.forward_passes, without.forward_passes)  # as a rule the two were fed together
        result.append(ScoredText(replace(decided, score=score), passes + more))
    return result


def _contrasts(
    backend: Backend,
    method: ContrastingMethod,
    prompt: list[int],
    texts: Sequence[list[int]],
    config: CocoaConfig,
    wanted: CaptureSpec,
) -> list[tuple[list[float], int]]:
    """The contrasts of each text's tokens, all tokens allowed, and the forward passes they took.

    The prompt is read once, but for its last token: what that says is contrasted too, so it begins every text.
    """
    fed = [[prompt[-1], *text[:-1]] for text in texts]
    width = max(1, backend.paths_per_step // (1 + len(wanted.early)))  # rows of logits for every layer
    together = list(groups(fed, width))
    room = max(len(beginnings(fed[number] for number in group)) for group in together)
    tree = backend.open([prompt[:-1]], room, wanted)[0]
    tree.keep_committed = True
    found: dict[int, tuple[list[float], int]] = {}
    try:
        if len(prompt) > 1:
            backend.prefill(tree)
        prompt_passes = tree.forward_passes
        for group in together:
            paths = beginnings(fed[number] for number in group)
            rows = {path: row for row, path in enumerate(paths)}
            own = {number: [rows[path] for path in beginnings([fed[number]])] for number in group}
            contrasts: dict[int, list[float]] = {number: [] for number in group}
            passes = dict.fromkeys(group, prompt_passes)
            for start in range(0, len(paths), width):
                before = tree.forward_passes
                output = backend.step([(tree, paths[start : start + width])])[0]
                assert output.others is not None
                of_step = method.contrast(output.logits.float(), output.others, config)  # [W, V]
                for number in group:
                    here = [depth for depth, row in enumerate(own[number]) if start <= row < start + width]
                    if here:
                        places = torch.tensor([own[number][depth] - start for depth in here], device=of_step.device)
                        targets = torch.tensor([texts[number][depth] for depth in here], device=of_step.device)
                        contrasts[number] += of_step[places, targets].tolist()
                        # one pass for the whole step, or one for each path of it
                        passes[number] += min(tree.forward_passes - before, len(here))
            tree.drop_branches()
            found |= {number: (contrasts[number], passes[number]) for number in group}
    finally:
        tree.close()
    return [found[number] for number in range(len(texts))]
