"""The engine behind an adapter: it is loaded when it is first needed, and works in threads of its own.

Adapters with the same options share one engine. Adapters that differ only in the calibrator or in how the model is run
share its weights.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

from typing_extensions import Self

from cocoa_engine import Cancellation, CocoaEngine, RiskCalibrator, Runtime, load_tokenizer, read_context_window
from cocoa_engine.integration import free_in_child

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Item = TypeVar("Item", covariant=True)


class HasRuntime(Protocol):
    """An engine, or a :class:`~cocoa_integrations._shared.engines.LazyEngine`."""

    @property
    def runtime(self) -> Runtime:
        """How the engine runs its model."""


_pools: weakref.WeakKeyDictionary[HasRuntime, ThreadPoolExecutor] = weakref.WeakKeyDictionary()
_running: set[object] = set()
_lock = free_in_child(threading.Lock())
if hasattr(os, "register_at_fork"):  # their threads do not exist in the child
    os.register_at_fork(after_in_child=_pools.clear)
    os.register_at_fork(after_in_child=_running.clear)


async def in_worker(
    engine: HasRuntime, call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Like ``asyncio.to_thread``, but in a thread pool of the engine, which ends with the engine.

    The default executor of an event loop has only a few threads more than there are cores. That can be too few to fill
    a batch, and other work of the application would wait in the same queue.

    If the task that waits is cancelled, so is what the call does without a cancellation of its own; see
    :meth:`Cancellation.run <cocoa_engine.Cancellation.run>`.
    """
    cancellation = Cancellation()
    context = contextvars.copy_context()

    def counted() -> Result:
        _running.add(entry := object())  # a function that names itself would keep the engine until a gc
        try:
            return context.run(lambda: cancellation.run(call, *args, **kwargs))
        finally:
            _running.discard(entry)

    with _lock:
        if engine not in _pools:
            runtime = engine.runtime
            # one more than the engine admits, so that the engine refuses the excess call; the pool would queue it
            _pools[engine] = ThreadPoolExecutor(
                runtime.max_batch_size + runtime.max_queue + 1, thread_name_prefix="cocoa"
            )
        pool = _pools[engine]
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, counted)
    except asyncio.CancelledError:
        cancellation.cancel()
        raise


def running() -> int:
    """The number of calls that worker threads work on."""
    return len(_running)


class ClosableIterator(Protocol[Item]):
    """A generator, or a :class:`~cocoa_engine.SpanStream`."""

    def __next__(self) -> Item:
        """The next item."""

    def close(self) -> None:
        """Stop the work."""


class AsyncStream(Generic[Result]):
    """Iterates over a synchronous stream, each step in a worker thread of the engine.

    The stream does no work between two steps, so an abandoned stream costs nothing. Use it as an async context manager,
    which closes the stream. A step that is running when the task is cancelled ends before the next layer of its
    pass, provided the stream's own ``close`` or its cancellation stops it. A cancellation ends what a step does outside
    of forward passes; by default, the end of the task that waits does.
    """

    def __init__(
        self, engine: HasRuntime, stream: ClosableIterator[Result], cancellation: Cancellation | None = None
    ) -> None:
        self._engine, self._stream = engine, stream
        # StopIteration cannot be raised into a future, so the end of the stream is a value: the stream itself
        step: Callable[[], Any] = partial(next, stream, stream)
        self._step = step if cancellation is None else partial(cancellation.run, step)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result:
        item: Any = await in_worker(self._engine, self._step)
        if item is self._stream:
            raise StopAsyncIteration
        result: Result = item
        return result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the stream. Nothing is awaited, so this is safe while the task is being cancelled."""
        with suppress(ValueError):  # a worker thread is inside a generator, which cannot be closed from outside
            self._stream.close()


Shared = TypeVar("Shared")


class LazyEngine:
    """An engine that is loaded when it is first needed. Create it with :func:`lazy_engine`.

    Copies are the same object.
    """

    def __init__(self, arguments: dict[str, Any], weights: _Weights) -> None:
        self._arguments = arguments
        self._weights = weights
        self._engine: CocoaEngine | None = None
        self._as_loaded: str | None = None
        self._lock = free_in_child(threading.Lock())
        calibrator = arguments.get("calibrator", "auto")
        # engines that differ in the calibrator share their batch and their prefix cache too
        self._default = (
            None if calibrator == "auto" else _once(LazyEngine, {**arguments, "calibrator": "auto"}, weights)
        )

    @property
    def runtime(self) -> Runtime:
        """How the engine runs its model."""
        return self._arguments.get("runtime") or Runtime()

    @property
    def context_window(self) -> int | None:
        """The window of the model, read from its configuration if it is not loaded; ``None`` if it is not known."""
        return self._engine.context_window if self._engine is not None else self._weights.context_window

    @property
    def changed_settings(self) -> str | None:
        """The digest of the engine's settings if they were changed since it was loaded, otherwise ``None``."""
        if self._engine is None or (digest := settings_digest(self._engine)) == self._as_loaded:
            return None
        return digest

    def get(self) -> CocoaEngine:
        """The engine. It is loaded by the first call that succeeds."""
        with self._lock:
            if self._engine is None:
                calibrator = self._arguments.get("calibrator", "auto")
                if self._default is None:
                    engine = self._weights.engine(self._arguments.get("runtime"))
                elif calibrator is None:
                    engine = self._default.get().without_calibrator()
                else:
                    fitted = RiskCalibrator.load(calibrator)  # before the weights are read
                    engine = self._default.get().with_calibrator(fitted)
                self._as_loaded = _digest(self._weights.settings, engine)
                self._engine = engine
            return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyEngine:
        return self


class _Weights:
    """A model and its tokenizer, given or loaded when they are first needed. The name of a given model is a label."""

    def __init__(
        self, arguments: dict[str, Any], model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self._arguments = arguments
        self._model, self._tokenizer = model, tokenizer
        self._parts: tuple[Any, PreTrainedTokenizerBase, str] | None = None
        self._lock = free_in_child(threading.Lock())
        self.settings = ""
        self._by_name: _Weights | None = None
        if model is None and tokenizer is not None:
            self._by_name = _once(_Weights, {**arguments, "tokenizer_name": None, "tokenizer_kwargs": {}}, None, None)

    @cached_property
    def context_window(self) -> int | None:
        if self._model is not None:
            return None
        name, kwargs = self._arguments.get("model_name"), self._arguments.get("model_kwargs")
        trust = self._arguments.get("trust_remote_code", False)
        return read_context_window(name, trust_remote_code=trust, model_kwargs=kwargs)

    def engine(self, runtime: Runtime | None) -> CocoaEngine:
        """A new engine with these weights."""
        with self._lock:
            if self._parts is None:
                engine = self._load(runtime)
                self._parts = engine.held_model, engine.tokenizer, engine.model_name
                self.settings = _model_settings(engine)
                return engine
            model, tokenizer, name = self._parts
        return CocoaEngine(model, tokenizer, runtime=runtime, model_name=name)

    def _load(self, runtime: Runtime | None) -> CocoaEngine:
        arguments, tokenizer = self._arguments, self._tokenizer
        if self._by_name is not None:
            loaded: Any = self._by_name.engine(runtime)
            assert tokenizer is not None
            return CocoaEngine(loaded.held_model, tokenizer, runtime=runtime, model_name=loaded.model_name)
        if self._model is None:
            return CocoaEngine.from_pretrained(**arguments, runtime=runtime)
        if tokenizer is None:
            trust = {"trust_remote_code": arguments["trust_remote_code"]}
            tokenizer = load_tokenizer(arguments["tokenizer_name"], {**trust, **arguments["tokenizer_kwargs"]})
        return CocoaEngine(self._model, tokenizer, runtime=runtime, model_name=arguments["model_name"])


# LangChain builds a new model for every call with configurable_fields(); the weights must not be loaded each time.
_shared: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_shared_lock = free_in_child(threading.RLock())


def lazy_engine(
    arguments: dict[str, Any],
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LazyEngine:
    """An engine for ``CocoaEngine.from_pretrained(**arguments)``, shared by all callers with equal arguments.

    The engine is freed when the last of these callers is. A loaded ``model`` and ``tokenizer`` are used instead of
    those that the arguments name.
    """
    by_name = {name: value for name, value in arguments.items() if name not in ("runtime", "calibrator")}
    with _shared_lock:
        return _once(LazyEngine, dict(arguments), _once(_Weights, by_name, model, tokenizer))


def _once(kind: Callable[..., Shared], arguments: dict[str, Any], *parts: Any) -> Shared:
    """The object of these arguments and parts, which it holds, so that their ids are theirs alone."""
    key = repr((kind, *map(id, parts), sorted(arguments.items())))
    with _shared_lock:
        shared = _shared.get(key)
        if shared is None:
            shared = _shared[key] = kind(arguments, *parts)
        return shared


def settings_digest(engine: CocoaEngine) -> str:
    """Digest of what users may change on an engine: generation config, chat template and calibrator."""
    return _digest(_model_settings(engine), engine)


def _model_settings(engine: CocoaEngine) -> str:
    generation_config = getattr(engine.held_model, "generation_config", None)
    settings = generation_config.to_dict() if generation_config is not None else {}
    return repr((sorted(settings.items()), getattr(engine.tokenizer, "chat_template", None)))


def _digest(model_settings: str, engine: CocoaEngine) -> str:
    calibrator = None if engine.calibrator is None else engine.calibrator.model_dump_json()
    return hashlib.sha256(repr((model_settings, calibrator)).encode()).hexdigest()


def closed_at_exit(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Close the generator that a method returns when the process ends.

    Otherwise Python closes it after it has cleared the modules that a framework's generator uses on closing, and prints
    a traceback.
    """

    def close(generator: weakref.ref[Generator[Any, Any, Any]]) -> None:
        if (alive := generator()) is not None:
            with suppress(ValueError):  # a thread runs it
                alive.close()

    @wraps(method)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        made = method(*args, **kwargs)
        if isinstance(made, Generator):
            weakref.finalize(made, close, weakref.ref(made))
        return made

    return wrapped
