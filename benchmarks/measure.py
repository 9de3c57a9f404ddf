"""What the measurements share: rivals, a race between them, and the record that is written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.settings import Settings
from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime
from cocoa_engine.studies.hf_generate import generate
from cocoa_engine.studies.machine import describe
from cocoa_engine.studies.timing import Turn, interleave, ratio, timed

Prompts = Sequence[list[int]]
"""One piece of work: token ids of one prompt, or of several that are answered together."""

BASE = "HF generate, greedy"
MODULES, LEAN = "HF modules", "lean"
GREEDY, COCOA_SIG = "our greedy", "cocoa-sig"
NO_DRAFTS = "no drafts"

Way = Callable[[Prompts], Turn]


class Bench:
    """One model, run in several ways; what every measurement is given."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.progress = progress
        self.loaded = CocoaEngine.from_pretrained(settings.model, runtime=Runtime(prefix_cache_mb=0))

    def engine(self, **runtime: Any) -> CocoaEngine:
        """The model under a runtime. Nothing of an earlier prompt is reused unless that is asked for."""
        settings = Runtime(**{"prefix_cache_mb": 0, **runtime})
        return CocoaEngine(
            self.loaded.model, self.loaded.tokenizer, runtime=settings, model_name=self.loaded.model_name
        )

    def race(
        self, what: str, ways: Mapping[str, Way], rounds: Sequence[Sequence[Prompts]], warm_up: Prompts | None = None
    ) -> dict[str, Any]:
        """Let some ways run against each other.

        Args:
            what: shown while it lasts.
            ways: the rivals; the first is the base of the ratios.
            rounds: the pieces of work of each round.
            warm_up: what every way does first, untimed; by default the first piece of work.

        Returns:
            The record: of each way the seconds per unit in every round, the ratio to the base, and what it cost.
        """
        base = next(iter(ways))
        turns = len(ways) * sum(len(cases) for cases in rounds)
        task = self.progress.add_task(what, total=turns + len(ways))
        for way in ways.values():
            way(rounds[0][0] if warm_up is None else warm_up)
            if isinstance(way, Ours):
                way.kept.clear()
            self.progress.advance(task)
        seconds = interleave(ways, rounds, lambda: self.progress.advance(task))
        return {
            "base": base,
            "ways": {
                name: {
                    "ratio": ratio(per_unit, seconds[base])._asdict(),
                    "seconds": per_unit,
                    **({"per_kept_token": per_kept_token(way.answers())} if isinstance(way, Ours) else {}),
                }
                for (name, way), per_unit in zip(ways.items(), seconds.values(), strict=True)
            },
        }


def hugging_face(bench: Bench, **options: Any) -> Way:
    """``generate`` without sampling, on the same model."""
    model, tokenizer, tokens = bench.loaded.model, bench.loaded.tokenizer, bench.settings.tokens
    return timed(lambda prompts: sum(map(len, generate(model, tokenizer, prompts, tokens, **options))))


class Ours:
    """Our engine as a rival; it keeps its last answer to each prompt."""

    def __init__(self, engine: CocoaEngine, **config: Any) -> None:
        self.engine = engine
        self.config = CocoaConfig(**config)
        self.kept: dict[tuple[int, ...], Generation] = {}

    def __call__(self, prompts: Prompts) -> Turn:
        return timed(self._answer)(prompts)

    def _answer(self, prompts: Prompts) -> int:
        if len(prompts) == 1:
            generations = [self.engine.generate(prompts[0], config=self.config)]
        else:
            generations = self.engine.generate_batch(prompts, config=self.config)
        return self._keep(prompts, generations)

    def _keep(self, prompts: Prompts, generations: Sequence[Generation]) -> int:
        self.kept.update(zip(map(tuple, prompts), generations, strict=True))
        return sum(generation.usage.completion_tokens for generation in generations)

    def answers(self) -> list[Generation]:
        """Of all prompts, in the order in which they were first asked."""
        return list(self.kept.values())


def per_kept_token(generations: Sequence[Generation]) -> dict[str, float]:
    """What was spent, divided by the tokens kept."""
    kept = sum(generation.usage.completion_tokens for generation in generations)
    names = ("forward_passes", "fed_tokens", "risk_points")
    return {name: sum(getattr(generation.usage, name) for generation in generations) / kept for name in names}


def parts(cases: Sequence[Prompts], count: int) -> list[Sequence[Prompts]]:
    """One pass over all work as up to ``count`` rounds of some of it: for rivals too slow for several passes."""
    return [cases[start::count] for start in range(count) if cases[start::count]]


def alone(prompts: Sequence[list[int]]) -> list[Prompts]:
    """Each prompt as a piece of work of its own."""
    return [[prompt] for prompt in prompts]


def record(bench: Bench, figures: Mapping[str, Any]) -> dict[str, Any]:
    """What is written: the figures, and what they were measured with and on."""
    info = bench.loaded.info()
    return {
        "model": info.model_name,
        "dtype": info.dtype,
        "forward": info.forward,
        "linears": info.linears,
        "settings": asdict(bench.settings),
        "machine": describe(),
        **figures,
    }


def write(path: Path, document: Mapping[str, Any]) -> None:
    """As JSON, one figure a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def child(*arguments: str) -> Any:
    """What a fresh Python process with these arguments prints as JSON.

    Raises:
        RuntimeError: it failed; says how.
    """
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


@contextmanager
def progress() -> Iterator[Progress]:
    """What is measured and how far it has come, on stderr."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        yield shown
