"""Given texts fed after a prompt: many as branches of one tree after a prompt that is prefilled once, or one alone.

In a tree, tokens of a common prefix are fed once. Texts are fed in groups. A group is fed in steps, each with at most
as many tokens as the backend feeds at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from cocoa_engine.execution.backends import Backend, Path, StepOutput, TokenTree
from cocoa_engine.execution.forward.source_attention import SourceProbe, observed_attention, probe_of
from cocoa_engine.interruptions import Cancellation
from cocoa_engine.model.hidden_states import CaptureSpec, capture
from cocoa_engine.model.language_model import LanguageModel


@contextmanager
def opened(
    backend: Backend, prompt: Sequence[int], reserve_tokens: int, capture: CaptureSpec, passages: Sequence[range] = ()
) -> Iterator[TokenTree]:
    """Open a tree whose branches can be dropped, and close it at the end of the block."""
    (tree,) = backend.open([prompt], reserve_tokens, capture)
    tree.keep_committed = True
    tree.passages = passages
    try:
        yield tree
    finally:
        tree.close()


@dataclass(frozen=True)
class Step:
    """W tokens that were fed at once.

    Attributes:
        rows: for the index of each text with tokens in the step, the rows of these tokens in the output.
        output: the model's output for each token.
        token_ids: ``[W]``.
        logits: ``[W + 1, V]``: before the step, then after each of its tokens; `None` after an empty prompt.
        parents: ``[W]``, the row of :attr:`logits` that predicts each token.
        passes: for the index of each text, the number of forward passes that fed its tokens.
        prompt_passes: the number of forward passes of the prompt.
    """

    rows: dict[int, list[int]]
    output: StepOutput
    token_ids: Tensor
    logits: Tensor | None
    parents: Tensor
    passes: dict[int, int]
    prompt_passes: int = 0


@contextmanager
def fed(
    backend: Backend,
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],
    capture: CaptureSpec,
    *,
    rows_per_step: int | None = None,
    passages: Sequence[range] = (),
    probe: SourceProbe | None = None,
    cancellation: Cancellation | None = None,
) -> Iterator[Iterator[Step]]:
    """Feed texts after a prompt: ``with fed(...) as steps: for step in steps: ...``.

    A text that does not fit a step has several, in order.

    Args:
        prompt: token ids. May be empty if :attr:`Step.logits` is not used.
        texts: the token ids of each text, at least one.
        rows_per_step: the maximum number of tokens in a step. Default: the backend's ``paths_per_step``.
        passages: the positions of passages of the prompt whose attention mass is measured.
        probe: takes the attention of the texts instead, if the backend masks heads.
        cancellation: ends the work.
    """
    width = rows_per_step or backend.paths_per_step
    numbers = list(groups(texts, width))
    reserve = max(len(prefixes(texts[number] for number in group)) for group in numbers)
    with opened(backend, prompt, reserve, capture, passages) as tree:
        tree.probe = probe

        def steps() -> Iterator[Step]:
            first = backend.prefill(tree) if prompt else None
            prompt_passes = tree.forward_passes
            for group in numbers:
                paths, before = prefixes(texts[number] for number in group), first
                ranks = {path: rank for rank, path in enumerate(paths)}
                of_texts = {number: [ranks[path] for path in prefixes([texts[number]])] for number in group}
                for start in range(0, len(paths), width):
                    part = paths[start : start + width]
                    if cancellation is not None:
                        cancellation.check()
                    earlier = tree.forward_passes
                    output = backend.step([(tree, part)])[0]
                    passes = tree.forward_passes - earlier  # one for all paths, or one for each
                    rows = {
                        number: [rank - start for rank in own if start <= rank < start + width]
                        for number, own in of_texts.items()
                    }
                    device = output.logits.device
                    yield Step(
                        rows=rows,
                        output=output,
                        token_ids=torch.tensor([path[-1] for path in part]).to(device),
                        logits=None if before is None else torch.cat([before[None], output.logits]),
                        # only a text alone takes several steps: the first path of one extends the last before it
                        parents=torch.tensor([ranks.get(path[:-1], start - 1) - start + 1 for path in part]).to(device),
                        passes={number: min(passes, len(own)) for number, own in rows.items()},
                        prompt_passes=prompt_passes,
                    )
                    before = output.logits[-1]
                tree.commit(())

        yield steps()


def fed_alone(
    model: LanguageModel,
    prompt: Sequence[int],
    text: Sequence[int],
    spec: CaptureSpec,
    passages: Sequence[range] = (),
    probe: SourceProbe | None = None,
) -> Step:
    """Feed a prompt and a text in one forward pass, without a cache.

    Args:
        prompt, text: token ids, at least one each.
        spec: the hidden states of the text that are captured.
        passages, probe: as for :func:`fed`. Any backend's model is observed.
    """
    token_ids = torch.tensor([[*prompt, *text]], device=model.device)
    inputs = {"use_cache": False} if "use_cache" in model.forward_parameters else {}
    probe = probe or probe_of(spec.source_heads, len(prompt), passages)
    with (
        model.exclusive(),
        capture(model, spec, keep=slice(len(prompt), None)) as captured,
        observed_attention(model, probe, len(text), token_ids.shape[1]),
    ):
        logits = model.forward(token_ids, logits_to_keep=len(text) + 1, **inputs).logits[0, -len(text) - 1 :]
        masses = None if probe is None else probe.means()
        output = StepOutput(logits[1:], captured.stacked(logits.device)[:, 0], masses=masses)
    rows = torch.arange(len(text), device=logits.device)
    return Step({0: rows.tolist()}, output, torch.tensor(text, device=logits.device), logits, rows, {0: 1})


def groups(texts: Sequence[Sequence[int]], limit: int) -> Iterator[list[int]]:
    """Group texts (indices) by common prefixes, with at most ``limit`` distinct tokens, or one longer text."""
    group: list[int] = []
    size = 0
    for number in sorted(range(len(texts)), key=lambda number: tuple(texts[number])):
        text = texts[number]
        # in sorted order, no earlier text shares a longer prefix than the one just before
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(texts[group[-1]] if group else [], text, strict=False))
        new = len(text) - len(list(shared))
        if group and size + new > limit:
            yield group
            group, size, new = [], 0, len(text)
        group.append(number)
        size += new
    yield group


def prefixes(texts: Iterable[Sequence[int]]) -> list[Path]:
    """Every distinct non-empty prefix of the texts, each after its own prefixes."""
    return list(dict.fromkeys(tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)))
