"""Single forward passes after a prompt. A pass does not change the cache, so repeated passes cost the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Bench, interleave
from benchmarks.prompts import long_prompt
from cocoa_engine import CocoaConfig, Runtime
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.execution.backends import choose
from cocoa_engine.execution.backends.shared_cache import SharedCache, SharedTree
from cocoa_engine.lab.timing import ratio, timed
from cocoa_engine.model.language_model import LanguageModel


def with_and_without(
    bench: Bench, what: str, names: tuple[str, str], steps: Callable[[bool], int], rounds: int
) -> dict[str, Any]:
    """Time steps with something and without it, in turns.

    Args:
        bench: shows the progress.
        what: the description in the progress bar.
        names: those of the times with it and without it.
        steps: runs some steps, with it or without it, and returns their number.
        rounds: the number of rounds. A unit is short: with many, a single disturbance does not change the median.
    """
    task = bench.progress.add_task(what, total=2 * rounds)
    first, second = names
    competitors = {first: timed(lambda _: steps(True)), second: timed(lambda _: steps(False))}
    for competitor in competitors.values():
        competitor(None)
    seconds = interleave(competitors, [[None]] * rounds, lambda: bench.progress.advance(task))
    return {"seconds": seconds, "with_to_without": ratio(seconds[first], seconds[second])._asdict()}


class Steps:
    """A prefilled prompt, and forward passes over the next token. Call :meth:`close` at the end.

    Args:
        bench: the model.
        runtime: how it is run.
        prompt_tokens: the length of the prompt.

    Raises:
        SystemExit: the model runs on a backend whose branches do not share a cache.
    """

    def __init__(self, bench: Bench, runtime: Runtime, prompt_tokens: int) -> None:
        model = LanguageModel(bench.loaded.model)
        backend = choose(model, runtime).backend
        if not isinstance(backend, SharedCache):
            raise SystemExit(f"steps are measured on models whose branches share a cache; this one uses {backend.name}")
        self._backend = backend
        self._capture = capture_spec(model, CocoaConfig())
        (tree,) = backend.open([long_prompt(bench.loaded, prompt_tokens)], 1, self._capture)
        assert isinstance(tree, SharedTree)
        self._tree = tree
        self._token = int(backend.prefill(tree).argmax())

    def step(self, *, capturing: bool, source: bool = True, passages: int = 0) -> torch.Tensor | None:
        """Run one pass over the next token. Returns the captured hidden states, ``[layers, 1, d]``.

        Args:
            capturing: whether hidden states and source attention are measured.
            source: whether source attention is; ``False`` leaves it out.
            passages: the number of passages, of equal length, whose attention is measured as well.
        """
        length = (self._tree.committed - 1) // max(1, passages)
        self._tree.passages = [range(1 + length * number, 1 + length * (number + 1)) for number in range(passages)]
        capture = self._tree.capture = self._capture if source else self._capture._replace(source_heads=())
        with self._backend.forward.exclusive():
            return self._backend.forward([self._tree.segment([(self._token,)])], capture if capturing else None).hidden

    def close(self) -> None:
        """Free the memory of the prompt."""
        self._tree.close()
