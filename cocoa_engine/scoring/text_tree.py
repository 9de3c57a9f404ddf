"""Log-probability and disagreement of many given texts after one prompt, which is encoded once.

The texts are fed as branches that grow from the end of the prompt; those that begin alike share the tokens they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.span_decoder import DecidedSpan
from cocoa_engine.decoding.span_scoring import log_prob_and_score, mlds
from cocoa_engine.decoding.token_statistics import TokenFigures, token_figures
from cocoa_engine.errors import NonFiniteLogitsError
from cocoa_engine.execution.backends import Backend, Path, TokenTree
from cocoa_engine.execution.backends.recompute import Recompute
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.scoring.teacher_forcing import score_text


class GivenText(NamedTuple):
    """A text to score: its tokens, and the length of its text in characters."""

    token_ids: list[int]
    text_end: int


class ScoredText(NamedTuple):
    """What was measured of a text, and in how many forward passes, those of the prompt included."""

    decided: DecidedSpan
    forward_passes: int


class _Measured(NamedTuple):
    """What the forward passes said of one text."""

    tokens: TokenFigures
    hidden: Tensor  # [N + 1, d] float32: sums over the text's tokens
    forward_passes: int


def score_texts(
    backend: Backend, prompt: list[int], texts: Sequence[GivenText], config: CocoaConfig, wanted: CaptureSpec
) -> list[ScoredText]:
    """Score each text as one span after ``prompt``, as
    :func:`~cocoa_engine.scoring.teacher_forcing.score_text` does for one text.

    A forward pass that fed tokens of several texts counts for each of them.

    Raises:
        NonFiniteLogitsError: a token's log-probability is NaN or infinite; it says of which text.
    """
    if isinstance(backend, Recompute):  # nothing of the prompt can be kept, and one pass is enough for a text by itself
        return [ScoredText(_alone(backend, prompt, texts, n, config, wanted), 1) for n in range(len(texts))]
    ids = [text.token_ids for text in texts]
    together = list(groups(ids, backend.paths_per_step))
    room = max(len(beginnings(ids[number] for number in group)) for group in together)
    tree = backend.open([prompt], room, wanted)[0]
    tree.keep_committed = True
    scored: dict[int, ScoredText] = {}
    try:
        first = backend.prefill(tree)
        prompt_passes = tree.forward_passes
        for group in together:
            measured = _feed(backend, tree, [ids[number] for number in group], first)
            tree.drop_branches()
            if not all(-float("inf") < value <= 0 for one in measured for value in one.tokens.log_probs):
                _raise_of_first_bad(backend, prompt, texts, group, config, wanted)
            con, f = mlds(torch.stack([one.hidden / len(one.tokens.log_probs) for one in measured], dim=1))
            for number, one, c, final in zip(group, measured, con, f, strict=True):
                log_prob, score = log_prob_and_score(config, one.tokens.log_probs, c, final)
                text = texts[number]
                decided = DecidedSpan(text.token_ids, *one.tokens, log_prob, c, final, score, [], None, text.text_end)
                scored[number] = ScoredText(decided, prompt_passes + one.forward_passes)
    finally:
        tree.close()
    return [scored[number] for number in range(len(texts))]


def groups(texts: Sequence[list[int]], limit: int) -> Iterator[list[int]]:
    """The numbers of the texts that are fed together: alike ones next to each other, ``limit`` distinct tokens at most.

    A longer text is a group of its own.
    """
    group: list[int] = []
    size = 0
    for number in sorted(range(len(texts)), key=texts.__getitem__):
        text = texts[number]
        # in this order no earlier text shares more of its beginning than the one just before
        new = len(text) - (_common_start(texts[group[-1]], text) if group else 0)
        if group and size + new > limit:
            yield group
            group, size, new = [], 0, len(text)
        group.append(number)
        size += new
    yield group


def _common_start(a: list[int], b: list[int]) -> int:
    """How many first tokens are the same."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def beginnings(texts: Iterable[list[int]]) -> list[Path]:
    """Every distinct beginning of every text, after the shorter ones it grows from."""
    return list(dict.fromkeys(tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)))


class Step(NamedTuple):
    """W tokens of a group of texts that were fed at once."""

    fed: range  # their places among the group's beginnings
    logits: Tensor  # [W + 1, V]: before the step, then after each of its tokens
    token_ids: Tensor  # [W]
    parents: Tensor  # [W]: the row of ``logits`` that predicts each
    hidden: Tensor  # [N + 1, W, d] float32
    forward_passes: int


def steps(backend: Backend, tree: TokenTree, paths: Sequence[Path], first: Tensor) -> Iterator[Step]:
    """Feed the beginnings of a group of texts after the prompt, of whose end ``first`` ``[V]`` are the logits."""
    rows = {path: row for row, path in enumerate(paths)}
    width = backend.paths_per_step
    before = first  # the logits that predict the first token of a step's first path
    for start in range(0, len(paths), width):
        step = paths[start : start + width]
        passes_before = tree.forward_passes
        output = backend.step([(tree, step)])[0]
        # Only a single text is fed in several steps: there the first path follows the last one of the step before.
        known = torch.cat([before[None], output.logits])  # [W + 1, V]
        before = output.logits[-1]
        parents = torch.tensor([rows[path[:-1]] - start + 1 if path[:-1] in rows else 0 for path in step])
        token_ids = torch.tensor([path[-1] for path in step])
        yield Step(
            fed=range(start, start + len(step)),
            logits=known,
            token_ids=token_ids.to(known.device),
            parents=parents.to(known.device),
            hidden=output.hidden,
            forward_passes=tree.forward_passes - passes_before,
        )


def _feed(backend: Backend, tree: TokenTree, texts: Sequence[list[int]], first: Tensor) -> list[_Measured]:
    """Feed a group of texts after the prompt, of whose end ``first`` ``[V]`` are the logits."""
    paths = beginnings(texts)
    rows = {path: row for row, path in enumerate(paths)}
    own = [[rows[path] for path in beginnings([text])] for text in texts]  # the rows of each text's tokens
    figures = TokenFigures([], [], [])
    hidden: list[Tensor | None] = [None] * len(texts)
    passes = [0] * len(texts)
    for step in steps(backend, tree, paths, first):
        for values, more in zip(figures, token_figures(step.logits, step.token_ids, step.parents), strict=True):
            values.extend(more)
        for number, of_text in enumerate(own):
            here = [row - step.fed.start for row in of_text if row in step.fed]
            if here:
                state = step.hidden[:, here].sum(dim=1)
                known_state = hidden[number]
                hidden[number] = state if known_state is None else known_state + state
                # one pass for the whole step, or one for each path of it
                passes[number] += min(step.forward_passes, len(here))
    return [
        _Measured(TokenFigures(*([values[row] for row in of_text] for values in figures)), state, count)
        for of_text, state, count in zip(own, hidden, passes, strict=True)
        if state is not None
    ]


def _raise_of_first_bad(
    backend: Backend,
    prompt: list[int],
    texts: Sequence[GivenText],
    group: Sequence[int],
    config: CocoaConfig,
    wanted: CaptureSpec,
) -> None:
    """Say of which text the logits are bad.

    In a pass over several texts the NaN of one reaches all (attention multiplies it by 0), so each is run by itself.
    """
    for number in sorted(group):
        _alone(backend, prompt, texts, number, config, wanted)
    raise NonFiniteLogitsError(
        f"the logits of the texts to score at {', '.join(map(str, sorted(group)))} are NaN or infinite when the texts "
        "are fed together; load the model in float32 or bfloat16."
    )


def _alone(
    backend: Backend,
    prompt: list[int],
    texts: Sequence[GivenText],
    number: int,
    config: CocoaConfig,
    wanted: CaptureSpec,
) -> DecidedSpan:
    text = texts[number]
    try:
        return score_text(backend.model, prompt, text.token_ids, config, wanted, text.text_end)
    except NonFiniteLogitsError as error:
        raise NonFiniteLogitsError(f"of the texts to score, at index {number}: {error}") from None
