"""One request on its way through the model: its prompt is fed, then what its decode loop asks for."""

from __future__ import annotations

from collections.abc import Generator

from cocoa_engine.calibration import RiskCalibrator
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.request import Request
from cocoa_engine.decoding.result_builder import ResultBuilder
from cocoa_engine.decoding.span_decoder import SpanDecoder
from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.execution.backends import Backend, FeedRequest, StepOutput
from cocoa_engine.execution.scheduler import Work
from cocoa_engine.execution.session import Session
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model.detokenizer import TextTrack
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.results import Generation
from cocoa_engine.spans import Span

FREE_LEAVES = 6
"""Leaves that one pass feeds at little more than the cost of one; shared by the sequences in the pass."""


def require_ability(method: str, backend: Backend, capture: CaptureSpec) -> None:
    """Refuse what a backend cannot do.

    Raises:
        UnsupportedModelError: heads are to be masked, and the model's attention cannot be replaced.
    """
    if capture.masked and not backend.masks_heads:
        raise UnsupportedModelError(
            f"method={method!r} masks attention heads, which takes a model whose attention goes through transformers' "
            f"AttentionInterface; this one runs by {backend.forward_name!r} (see `cocoa info`)."
        )


class DecodeTask:
    """A request that is being decoded. Close it in any case.

    Args:
        config: the settings as the user gave them.
        calibrator: gives the risk of spans and answers; `None` leaves the raw MLDS.

    Attributes:
        work: what to feed next; `None` at the end.

    Raises:
        UnsupportedModelError: the method needs what the backend of this model cannot do.
    """

    def __init__(
        self, request: Request, config: CocoaConfig, session: Session, calibrator: RiskCalibrator | None = None
    ) -> None:
        backend, scheduler = session.backend, session.scheduler
        # a contrast begins at the prompt's last token, which is then a step and not part of the prompt
        contrasts = isinstance(METHODS[config.method], ContrastingMethod)
        prefill = request.prompt[:-1] if contrasts else request.prompt
        require_ability(config.method, backend, request.capture)
        reserve = request.reserve_tokens + len(request.prompt) - len(prefill)
        (self._tree,) = backend.open([prefill], reserve, request.capture)
        if METHODS[config.method].reads_back and not self._tree.keeps_rest:
            raise UnsupportedModelError(
                f"method={config.method!r} reads the prompt again after every candidate, which takes a model whose "
                f"branches share one cache; this one runs by {backend.name!r} (see `cocoa info`)."
            )
        self._decoder = SpanDecoder(
            request.prompt,
            request.rules,
            TextTrack(session.tokens.decode, request.rules.stop_texts),
            draft_tokens=session.runtime.draft_tokens,
            free_rows=lambda: FREE_LEAVES // max(1, scheduler.running),
            native=backend.native,
            calibrator=calibrator,
        )
        self._builder = ResultBuilder(config, len(request.prompt), session.model_name, calibrator)
        self._loop: Generator[FeedRequest, StepOutput, None] | None = None
        self._request, self._backend, self._scheduler, self._contrasts = request, backend, scheduler, contrasts
        self.work: Work | None = self._new_work(None)
        if not prefill:
            self._loop = self._decoder.decode(self._tree, None)
            self.work = self._new_work(next(self._loop))

    def advance(self) -> None:
        """Take in what has been fed.

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
                    self._loop = self._decoder.decode(self._tree, None if self._contrasts else done.first)
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
        """How many tokens of the prompt were fed."""
        return self._tree.prompt_read if self._loop is None else len(self._request.prompt)

    def ready(self) -> list[Span]:
        """The spans that have become final since the last call."""
        return self._builder.ready(self._decoder)

    def generation(self) -> Generation:
        """The whole answer, once there is no work left and every span was fetched."""
        return self._builder.generation(self._decoder, self._tree)

    def close(self) -> None:
        """Free what the request holds."""
        self._tree.close()

    def _new_work(self, paths: FeedRequest | None) -> Work:
        return Work(self._backend, self._tree, self._request.capture, paths, cancellation=self._request.cancellation)
