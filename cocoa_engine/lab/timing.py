"""Fair timing on a machine with other load, the description of the machine, and Hugging Face's own generation."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from cocoa_engine.model.generation_config import eos_token_ids
from cocoa_engine.model.tokenizer import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Case = TypeVar("Case")


class Turn(NamedTuple):
    """The time that one competitor took for one case. Time is divided by ``units``, such as kept tokens."""

    seconds: float
    units: float


class Spread(NamedTuple):
    """The median, lowest and highest of one value per round."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def timed(work: Callable[[Case], float]) -> Callable[[Case], Turn]:
    """A competitor made from a function that processes a case and returns its units."""

    def competitor(case: Case) -> Turn:
        start = time.perf_counter()
        units = work(case)
        return Turn(time.perf_counter() - start, units)

    return competitor


def measured_rounds(
    competitors: Mapping[str, Callable[[Case], Turn]],
    rounds: Iterable[Sequence[Case]],
    after_turn: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, float]]:
    """Time every competitor on every case of every round. Yields the seconds per unit of each, round by round.

    Competitors take turns case by case, so that a busy machine slows all of them alike. The order rotates, so that no
    competitor always runs with the caches that the same other one left. ``after_turn`` shows progress.
    """
    order = deque(competitors)
    for cases in rounds:
        seconds, units = dict.fromkeys(competitors, 0.0), dict.fromkeys(competitors, 0.0)
        for case in cases:
            for name in order:
                turn = competitors[name](case)
                seconds[name] += turn.seconds
                units[name] += turn.units
                after_turn()
            order.rotate(-1)
        yield {name: seconds[name] / units[name] for name in competitors}


def ratio(values: Sequence[float], base: Sequence[float]) -> Spread:
    """The ratio of one competitor to another, round by round."""
    return Spread.of([value / other for value, other in zip(values, base, strict=True)])


def describe() -> dict[str, Any]:
    """Processor, memory, threads and package versions."""
    import psutil

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        **{name: version(name) for name in ("torch", "transformers", "cocoa-integrations")},
    }


def one_line(machine: Mapping[str, Any]) -> str:
    """The description in one line."""
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    names = ("python", "torch", "transformers", "cocoa-integrations")
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpu}, "
        f"{machine['torch_threads']} torch threads; " + ", ".join(f"{name} {machine[name]}" for name in names)
    )


def _processor() -> str:
    """The processor's name, with its generation on x86-64: a virtual machine's name may leave that out."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    values = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", text, re.MULTILINE))
    if "model name" not in values:
        return platform.processor() or platform.machine()
    generation = [f"{name.removeprefix('cpu ')} {values[name]}" for name in ("cpu family", "model") if name in values]
    return ", ".join([values["model name"], *([" ".join(generation)] if generation else [])])


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    **options: Any,
) -> list[list[int]]:
    """Answer prompts, given as token ids, in one left-padded batch without sampling (``options``: of ``generate``).

    Returns:
        The new tokens of each prompt, up to and including its end token.
    """
    eos = eos_token_ids(model, Tokens(tokenizer))
    width = max(map(len, prompts))
    pad = min(eos, default=0)
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    settings: dict[str, Any] = {"do_sample": False, "num_beams": 1, "pad_token_id": pad, "tokenizer": tokenizer}
    settings["eos_token_id"] = sorted(eos) or None
    with torch.no_grad():
        output = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **{**settings, **options})
    rows = output[:, width:].tolist()
    ends = [next((at for at, token_id in enumerate(row, start=1) if token_id in eos), None) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]
