"""What the forward passes of an engine feed, seen from inside; the passes are real ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from cocoa_engine import CocoaEngine
from cocoa_engine.execution.forward.base import Segment
from tests.helpers.inside import backend_inside


class Pass(NamedTuple):
    """One pass: a piece of a prompt or a step, and the number of tokens of each sequence in it."""

    is_prompt: bool
    widths: list[int]


def record(engine: CocoaEngine, before: Callable[[Sequence[Segment], bool], None] | None = None) -> list[Pass]:
    """A list that fills as it runs. ``before`` is called first in each pass; what it raises, the pass raises."""
    forward: Any = backend_inside(engine).forward
    passes: list[Pass] = []

    class Recorded(type(forward)):  # type: ignore[misc]
        def __call__(self, segments: Sequence[Segment], capture: Any) -> Any:
            if before is not None:
                before(segments, capture is None)
            output = super().__call__(segments, capture)
            passes.append(Pass(capture is None, [segment.width for segment in segments]))
            return output

    forward.__class__ = Recorded
    return passes


@contextmanager
def failing(engine: CocoaEngine, error: Exception) -> Iterator[None]:
    """Every pass raises ``error`` meanwhile."""

    def fail(*_: Any) -> None:
        raise error

    forward: Any = backend_inside(engine).forward
    kind = type(forward)
    record(engine, fail)
    try:
        yield
    finally:
        forward.__class__ = kind


def steps(passes: Sequence[Pass]) -> list[list[int]]:
    """The widths of those that are no prompt's."""
    return [each.widths for each in passes if not each.is_prompt]
