"""Log-probability and disagreement of a given text after a prompt: one forward pass, no generation."""

from __future__ import annotations

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decode import Decided
from cocoa_engine.distribution import TokenFigures, token_figures
from cocoa_engine.errors import NonFiniteLogitsError
from cocoa_engine.hidden_states import Wanted, capture
from cocoa_engine.measure import log_prob_and_score, mlds
from cocoa_engine.model import LanguageModel

_CHUNK = 256  # rows of float32 logits held at once: 256 x 128k is 128 MiB


def score_text(
    model: LanguageModel, prompt: list[int], text: list[int], config: CocoaConfig, wanted: Wanted, text_end: int
) -> Decided:
    """Score ``text`` as one span after ``prompt``, by the model's own distribution.

    Raises:
        NonFiniteLogitsError: a token's log-probability is NaN or infinite.
    """
    token_ids = torch.tensor([[*prompt, *text]], device=model.device)
    inputs = {"use_cache": False} if "use_cache" in model.forward_parameters else {}
    with model.exclusive(), capture(model, wanted, keep=slice(len(prompt), None)) as captured:
        logits = model.forward(token_ids, logits_to_keep=len(text) + 1, **inputs).logits[0]
        predicting = logits[-len(text) - 1 : -1]  # [t, V]: each row predicts one token of the text
        figures = _in_chunks(predicting, torch.tensor(text, device=logits.device))
        pooled = captured.stacked(logits.device)[:, 0].mean(dim=1)  # [N + 1, d]
        (con,), (f,) = mlds(pooled[:, None])
    if not all(-float("inf") < value <= 0 for value in figures.log_probs):
        position = len(prompt) + _first_bad(model, prompt, text)
        raise NonFiniteLogitsError(
            f"the logits for token {position} of the sequence (prompt included) are NaN or infinite; "
            "check the weights, or load the model in float32 or bfloat16."
        )
    log_prob, score = log_prob_and_score(config, figures.log_probs, con, f)
    return Decided(text, *figures, log_prob, con, f, score, [], None, text_end)


def _in_chunks(logits: Tensor, token_ids: Tensor) -> TokenFigures:
    """The figures of each token under its row of ``logits`` ``[t, V]``."""
    figures = TokenFigures([], [], [])
    for start in range(0, len(token_ids), _CHUNK):
        rows, ids = logits[start : start + _CHUNK], token_ids[start : start + _CHUNK]
        of_chunk = token_figures(rows, ids, torch.arange(len(ids), device=ids.device))
        for values, more in zip(figures, of_chunk, strict=True):
            values.extend(more)
    return figures


def _first_bad(model: LanguageModel, prompt: list[int], text: list[int]) -> int:
    """The first token of the text whose logits are not finite.

    In the pass over the whole text a NaN reaches positions before it too (attention multiplies it by 0), so prefixes
    are run by themselves, halving the range.
    """
    good, bad = -1, len(text) - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        token_ids = torch.tensor([[*prompt, *text[:middle]]], device=model.device)
        with model.exclusive():
            finite = bool(model.forward(token_ids, logits_to_keep=1).logits[0, -1].isfinite().all())
        good, bad = (middle, bad) if finite else (good, middle)
    return bad
