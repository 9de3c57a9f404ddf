"""One continuous batch for all callers: shared passes, single results, and nothing left behind."""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

from cocoa_engine import Cancellation, CocoaEngine, EngineBusyError, Generation, NonFiniteLogitsError
from cocoa_engine.execution.backends import shared_cache
from cocoa_engine.execution.forward.base import Segment
from cocoa_engine.execution.scheduler import Scheduler, Work
from tests.helpers.alike import answers, assert_alike, assert_all_alike
from tests.helpers.in_threads import Asks, Held, Meets, join, start, together, wait_until
from tests.helpers.inside import (
    assert_idle,
    calls_waiting,
    hook_count,
    open_sequences,
    record,
    sequences_running,
    steps,
)
from tests.helpers.tiny_models import endless, engine_of, prompt, tiny_model

Call = Callable[[CocoaEngine], Any]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"middle_layers": (1, 3)},
    {"middle_layers": (0, 6), "final_layer": "pre_norm"},
    {"span_boundary": "own", "span_log_prob": "mean"},
    {"span_boundary": "left", "method": "cocoa", "metric": "con_mlds"},
    {"span_boundary": "fixed", "max_span_tokens": 3},
    {"method": "greedy"},
    {"temperature": 2.0, "seed": 7, "gamma": 0.1},
    {"stop": ("ing", "é")},
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.6)]},
]


def varied_calls() -> list[Call]:
    calls: list[Call] = [
        lambda engine, n=n, settings=settings: engine.generate(prompt(n, 3 + 5 * n), max_new_tokens=20, **settings)
        for n, settings in enumerate(SETTINGS)
    ]
    calls += [
        lambda engine, n=n, settings=settings: engine.stream(prompt(30 + n), max_new_tokens=16, **settings)
        for n, settings in enumerate(SETTINGS[:6])
    ]
    calls += [
        lambda engine: engine.generate(
            prompt(40), max_new_tokens=16, stopping_criteria=[Meets(lambda count: count == 24)]
        ),
        lambda engine: engine.generate_batch([prompt(n, 2 + 9 * (n - 50)) for n in range(50, 54)], max_new_tokens=12),
        lambda engine: engine.generate_batch([prompt(n) for n in range(60, 70)], max_new_tokens=6, batch_size=2),
        lambda engine: engine.generate_batch(
            [prompt(70), prompt(71)], max_new_tokens=12, middle_layers=(1, 3), temperature=1.0, seed=3
        ),
        lambda engine: engine.score(prompt(80), prompt(81)),
        lambda engine: engine.score(prompt(80), [prompt(82), prompt(83, 3)], middle_layers=(1, 5)),
        lambda engine: engine.score("a beginning", "the end"),
        lambda engine: engine.generate("a beginning", max_new_tokens=16),
    ]
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon", "mamba"])
def test_many_threads_share_passes_and_get_what_each_gets_alone(architecture: str) -> None:
    model, calls = tiny_model(architecture), varied_calls()
    assert len(calls) == 24
    # Mamba's cache is copied for every pass, and Falcon's takes one answer at a time
    calls = calls[:: 5 if architecture in ("mamba", "falcon") else 1]
    alone, shared = engine_of(model), engine_of(model, max_batch_size=4)
    shared.session.scheduler.patience = 100.0  # a pass of so small a model is over before others can come
    fast = architecture != "mamba"
    passes_alone, passes_shared = (record(alone), record(shared)) if fast else ([], [])
    expected = [answers(call(alone)) for call in calls]

    actual = together([lambda call=call: answers(call(shared)) for call in calls])

    for one, other in zip(actual, expected, strict=True):
        if isinstance(one, BaseException):
            raise one
        assert_all_alike(one, other)
    if architecture in ("llama", "gpt2"):
        assert max(len(widths) for widths in steps(passes_shared)) in range(2, 5)
        assert len(steps(passes_shared)) < len(steps(passes_alone))  # how much fewer is a matter of who comes when
    if architecture == "falcon":
        assert {len(widths) for widths in steps(passes_shared)} == {1}  # its own attention takes one at a time
    if fast:
        assert_idle(shared)


# Joining and leaving.


def test_a_request_joins_while_others_run_and_leaves_when_it_is_done() -> None:
    engine = endless(draft_tokens=0)  # or the short one might take a pass or two
    engine.session.scheduler.patience = 100.0  # however busy the machine, neither misses the other's pass
    begun, short = threading.Event(), []

    def at(count: int) -> bool:
        if count == 10:
            call = partial(engine.generate, prompt(2), max_new_tokens=12)
            short.append(start(partial(call, stopping_criteria=Meets(lambda _: begun.set())), outcome))
            assert begun.wait(60)
        return False

    outcome: list[Any] = []
    expected = engine.generate(prompt(1), max_new_tokens=80)
    expected_short = engine.generate(prompt(2), max_new_tokens=12)
    passes = record(engine)
    answer = engine.generate(prompt(1), max_new_tokens=80, stopping_criteria=Meets(at))
    join(short)
    assert_alike(answer, expected)
    assert_all_alike(outcome, expected_short)
    sequences = [len(widths) for widths in steps(passes)]
    assert sequences[0] == sequences[-1] == 1
    assert sequences.count(2) >= 4
    assert_idle(engine)


def test_a_long_prompt_is_fed_in_pieces_between_the_steps_of_others() -> None:
    engine = endless()
    engine.session.scheduler.prefill_chunk = 8
    expected = [engine.generate(prompt(1), max_new_tokens=100), engine.generate(prompt(2, 160), max_new_tokens=4)]
    passes = record(engine)
    joined: list[threading.Thread] = []
    outcome: list[Any] = []

    def at(count: int) -> bool:
        if count == 5:
            joined.append(start(partial(engine.generate, prompt(2, 160), max_new_tokens=4), outcome))
        return False

    answer = engine.generate(prompt(1), max_new_tokens=100, stopping_criteria=Meets(at))
    join(joined)
    assert_alike(answer, expected[0])
    assert_all_alike(outcome, expected[1])
    assert passes[0].widths == [12]  # alone: at once
    pieces = [number for number, each in enumerate(passes) if each.is_prompt][1:]
    assert [passes[number].widths for number in pieces] == [[8]] * 20
    between = [later - earlier - 1 for earlier, later in pairwise(pieces)]
    # threads take turns: on a busy machine a piece may follow another before the other caller is ready
    assert sum(steps_between > 0 for steps_between in between) >= len(between) // 4
    assert_idle(engine)


def test_prompts_are_read_by_turns_and_steps_go_on_between() -> None:
    """A short prompt that comes later does not wait for the whole of a long one."""
    scheduler, order, joined = Scheduler(3, 0), [], []

    class Slow:
        """Reads a prompt, which is a list of names of its pieces, piece by piece."""

        max_sequences = None

        def prefill_some(self, tree: Any, max_tokens: int | None) -> Any:
            order.append(tree.pop(0))
            if order == ["long"]:
                for number, work in enumerate((short, step)):
                    joined.append(start(partial(ask, work)))
                    wait_until(lambda number=number: len(scheduler._pending) == number + 1)
            return None if tree else torch.zeros(1)

        def step(self, requests: Any) -> list[Any]:
            order.extend("step" for _ in requests)
            return [torch.zeros(1) for _ in requests]

    def ask(work: Work) -> None:
        with scheduler.slot():
            scheduler.feed([work])

    backend: Any = Slow()
    long, short = (Work(backend, tree, None) for tree in (["long"] * 6, ["short"] * 2))  # type: ignore[arg-type]
    step = Work(backend, None, None, [(1,)])  # type: ignore[arg-type]
    ask(long)
    join(joined)
    assert order == ["long", "step", "short", "long", "short", "long", "long", "long", "long"]
    assert scheduler.running == 0


def test_a_pass_wakes_only_the_callers_whose_work_it_finished() -> None:
    """Otherwise the time between two passes would grow with the square of the number of callers."""
    callers, passes = 16, 20
    scheduler, wakings = Scheduler(callers, 0), []
    scheduler._not_before = time.monotonic() + 1000  # every pass has the work of all, the first one too
    scheduler.patience = 1e6

    class Steps:
        max_sequences = None

        def step(self, requests: Any) -> list[Any]:
            return [torch.zeros(1) for _ in requests]

    class Counted(Cancellation):
        def check(self) -> None:  # whenever the caller begins to wait, or is woken before its work is done
            wakings.append(None)

    def ask() -> None:
        with scheduler.slot():
            begin.wait(60)
            for _ in range(passes):
                scheduler.feed([Work(backend, None, None, [(1,)], cancellation=Counted())])  # type: ignore[arg-type]
            begin.wait(60)

    backend, begin = Steps(), threading.Barrier(callers)
    outcomes: list[Any] = []
    join([start(ask, outcomes) for _ in range(callers)])
    assert outcomes == [None] * callers
    assert len(wakings) <= 2 * callers * passes
    assert scheduler.idle


def test_a_batch_of_more_prompts_than_places_keeps_all_places_busy() -> None:
    engine = engine_of(tiny_model("llama"), max_batch_size=3)
    prompts = [prompt(n, 3 + n) for n in range(9)]
    expected = [engine.generate(each, max_new_tokens=4 + 3 * n) for n, each in enumerate(prompts)]
    passes = record(engine)
    batch = engine.generate_batch(prompts, max_new_tokens=28)
    assert [len(widths) for widths in steps(passes)].count(3) > len(steps(passes)) // 2
    assert max(len(widths) for widths in steps(passes)) == 3
    for one, beginning in zip(batch, expected, strict=True):
        assert one.token_ids[:4] == beginning.token_ids[:4]
    passes.clear()
    engine.generate_batch(prompts, max_new_tokens=8, batch_size=2)
    assert max(len(widths) for widths in steps(passes)) == 2


# One row's failure touches no other.


ERRORS = {"processor": LookupError, "NaN": NonFiniteLogitsError, "prompt": RuntimeError, "step": RuntimeError}


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "fault"), [("gpt2", "NaN"), *(("llama", fault) for fault in ERRORS)])
def test_only_the_sequences_that_cannot_be_run_have_the_error(architecture: str, fault: str) -> None:
    """The others go on as if nothing had been, in a batch and in threads; a pass that fails is run again row by row."""
    in_pass = fault in ("prompt", "step")
    model, bad = tiny_model(architecture), (2,) if in_pass else (1, 4)
    engine, prompts = engine_of(model, max_batch_size=6 if in_pass else 3), [prompt(n) for n in range(6)]
    beginnings = {prompts[n][0] for n in bad}
    settings: dict[str, Any] = {"max_new_tokens": 12, "logits_processor": SuppressTokensLogitsProcessor([9])}
    expected = engine.generate_batch(prompts, **settings)
    stores: list[Any] = []
    failures: list[int] = []

    def break_off(ids: list[int]) -> None:
        if ids[0] in beginnings and len(ids) > 14:
            raise LookupError(str(ids[0]))

    def fail(segments: Sequence[Segment], is_prompt: bool) -> None:
        if is_prompt and segments[0].token_ids[0] in beginnings:
            stores.append(segments[0].store)
        late = any(segment.store in stores and segment.committed > 15 for segment in segments)
        if (is_prompt and segments[0].store in stores) if fault == "prompt" else (not is_prompt and late):
            failures.append(len(segments))
            raise RuntimeError("this sequence cannot be run")

    if in_pass:
        record(engine, fail)
    elif fault == "processor":
        settings["logits_processor"] = [SuppressTokensLogitsProcessor([9]), Asks(break_off)]
    else:
        with torch.no_grad():
            model.get_input_embeddings().weight[9] = float("nan")
        prompts = [[*each, 9, 30] if n in bad else each for n, each in enumerate(prompts)]
    results = engine.generate_batch(prompts, return_exceptions=True, **settings)
    assert failures == {"prompt": [1], "step": [6, 1]}.get(fault, [])
    for outcome in (results, together([partial(engine.generate, each, **settings) for each in prompts])):
        assert [n for n, answer in enumerate(outcome) if isinstance(answer, ERRORS[fault])] == [*bad]
        others = [n for n in range(6) if n not in bad]
        assert_all_alike([outcome[n] for n in others], [expected[n] for n in others])
    with pytest.raises(ERRORS[fault]):
        engine.generate_batch(prompts, **settings)
    assert_idle(engine)
    if fault == "processor":
        assert [str(results[n]) for n in bad] == [str(prompts[n][0]) for n in bad]
        settings["logits_processor"] = SuppressTokensLogitsProcessor([9])
        assert_alike(engine.generate(prompts[1], **settings), expected[1])


# Interrupts.


@pytest.mark.slow
@pytest.mark.parametrize("where", ["prompt", "step", "module"])
def test_an_interrupt_in_a_shared_pass_loses_no_work_of_others(where: str) -> None:
    """It is raised in the thread that happens to drive; the others run the pass again."""
    model = tiny_model("llama")
    engine, prompts = engine_of(model, max_batch_size=4), [prompt(n) for n in range(6)]
    expected = engine.generate_batch(prompts, max_new_tokens=14)
    interrupted: list[bool] = []

    def interrupt(segments: Any, is_prompt: Any, *_: Any) -> None:
        here = is_prompt is True if where == "prompt" else where == "module" or len(segments) > 1
        if here and not interrupted and sequences_running(engine) > 1:
            interrupted.append(True)
            raise KeyboardInterrupt

    if where == "module":
        hook = model.model.layers[3].register_forward_hook(interrupt)
        assert engine.info().forward == "modules"
    else:
        record(engine, interrupt)
    actual = together([partial(engine.generate, each, max_new_tokens=14) for each in prompts])
    assert sum(isinstance(answer, KeyboardInterrupt) for answer in actual) == 1
    for answer, alone in zip(actual, expected, strict=True):
        if not isinstance(answer, KeyboardInterrupt):
            assert_alike(answer, alone)
    assert_idle(engine)
    assert_all_alike(engine.generate_batch(prompts, max_new_tokens=14), expected)
    if where == "module":
        assert hook_count(model) == 1
        hook.remove()


def test_a_caller_that_is_interrupted_while_another_drives() -> None:
    """What it had handed in is neither fed nor waited for."""
    engine = engine_of(tiny_model("llama"))
    expected = engine.generate(prompt(0), max_new_tokens=12)
    stream = engine.stream(prompt(1, 30), max_new_tokens=12)
    next(stream)
    inside, go_on = threading.Event(), threading.Event()

    def hold(segments: Sequence[Segment], is_prompt: bool) -> None:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    passes = record(engine, hold)
    outcome: list[Any] = []
    other = start(partial(engine.generate, prompt(0), max_new_tokens=12), outcome)
    assert inside.wait(60)
    sleep = engine.session.scheduler._sleep

    def interrupted(*arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        sleep(*arguments)

    engine.session.scheduler._sleep = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    go_on.set()
    join([other])
    assert_all_alike(outcome, expected)
    assert {len(each.widths) for each in passes} == {1}
    assert list(stream) == []
    assert_idle(engine)


# The queue.


@pytest.mark.parametrize("max_queue", [0, 1])
def test_a_call_is_refused_when_the_queue_is_full(max_queue: int) -> None:
    engine = engine_of(tiny_model("llama"), max_batch_size=1, max_queue=max_queue)
    expected = engine.generate_batch([prompt(0), prompt(1), prompt(2)], max_new_tokens=6)
    batch = partial(engine.generate_batch, [prompt(1), prompt(2)], max_new_tokens=6)
    held, outcome = Held(engine), []
    waiting = [start(batch, outcome) for _ in range(max_queue)]
    wait_until(lambda: calls_waiting(engine) == max_queue)
    for call in (
        partial(engine.generate, prompt(1)),
        batch,
        partial(batch, return_exceptions=True),
        lambda: list(engine.stream(prompt(1))),
    ):
        with pytest.raises(EngineBusyError, match=rf"running: 1, waiting: {max_queue}.*Runtime\(max_queue=\.\.\.\)"):
            call()
    assert len(engine.score(prompt(1), [[5, 6], [7]])) == 2  # needs no place
    assert_alike(held.let_go(), expected[0])
    join(waiting)
    assert len(outcome) == max_queue
    for answers_of_batch in outcome:
        assert_all_alike(answers_of_batch, expected[1:])
    assert_idle(engine)
    assert_alike(engine.generate(prompt(0), max_new_tokens=6), expected[0])


def test_a_batch_that_has_begun_is_not_refused_halfway() -> None:
    """Another call takes the place between two of its prompts: it waits, also where calls may not."""
    engine = engine_of(tiny_model("llama"), max_batch_size=1, max_queue=0)
    expected = engine.generate_batch([prompt(1), prompt(2)], max_new_tokens=4)
    held: list[Held] = []
    leave = engine.session.scheduler.leave

    def leave_to_another(owner: object = None) -> None:
        leave(owner)
        if not held:
            held.append(Held(engine))
            held.append(start(held[0].let_go))  # type: ignore[arg-type]

    engine.session.scheduler.leave = leave_to_another  # type: ignore[method-assign]
    assert_all_alike(engine.generate_batch([prompt(1), prompt(2)], max_new_tokens=4), expected)
    join([held[1]])  # type: ignore[list-item]
    assert_idle(engine)


def order_of_turns(slots: int, *owners: str | None) -> list[int]:
    """The order in which calls of owners get slots: the first ones hold them, the others wait one after the other."""
    scheduler, order = Scheduler(slots, 1000), []
    turn = threading.Semaphore(0)

    def hold(number: int) -> None:
        with scheduler.slot(owner=owners[number]):
            order.append(number)
            assert turn.acquire(timeout=30)

    threads = []
    for number in range(len(owners)):
        threads.append(start(partial(hold, number)))
        wait_until(lambda number=number: len(order) + scheduler.waiting == number + 1)
    if len(owners) > slots:
        assert not scheduler.enter(wait=False)
    for number in range(len(owners)):
        wait_until(lambda number=number: len(order) == min(number + slots, len(owners)))
        turn.release()
    join(threads)
    assert (scheduler.running, scheduler.waiting, scheduler.idle) == (0, 0, True)
    assert [scheduler.enter(wait=False) for _ in range(slots + 1)] == [True] * slots + [False]
    return order


@given(st.integers(1, 4), st.lists(st.sampled_from([*"abcd", None]), min_size=1, max_size=24))
@settings(max_examples=30, deadline=None)
def test_every_waiting_owner_gets_its_turn_before_another_has_two(slots: int, owners: list[str | None]) -> None:
    """And each owner's own calls are served in the order in which they came."""
    numbers = order_of_turns(slots, *owners)
    order = [owners[number] for number in numbers]
    for owner in set(owners):
        assert [number for number in numbers if owners[number] == owner] == [
            number for number, other in enumerate(owners) if other == owner
        ]
        if owner in owners[slots:] and owner not in owners[:slots]:
            before = order[slots : order.index(owner, slots)]
            assert all(before.count(other) <= 1 for other in set(before)), order


def test_a_waiting_call_that_is_interrupted_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both before it is given a place and just after."""
    scheduler = Scheduler(1, 10)

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if granted:
                scheduler.leave()
                assert self.is_set()
            raise KeyboardInterrupt

    for granted in (False, True):
        scheduler.enter()
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Event", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                scheduler.enter()
        if not granted:
            scheduler.leave()
        assert (scheduler.running, scheduler.waiting, scheduler.idle) == (0, 0, True)


# Streams.


def test_a_suspended_stream_holds_no_place_and_waits_for_its_turn_where_calls_may_not() -> None:
    engine = engine_of(tiny_model("llama"), max_batch_size=1, max_queue=0)
    expected = [engine.generate(prompt(n), max_new_tokens=16) for n in range(3)]
    streams = [engine.stream(prompt(n), max_new_tokens=16) for n in range(2)]
    spans = [[next(stream)] for stream in streams]
    assert sequences_running(engine) == 0
    assert_alike(engine.generate(prompt(2), max_new_tokens=16), expected[2])
    held, outcome = Held(engine), []
    thread = start(lambda: list(streams[0]), outcome)
    wait_until(lambda: calls_waiting(engine) == 1)
    held.let_go()
    join([thread])
    for stream, seen, rest, alone in zip(streams, spans, [*outcome, streams[1]], expected, strict=False):
        seen += rest
        assert stream.generation is not None
        assert seen == stream.generation.spans
        assert_alike(stream.generation, alone)
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dropped", "in a cycle", "closed", "closed by another thread"])
def test_an_abandoned_stream_frees_all(how: str) -> None:
    engine = engine_of(tiny_model("llama"), max_batch_size=1)
    stream: Any = engine.stream(prompt(0), max_new_tokens=16)
    next(stream)
    assert open_sequences(engine) == 1
    gc.disable()
    try:
        if how == "dropped":  # at once: not when the garbage collector comes round
            stream = None
        elif how == "in a cycle":
            holder = [stream]
            holder.append(holder)
            del holder
            stream = None
            gc.collect()
        elif how == "closed":
            stream.close()
        else:
            join([start(stream.close)])
        assert_idle(engine)
    finally:
        gc.enable()
    if stream is not None:
        assert stream.closed
        assert list(stream) == []
    assert len(engine.generate(prompt(1), max_new_tokens=4).token_ids) > 0


def test_a_stream_closed_during_its_pass_yields_nothing_more_and_frees_all() -> None:
    engine = engine_of(tiny_model("llama"))
    record(engine, lambda _, is_prompt: None if is_prompt else join([start(stream.close)]))
    stream = engine.stream(prompt(0), max_new_tokens=1)
    assert list(stream) == []
    assert stream.closed
    assert_idle(engine)


def test_a_stream_says_how_much_of_its_prompt_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "PREFILL_CHUNK", 16)
    engine = engine_of(tiny_model("llama"))
    seen: list[tuple[int, int]] = []
    record(engine, lambda _, is_prompt: seen.append(stream.prompt_progress) if is_prompt else None)
    for method in ("cocoa-sig", "dola"):
        seen.clear()
        with engine.stream(prompt(0, 40), max_new_tokens=6, method=method) as stream:
            assert stream.prompt_progress == (0, 40)
            next(stream)
            assert stream.prompt_progress == (40, 40)
        assert stream.prompt_progress == (40, 40)
        assert seen == [(0, 40), (16, 40), (32, 40)]
    stream = engine.stream(prompt(1, 40))
    record(engine, lambda *_: stream.close() if stream.prompt_progress == (16, 40) else None)
    assert list(stream) == []
    assert stream.prompt_progress == (32, 40)  # of one that was closed meanwhile
    assert_idle(engine)


# Own code that asks the engine itself.


@pytest.mark.parametrize("places", [1, 2])
def test_a_processor_may_ask_the_engine_itself(places: int) -> None:
    engine = engine_of(tiny_model("llama"), max_batch_size=places, max_queue=8)
    expected = engine.generate(prompt(0), max_new_tokens=6)
    nested_expected = [engine.generate(prompt(n), max_new_tokens=3) for n in (1, 2)]
    nested: list[Any] = []

    def ask(ids: list[int]) -> None:
        if len(ids) == len(prompt(0)) + 2:
            nested.append(engine.generate(prompt(1), max_new_tokens=3))
            nested.extend(engine.generate_batch([prompt(1), prompt(2)], max_new_tokens=3))
            nested.extend(answers(engine.stream(prompt(2), max_new_tokens=3)))

    def call() -> Generation:
        return engine.generate(prompt(0), max_new_tokens=6, logits_processor=Asks(ask), method="greedy")

    greedy = engine.generate(prompt(0), max_new_tokens=6, method="greedy")
    results = together([call, call, partial(engine.generate, prompt(0), max_new_tokens=6)])
    assert_all_alike(results, [greedy, greedy, expected])
    one, two = nested_expected
    assert len(nested) == 8
    by_prompt = sorted(nested, key=lambda answer: answer.token_ids != one.token_ids)
    assert_all_alike(by_prompt, [one] * 4 + [two] * 4)
    assert_idle(engine)
