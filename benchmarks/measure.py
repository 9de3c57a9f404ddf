"""Shared by the measurements: competitors, a timed comparison of them, and the record of the results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.settings import Settings
from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime
from cocoa_engine.lab.timing import Case, Turn, describe, generate, measured_rounds, ratio, timed

Prompts = Sequence[list[int]]
"""One unit of work: the token ids of one prompt, or of several prompts that are answered together."""

BASE = "HF generate, greedy"
MODULES, LEAN = "HF modules", "lean"
GREEDY, COCOA_SIG = "CoCoA engine, greedy", "cocoa-sig"
NO_DRAFTS = "no drafts"
BLOCKS, FLOAT32 = "blocks", "float32"  # the weights of a GGUF file, as they are and unpacked
LLAMA_CPP = "llama.cpp, greedy"
WEIGHTS = {"float32": "auto", "bfloat16 copy": "bfloat16"}
"""The weights of the ratio's setups, and ``Runtime.linears`` of each."""
RATIO_SETUPS = tuple(f"{weights}{drafts}" for weights in WEIGHTS for drafts in ("", f", {NO_DRAFTS}"))

Competitor = Callable[[Prompts], Turn]
"""A timed decoder: answers the prompts, and returns the seconds and the number of kept tokens."""


def interleave(
    competitors: Mapping[str, Callable[[Case], Turn]],
    rounds: Iterable[Sequence[Case]],
    after_turn: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """The seconds per unit of each competitor, one value per round; see :func:`measured_rounds`."""
    seconds = list(measured_rounds(competitors, rounds, after_turn))
    return {name: [of_round[name] for of_round in seconds] for name in competitors}


class Bench:
    """The loaded model and the settings, which every measurement receives. The embedded model is unpacked."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.progress = progress
        self.loaded = CocoaEngine.from_pretrained(
            settings.model, runtime=Runtime(weights="stored" if settings.model else FLOAT32, prefix_cache_mb=0)
        )

    def engine(self, **runtime: Any) -> CocoaEngine:
        """An engine around the model. The prefix cache is off unless ``prefix_cache_mb`` is given."""
        settings = Runtime(**{"prefix_cache_mb": 0, **runtime})
        return CocoaEngine(
            self.loaded.model, self.loaded.tokenizer, runtime=settings, model_name=self.loaded.model_name
        )

    def compare(
        self,
        what: str,
        competitors: Mapping[str, Competitor],
        rounds: Sequence[Sequence[Prompts]],
        warm_up: Prompts | None = None,
    ) -> dict[str, Any]:
        """Time competitors on the same work, in turns.

        Args:
            what: the description in the progress bar.
            competitors: the competitors by name. The first is the base of the ratios.
            rounds: the units of work of each round.
            warm_up: work that each competitor does first, untimed. Default: the first unit of work.

        Returns:
            ``base``, the name of the base, and ``competitors``: for each the seconds per kept token in every round,
            the ratio to the base, and for the engine the costs per kept token.
        """
        base = next(iter(competitors))
        turns = len(competitors) * sum(len(cases) for cases in rounds)
        task = self.progress.add_task(what, total=turns + len(competitors))
        for competitor in competitors.values():
            competitor(rounds[0][0] if warm_up is None else warm_up)
            if isinstance(competitor, EngineCompetitor):
                competitor.kept.clear()
            self.progress.advance(task)
        seconds = interleave(competitors, rounds, lambda: self.progress.advance(task))
        return {
            "base": base,
            "competitors": {
                name: {
                    "ratio": ratio(per_unit, seconds[base])._asdict(),
                    "seconds": per_unit,
                    **(
                        {"per_kept_token": per_kept_token(competitor.answers())}
                        if isinstance(competitor, EngineCompetitor)
                        else {}
                    ),
                }
                for (name, competitor), per_unit in zip(competitors.items(), seconds.values(), strict=True)
            },
        }


def hugging_face(bench: Bench, **options: Any) -> Competitor:
    """Hugging Face ``generate`` without sampling, on the same model."""
    model, tokenizer, tokens = bench.loaded.model, bench.loaded.tokenizer, bench.settings.tokens
    return timed(lambda prompts: sum(map(len, generate(model, tokenizer, prompts, tokens, **options))))


class EngineCompetitor:
    """The CoCoA engine as a competitor. It stores its last answer to each prompt."""

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
        """The last answer to each prompt, in the order in which the prompts were first answered."""
        return list(self.kept.values())


def per_kept_token(generations: Sequence[Generation]) -> dict[str, float]:
    """Forward passes, fed tokens and risk points, divided by the number of kept tokens."""
    kept = sum(generation.usage.completion_tokens for generation in generations)
    names = ("forward_passes", "fed_tokens", "risk_points")
    return {name: sum(getattr(generation.usage, name) for generation in generations) / kept for name in names}


def rounds_of_parts(cases: Sequence[Prompts], count: int) -> list[Sequence[Prompts]]:
    """Split all work into up to ``count`` rounds, for competitors that are too slow to repeat it in every round."""
    return [cases[start::count] for start in range(count) if cases[start::count]]


def one_by_one(prompts: Sequence[list[int]]) -> list[Prompts]:
    """Each prompt as a separate unit of work."""
    return [[prompt] for prompt in prompts]


def record(bench: Bench, values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a result file: the measured values with the model, the settings and the machine."""
    info = bench.loaded.info()
    return {
        "model": info.model_name,
        "dtype": info.dtype,
        "forward": info.forward,
        "linears": info.linears,
        "settings": asdict(bench.settings),
        "machine": describe(),
        **values,
    }


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document as JSON with one value per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def child(*arguments: str) -> Any:
    """Run Python in a new process with these arguments, and return the JSON that it prints.

    Raises:
        RuntimeError: the process failed. The message is its stderr.
    """
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on stderr."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        yield shown
