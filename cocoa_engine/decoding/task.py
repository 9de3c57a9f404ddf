"""One request on its way through the model: its prompt is fed, then whatever its decode loop asks for."""

from __future__ import annotations

from collections.abc import Generator

from cocoa_engine.calibration import RiskCalibrator
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.request import Request
from cocoa_engine.decoding.result_builder import ResultBuilder
from cocoa_engine.decoding.span_decoder import SpanDecoder
from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.execution.backends import Backend, FeedRequest, StepOutput
from cocoa_engine.execution.scheduler import Scheduler, Work
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model.detokenizer import Decode, TextTrack
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.results import Generation
from cocoa_engine.spans import Span

TIPS = 6
"""Tips that one pass feeds at little more than the cost of one; shared by the sequences in it."""


def require_ability(method: str, backend: Backend, wanted: CaptureSpec) -> None:
    """Refuse what a backend cannot do.

    Raises:
        UnsupportedModelError: heads are to be masked, and the model's attention is not run by us.
    """
    if wanted.masked and not backend.masks_heads:
        raise UnsupportedModelError(
            f"method={method!r} masks attention heads, which takes a model whose attention goes through transformers' "
            f"AttentionInterface; this one runs by {backend.forward_name!r} (see `cocoa info`)."
        )


class DecodeTask:
    """A request being decoded. Close it, whatever happens.

    Args:
        config: the settings as the user gave them.
        draft_tokens: guesses fed after each tip, at most.
        calibrator: gives the spans' risk; none leaves the raw MLDS.
    """

    def __init__(
        self,
        request: Request,
        config: CocoaConfig,
        backend: Backend,
        scheduler: Scheduler,
        decode: Decode,
        *,
        draft_tokens: int,
        model_name: str,
        calibrator: RiskCalibrator | None = None,
    ) -> None:
        # a contrast begins at the prompt's last token, which is then a step and not part of the prompt
        contrasts = isinstance(METHODS[config.method], ContrastingMethod)
        read = request.prompt[:-1] if contrasts else request.prompt
        require_ability(config.method, backend, request.wanted)
        (self._tree,) = backend.open([read], request.room + len(request.prompt) - len(read), request.wanted)
        if METHODS[config.method].reads_back and not self._tree.keeps_rest:
            raise UnsupportedModelError(
                f"method={config.method!r} reads the prompt again after every candidate, which takes a model whose "
                f"branches share one cache; this one runs by {backend.name!r} (see `cocoa info`)."
            )
        self._scheduler = scheduler
        self._sequencer = SpanDecoder(
            request.prompt,
            request.rules,
            TextTrack(decode, request.rules.stop_texts),
            draft_tokens=draft_tokens,
            room=lambda: TIPS // max(1, scheduler.running),
            native=backend.native,
            calibrator=calibrator,
        )
        self._assembler = ResultBuilder(config, len(request.prompt), model_name, calibrator)
        self._loop: Generator[FeedRequest, StepOutput, None] | None = None
        self._backend, self._wanted, self._contrasts = backend, request.wanted, contrasts
        self._cancellation = request.cancellation
        self.work: Work | None = self._new_work(None)
        if not read:
            self._loop = self._sequencer.decode(self._tree, None)
            self.work = self._new_work(next(self._loop))

    def advance(self) -> None:
        """Take in what has been fed; ``work`` is what to feed next, or none at the end.

        Raises:
            Exception: what the pass raised, or the request's own processors and criteria.
        """
        done = self.work
        assert done is not None
        if done.error is not None:
            raise done.error
        with self._scheduler.own_code():
            try:
                if self._loop is None:
                    assert done.first is not None
                    self._loop = self._sequencer.decode(self._tree, None if self._contrasts else done.first)
                    paths = next(self._loop)
                else:
                    assert done.output is not None
                    paths = self._loop.send(done.output)
            except StopIteration:
                self.work = None
                self._tree.close()
                return
        self.work = self._new_work(paths)

    @property
    def prompt_read(self) -> int:
        """Tokens of the prompt that have been read."""
        return self._tree.prompt_read if self._loop is None else len(self._sequencer.prompt)

    def _new_work(self, paths: FeedRequest | None) -> Work:
        return Work(self._backend, self._tree, self._wanted, paths, cancellation=self._cancellation)

    def ready(self) -> list[Span]:
        """The spans that have become final since the last call."""
        return self._assembler.ready(self._sequencer)

    def generation(self) -> Generation:
        """The whole answer, once there is no work left and every span was fetched."""
        return self._assembler.generation(self._sequencer, self._tree)

    def close(self) -> None:
        """Free what the request holds."""
        self._tree.close()
