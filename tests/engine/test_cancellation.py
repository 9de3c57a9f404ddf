"""Calls whose caller has stopped waiting, or whose process ends: they feed nothing further and free all they held."""

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import (
    Cancellation,
    CocoaEngine,
    Generation,
    PromptError,
    RequestCancelledError,
    Runtime,
    interruptions,
)
from cocoa_engine.execution import scheduler as scheduler_file
from cocoa_engine.execution.backends import shared_cache
from cocoa_engine.execution.forward import attention
from cocoa_engine.execution.forward.base import Segment
from cocoa_engine.interruptions import interruptible
from tests.helpers.alike import answers, assert_alike, assert_all_alike
from tests.helpers.backends import made
from tests.helpers.in_threads import Asks, Held, Meets, join, start, wait_until
from tests.helpers.inside import assert_idle, calls_waiting, hook_count, record, use_backend
from tests.helpers.made_up_risk import fitted
from tests.helpers.rivals import RIVALS, config_of
from tests.helpers.tiny_models import endless, engine_of, prompt, tiny_model, tiny_tokenizer

Ask = Callable[..., Any]

CALLS: dict[str, Ask] = {
    "generate": lambda engine, ids, **options: engine.generate(ids, **options),
    "generate_batch": lambda engine, ids, **options: engine.generate_batch(
        [ids, prompt(9)], return_exceptions=True, **options
    ),
    "stream": lambda engine, ids, **options: answers(engine.stream(ids, **options)),
}
SCORES: dict[str, Ask] = {
    "score": lambda engine, ids, **options: engine.score(ids, [7, 8, 9], **options),
    "score_many": lambda engine, ids, **options: engine.score(ids, [[7, 8, 9], [9, 8]], **options),
    "score_divided": lambda engine, ids, **options: engine.score(ids, [7, 8, 9], divide=True, **options),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@each_call
def test_a_waiting_call_leaves_the_queue_and_its_place_in_it_is_free(call: Ask) -> None:
    engine = engine_of(tiny_model("llama"), max_batch_size=1, max_queue=2)
    expected = engine.generate(prompt(3), max_new_tokens=4)
    held, cancellation = Held(engine), Cancellation()
    outcome = list[Any]()
    waiting = [start(partial(call, engine, prompt(n), cancellation=cancellation), outcome) for n in (1, 2)]
    wait_until(lambda: calls_waiting(engine) == 2)
    cancellation.cancel()
    join(waiting)
    assert [type(each) for each in outcome] == [RequestCancelledError] * 2
    assert calls_waiting(engine) == 0
    later: list[Any] = []
    others = [start(partial(engine.generate, prompt(3), max_new_tokens=4), later) for _ in range(2)]
    wait_until(lambda: calls_waiting(engine) == 2)
    held.let_go()
    join(others)
    assert_all_alike(later, [expected] * 2)
    assert_idle(engine)


def test_those_behind_a_cancelled_call_keep_their_order() -> None:
    engine = engine_of(tiny_model("llama"), max_batch_size=1)
    held, order, threads = Held(engine), [], []
    cancellations = [Cancellation() for _ in range(5)]
    for number, cancellation in enumerate(cancellations):
        note = Asks(lambda _, number=number: order.append(number))
        call = partial(engine.generate, prompt(1), max_new_tokens=1, logits_processor=note, cancellation=cancellation)
        threads.append(start(call))
        wait_until(lambda number=number: calls_waiting(engine) == number + 1)
    for number in (0, 3):
        cancellations[number].cancel()
    wait_until(lambda: calls_waiting(engine) == 3)
    held.let_go()
    join(threads)
    assert list(dict.fromkeys(order)) == [1, 2, 4]
    assert_idle(engine)


def test_a_call_that_is_cancelled_as_it_is_given_a_place_hands_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, cancellation = scheduler_file.Scheduler(1, 10), Cancellation()
    scheduler.enter()

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            scheduler.leave()
            cancellation.cancel()
            return super().wait(timeout)

    monkeypatch.setattr(scheduler_file.threading, "Event", Late)
    with pytest.raises(RequestCancelledError):
        scheduler.enter(cancellation=cancellation)
    assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_what_is_cancelled_before_it_begins_does_no_work() -> None:
    engine = engine_of(tiny_model("llama"))
    passes, cancellation = record(engine), Cancellation()
    cancellation.cancel()
    for call in (*CALLS.values(), *SCORES.values()):
        with pytest.raises(RequestCancelledError):
            call(engine, prompt(0), cancellation=cancellation)
    assert passes == []
    assert_idle(engine)


@pytest.mark.slow
@each_call
@pytest.mark.parametrize("alone", [True, False])
def test_the_rest_of_a_long_prompt_is_not_read(call: Ask, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "PREFILL_CHUNK", 16)
    engine, cancellation = endless(), Cancellation()
    engine.session.scheduler.prefill_chunk = 8
    long = prompt(2, 400)
    expected = engine.generate(prompt(1), max_new_tokens=60)
    pieces: list[int] = []

    def count(segments: Sequence[Segment], is_prompt: bool) -> None:
        if is_prompt and segments[0].width in (8, 16):
            pieces.append(segments[0].width)
            if len(pieces) == 3:
                cancellation.cancel()

    outcome, joined = list[Any](), list[threading.Thread]()

    def at(tokens: int) -> bool:
        if tokens == 5:
            joined.append(start(partial(call, engine, long, cancellation=cancellation), outcome))
        return False

    record(engine, count)
    if alone:
        at(5)
    else:
        assert_alike(engine.generate(prompt(1), max_new_tokens=60, stopping_criteria=Meets(at)), expected)
    join(joined)
    assert [type(each) for each in outcome] == [RequestCancelledError]
    assert len(pieces) == 3
    assert_idle(engine)


def fresh(kind: str) -> CocoaEngine:
    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=8))
    return use_backend(engine, made(model, kind, "stock"))


@cache
def uninterrupted(kind: str) -> Generation:
    return fresh(kind).generate(prompt(2, 300), max_new_tokens=12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static_lean", "lean", "modules", "masked_modules", "copied_cache", "recompute"])
@pytest.mark.parametrize("call", [*CALLS, *SCORES])
def test_a_pass_ends_between_two_layers_and_the_next_call_is_as_ever(
    kind: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, ran, cancellation = prompt(2, 300), set[int](), Cancellation()
    engine = fresh(kind)
    shared = engine.generate(long[:150], max_new_tokens=2)  # so that a part of the prompt may come from a cache

    def in_layer(layer: int) -> None:
        ran.add(layer)
        if layer == 1:
            cancellation.cancel()

    def attend(segment: Segment, layer: int, *args: Any, **options: Any) -> Any:
        in_layer(layer)
        return original(segment, layer, *args, **options)

    original = attention.attend
    monkeypatch.setattr(attention, "attend", attend)
    layers = engine.model.model.layers
    chosen = engine.session.chosen
    hooks = [layers[n].register_forward_pre_hook(lambda *_, n=n: in_layer(n)) for n in range(len(layers))]
    use_backend(engine, chosen)  # hooks change the state of the model
    with pytest.raises(RequestCancelledError):
        {**CALLS, **SCORES}[call](engine, long, cancellation=cancellation)
    for hook in hooks:
        hook.remove()
    use_backend(engine, chosen)
    monkeypatch.undo()
    assert ran == {0, 1}
    assert hook_count(engine.model) == 0
    assert_alike(engine.generate(long, max_new_tokens=12), uninterrupted(kind))
    assert_alike(engine.generate(long[:150], max_new_tokens=2), shared)
    assert engine.session.scheduler.idle


def test_a_pass_goes_on_until_all_who_wait_for_it_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cancellations = tiny_model("llama"), [Cancellation(), Cancellation()]
    engine = use_backend(engine_of(model, max_batch_size=2), made(model, "lean", "stock"))
    sequences, ran = [0], list[int]()

    def attend(segment: Segment, layer: int, *args: Any, **options: Any) -> Any:
        if sequences[0] == 2:  # called for both of them
            ran.append(layer)
            cancellations[0].cancel()
            if layer == 2:
                cancellations[1].cancel()
        return original(segment, layer, *args, **options)

    engine.session.scheduler.observers.append(lambda batch: sequences.__setitem__(0, len(batch)))
    engine.session.scheduler.patience = 1e6
    original = attention.attend
    monkeypatch.setattr(attention, "attend", attend)
    outcome: list[Any] = []
    calls = [partial(engine.generate, prompt(n), cancellation=each) for n, each in enumerate(cancellations)]
    join([start(call, outcome) for call in calls])
    assert [type(each) for each in outcome] == [RequestCancelledError] * 2
    assert ran == [0, 0, 1, 1, 2, 2]
    assert_idle(engine)


def test_closing_a_stream_that_waits_frees_its_reader() -> None:
    engine = engine_of(tiny_model("llama"), max_batch_size=1, max_queue=1)
    held, outcome = Held(engine), []
    stream = engine.stream(prompt(1), max_new_tokens=8)
    reader = start(lambda: list(stream), outcome)
    wait_until(lambda: calls_waiting(engine) == 1)
    stream.close()
    join([reader])
    assert outcome == [[]]
    assert stream.closed
    assert stream.generation is None
    held.let_go()
    assert_idle(engine)


def test_a_stream_that_is_cancelled_between_two_spans_says_so() -> None:
    engine, cancellation = engine_of(tiny_model("llama")), Cancellation()
    expected = engine.generate(prompt(0), max_new_tokens=16)
    stream, other = (engine.stream(prompt(0), max_new_tokens=16, cancellation=cancellation) for _ in range(2))
    next(stream)
    next(other)
    other.close()  # which is its own affair
    assert not cancellation.cancelled
    cancellation.cancel()
    assert stream.closed
    with pytest.raises(RequestCancelledError):
        next(stream)
    assert list(other) == []
    assert_idle(engine)
    assert_all_alike(engine.generate(prompt(0), max_new_tokens=16), expected)


def test_nothing_listens_to_a_cancellation_once_calls_are_over() -> None:
    engine: CocoaEngine = engine_of(tiny_model("llama"))
    cancellation = Cancellation()
    engine.generate(prompt(0), max_new_tokens=4, cancellation=cancellation)
    left = engine.stream(prompt(0), max_new_tokens=16, cancellation=cancellation)
    next(left)
    assert len(cancellation._listeners) == 1
    del left
    assert not cancellation._listeners
    list(engine.stream(prompt(0), max_new_tokens=4, cancellation=cancellation))
    assert not cancellation._listeners


HI = [{"role": "user", "content": "Hi."}]
BURNING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


@pytest.mark.slow
def test_a_template_that_does_not_end_is_cancelled_or_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = BURNING
    engine = CocoaEngine(tiny_model("llama"), tokenizer)
    for call in (engine.chat, engine.stream_chat, engine.render_chat, engine.encode_chat):
        cancellation, outcome = Cancellation(), list[Any]()
        is_given = call in (engine.chat, engine.stream_chat)
        asked = partial(call, HI, cancellation=cancellation) if is_given else partial(cancellation.run, call, HI)
        thread = start(asked, outcome)
        wait_until(lambda: bool(cancellation._listeners))  # noqa: B023
        cancellation.cancel()
        join([thread])
        assert type(outcome[0]) is RequestCancelledError
    monkeypatch.setattr("cocoa_engine.model.tokenizer.RENDERING_SECONDS", 0.3)
    with pytest.raises(PromptError, match="chat template takes more than"):
        engine.chat(HI)


def test_interrupts_reach_nothing_but_the_function() -> None:
    """Each call ends at about the time of its limit; what follows it in the thread is never interrupted."""
    interrupted = 0
    for number in range(300):
        rounds, limit = 400 * (number % 20), 0.0005
        try:
            interruptible(lambda rounds=rounds: sum(each for each in range(rounds)), limit)
        except TimeoutError:
            interrupted += 1
        for _ in range(200):  # where a late interrupt would be raised
            pass
    assert interrupted < 300


TEXTS = [[number, *range(20, 40)] for number in range(10, 19)]


class After(Cancellation):
    """Is cancelled when it is asked for the last time of some."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.asked, self.last = 0, last

    def check(self) -> None:
        self.asked += 1
        if self.asked == self.last:
            self.cancel()
        super().check()


def cancelled_at_each_pass(engine: CocoaEngine, *args: Any, **options: Any) -> int:
    """Score until the end, and cancelled at each of its checks. Returns their number."""
    expected = engine.score(*args, **options)  # the next calls find its prompt in the cache
    whole = After(10**6)
    engine.score(*args, cancellation=whole, **options)
    for asked in range(1, whole.asked + 1):
        with pytest.raises(RequestCancelledError):
            engine.score(*args, cancellation=After(asked), **options)
        assert_idle(engine)
    assert engine.score(*args, cancellation=After(10**6), **options) == expected
    return whole.asked


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cocoa-sig", *RIVALS])
def test_scores_of_several_texts_end_between_passes(method: str, tmp_path: Path) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    config = config_of(method, engine.model, tmp_path)
    assert cancelled_at_each_pass(engine, [5, 6, 7], TEXTS, config=config) > 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::cocoa_engine.CalibrationWarning")
def test_a_divided_text_ends_while_its_candidates_grow() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), calibrator=fitted(levels=("span",)))
    assert cancelled_at_each_pass(engine, [5, 6, 7], TEXTS[0], divide=True) > 3


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> CocoaEngine:
    """Of a process that may end."""
    monkeypatch.setattr(interruptions, "_ending", False)
    return CocoaEngine(tiny_model("llama"), tiny_tokenizer())


# pytest reports threads that end by SystemExit; Python does not
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_daemon_thread_ends_silently_and_another_gets_an_error(
    tiny: CocoaEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    """A hook that runs later may wait for it."""
    begun = threading.Event()

    def work() -> None:
        while True:
            tiny.generate([5, 6], max_new_tokens=2)
            begun.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(60)
    interruptions._end_work()
    join([thread])
    assert not interruptions._depths
    assert capfd.readouterr().err == ""
    for call in (lambda: tiny.generate([5, 6]), lambda: tiny.score([5, 6], [7])):
        with pytest.raises(RequestCancelledError, match="the process is ending"):
            call()
    assert not interruptions._depths


def test_no_thread_waits_for_one_that_has_the_model(tiny: CocoaEngine) -> None:
    """The first one has the lock of the model for several passes, and the second one waits for it."""
    model = tiny.session.model
    waits, ended = threading.Event(), threading.Event()
    passes = []

    def hold() -> None:
        with model.lock:
            waits.wait(60)
            ended.wait(60)
            with model.exclusive():
                passes.append("of the first thread")

    def wait() -> None:
        with interruptions.at_work:
            waits.set()
            with model.exclusive():
                passes.append("of the second thread")

    threads = [start(hold), start(wait)]
    assert waits.wait(60)
    threading.Timer(0.2, ended.set).start()
    interruptions._end_work()
    assert not interruptions._depths  # it did not give up
    join(threads)
    assert passes == []
