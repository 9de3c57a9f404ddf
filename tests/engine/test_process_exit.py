"""What threads do that reach a forward pass while the process ends, without a process that ends."""

from __future__ import annotations

import threading

import pytest

from cocoa_engine import CocoaEngine, process_exit
from cocoa_engine.errors import RequestCancelledError
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

# pytest reports threads that end by SystemExit; Python does not
SILENT = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(scope="module")
def tiny() -> CocoaEngine:
    return CocoaEngine(tiny_model("llama"), tiny_tokenizer())


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_exit, "_ending", False)


@SILENT
def test_a_daemon_thread_ends_silently(ending: None, tiny: CocoaEngine, capfd: pytest.CaptureFixture[str]) -> None:
    """A hook that runs later may wait for it."""
    begun, answers = threading.Event(), 0

    def work() -> None:
        nonlocal answers
        while True:
            tiny.generate([5, 6], max_new_tokens=2)
            answers += 1
            begun.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(60)
    process_exit._end_work()
    thread.join(30)
    assert not thread.is_alive()
    assert answers
    assert not process_exit._depths
    assert capfd.readouterr().err == ""


def test_another_thread_gets_an_error(ending: None, tiny: CocoaEngine) -> None:
    process_exit._end_work()
    for call in (lambda: tiny.generate([5, 6]), lambda: tiny.score([5, 6], [7])):
        with pytest.raises(RequestCancelledError, match="the process is ending"):
            call()
    assert not process_exit._depths


@SILENT
def test_no_thread_waits_for_one_that_has_the_model(ending: None, tiny: CocoaEngine) -> None:
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
        with process_exit.at_work:
            waits.set()
            with model.exclusive():
                passes.append("of the second thread")

    threads = [threading.Thread(target=one, daemon=True) for one in (hold, wait)]
    for thread in threads:
        thread.start()
    assert waits.wait(60)
    threading.Timer(0.2, ended.set).start()
    process_exit._end_work()
    assert not process_exit._depths  # it did not give up
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert passes == []
