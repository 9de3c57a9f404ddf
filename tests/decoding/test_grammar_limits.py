"""Compiling a grammar, and what it allows, has limits of time and memory, whatever is in it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cocoa_engine import Cancellation, CocoaEngine, ConfigError, RequestCancelledError, confined, json_rule, unenforced
from cocoa_engine.confined import FORKS
from cocoa_engine.decoding.grammar import GrammarProcessor
from cocoa_engine.errors import WorkerError
from tests.helpers.in_threads import join, start, wait_until
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import tiny_tokenizer

pytestmark = pytest.mark.skipif(not FORKS, reason="limits need forked processes")

TOKENIZER = tiny_tokenizer()
BURNING = {"type": "integer", "multipleOf": 99999989}
CHAIN = "\n".join(["start: r0", *(f'r{at}: "a" r{at + 1}' for at in range(50_000)), 'r50000: "z"'])
PATTERNS = [
    {"properties": {f"p{at}": {"type": "string", "pattern": f"a{{{part}}}b*"} for at in range(50)}}
    for part in range(30)
]
ENDLESS: dict[str, dict[str, Any]] = {
    "multiple": {"json_schema": BURNING},
    "in a property": {"json_schema": {"properties": {"a": {"type": "array", "items": BURNING}}, "required": ["a"]}},
    "common multiple": {"json_schema": {"type": "integer", "allOf": [{"multipleOf": 99991}, {"multipleOf": 99989}]}},
    "patterns of all parts": {"json_schema": {"type": "object", "allOf": PATTERNS}},
    "chain of rules": {"grammar": CHAIN},
    "nested groups": {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    "text": {"regex": "a" * (2**20 + 1)},
}
"""What takes minutes, all memory, or the whole stack to compile."""


@pytest.fixture(autouse=True)
def nothing_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "_refused", {})


def letter_processor(letter: str) -> GrammarProcessor:
    return GrammarProcessor(f'start: "{letter}"', TOKENIZER)


def first_letter(processor: GrammarProcessor) -> str:
    allowed = processor(torch.empty(1, 0, dtype=torch.long), torch.zeros(1, len(TOKENIZER)))
    return str(TOKENIZER.decode(allowed[0].argmax()))


def kill_server() -> None:
    assert confined._server is not None
    os.kill(confined._server.process.pid, signal.SIGKILL)
    confined._server.process.wait(30)


def memory_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


@pytest.mark.parametrize("name", ENDLESS)
def test_no_grammar_takes_this_process_with_it(engine: CocoaEngine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "patterns of all parts":  # which ends for its memory
        monkeypatch.setattr(confined, "CPU_SECONDS", 1.0)
    before = memory_mb()
    with pytest.raises(ConfigError, match=r"limit|too deeply|cannot be enforced") as raised:
        engine.constrain(**ENDLESS[name])
    assert len(str(raised.value)) < 2000
    assert memory_mb() < before + 300
    answer = engine.generate("a", logits_processor=engine.constrain(regex="[ab]{3}"))  # nothing is left behind
    assert len(answer.text) == 3


@pytest.mark.parametrize("work", ["compile", "warnings"])
def test_a_cancellation_ends_the_compilation(engine: CocoaEngine, work: str) -> None:
    many = ENDLESS["patterns of all parts"]["json_schema"]
    call = partial(engine.constrain, json_schema=BURNING) if work == "compile" else partial(unenforced, many)
    engine.constrain(regex="a")  # the tokenizer is loaded
    cancellation, outcome, begun = Cancellation(), [], threading.Event()
    thread = start(lambda: begun.set() or cancellation.run(call), outcome)
    assert begun.wait(30)
    threading.Timer(0.5, cancellation.cancel).start()
    join([thread])
    assert type(outcome[0]) is RequestCancelledError  # and not the error of the limits


def test_a_grammar_that_is_cancelled_serves_others_with_their_answers() -> None:
    """Its process ends with the call of one request, and is started again for another one at its place."""
    processor, scores = GrammarProcessor("start: /[a-c]{2,8}/", TOKENIZER), torch.zeros(1, len(TOKENIZER))
    request, fresh = processor.for_prompt([]), processor.for_prompt([])
    answer, longer = (torch.tensor([TOKENIZER(text).input_ids]) for text in ("ab", "abc"))
    expected = request(answer, scores)
    processor._grammar._workers[0].end()
    assert torch.equal(request(longer, scores), fresh(longer, scores))
    assert torch.equal(request(answer, scores), expected)


def test_many_grammars_are_kept_in_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cocoa_engine.decoding.grammar.MOST_COMPILED", 2)
    processors = [letter_processor(letter) for letter in "abcd"]
    assert sum(bool(each._grammar._workers) for each in processors) <= 2
    assert [first_letter(each.for_prompt([])) for each in processors] == [*"abcd"]


def test_the_process_that_compiles_can_end_at_any_time() -> None:
    letter_processor("a")
    kill_server()
    letter_processor("a")
    assert json.loads(json_rule({"type": "null"}).removeprefix("%json "))["type"] == "null"


def test_short_work_does_not_wait_behind_long_work(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for places in ("_short", "_long"):
        monkeypatch.setattr(confined, places, threading.Semaphore(1))
    cancellation, outcome = Cancellation(), []
    schemas = [{"type": "integer", "multipleOf": 99999989 + 2 * at} for at in range(4)]
    calls = [partial(cancellation.run, partial(engine.constrain, json_schema=schema)) for schema in schemas]
    threads = [start(call, outcome) for call in calls]
    wait_until(lambda: not confined._long.acquire(blocking=False) or confined._long.release())
    engine.constrain(json_schema={"type": "integer", "minimum": 3})
    assert all(thread.is_alive() for thread in threads)
    cancellation.cancel()
    join(threads)
    assert {type(each) for each in outcome} == {RequestCancelledError}


def test_what_was_refused_for_its_limits_is_refused_at_once(
    engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "CPU_SECONDS", 0.2)
    monkeypatch.setattr(confined, "MOST_REFUSED", 2)
    for at in range(3):
        with pytest.raises(ConfigError, match=r"0\.2 seconds"):
            engine.constrain(json_schema={"type": "integer", "multipleOf": 99999989 + 2 * at})
    assert len(confined._refused) == 2
    begin = confined._worker_with
    monkeypatch.setattr(
        confined,
        "_worker_with",
        lambda load: begin(load) if load.function is confined._prepared else pytest.fail("again"),
    )
    with pytest.raises(ConfigError, match="limits are"):
        engine.constrain(json_schema={"type": "integer", "multipleOf": 99999993})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_a_forked_child_has_workers_of_its_own() -> None:
    processor = letter_processor("a")
    worker = processor._grammar._workers[0]
    child = os.fork()
    if child == 0:
        own = False
        try:
            own = worker.ended and first_letter(processor.for_prompt([])) == "a"
        finally:
            os._exit(0 if own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not worker.ended


def test_copies_share_the_compiled_grammar_and_leave_it_usable() -> None:
    processor = letter_processor("a")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(processor)
    for each in (copy.copy(processor), copy.deepcopy(processor), processor):
        assert first_letter(each) == "a"


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "_server", None)
    monkeypatch.setattr(confined, "_spares", [])


@pytest.mark.parametrize("executable", [None, "/nowhere/python", "/bin/true", "/bin/cat"])
def test_a_process_that_cannot_start_is_not_the_fault_of_the_schema(
    no_server: None, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    """/bin/cat waits for input and is not Python, as a program with an embedded Python."""
    with monkeypatch.context() as patched:
        patched.setattr("multiprocessing.spawn._python_exe", executable)
        patched.setattr(confined, "START_SECONDS", 0.2)
        for _ in range(2):
            with pytest.raises(WorkerError, match="set_executable"):
                unenforced({"type": "integer"})
    assert not confined._refused
    assert unenforced({"type": "integer"}) == []


def test_a_server_that_cannot_fork_says_so(no_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os\ndef fail(*_): raise BlockingIOError\nos.fork = fail\n"
    program += "from cocoa_engine import confined\nconfined.serve()"
    popen = subprocess.Popen
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda command, **options: popen([*command[:2], program], **options))
        confined._server = confined._Server()
    try:
        for _ in range(2):
            with pytest.raises(WorkerError, match="not looked at"):
                unenforced({"type": "number"})
        kill_server()
        assert unenforced({"type": "number"}) == []
        assert not confined._refused
    finally:
        confined._spares.clear()
        confined._server.close()


def printed_by(program: str, **options: Any) -> str:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, **options)
    assert ran.stderr == ""
    return ran.stdout


ASKS = """
import os, sys
os.chdir({folder!r})
sys.path[:0] = {path!r}
from cocoa_engine.decoding.matchers import unenforced
os.chdir("/")
print(unenforced({{"type": "integer"}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", [[""], ["."], ["package.zip"]])
def test_where_the_package_lies_does_not_matter(tmp_path: Path, path: list[str]) -> None:
    folder = ROOT
    if path == ["package.zip"]:
        folder = tmp_path
        with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
            for file in (ROOT / "cocoa_engine").rglob("*.py"):
                archive.write(file, file.relative_to(ROOT))
    others = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    assert printed_by(ASKS.format(folder=str(folder), path=path), env=others, cwd=tmp_path) == "[]\n"


IGNORES = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from cocoa_engine import confined, unenforced
print(unenforced({"type": "integer"}))
server = confined._server
for at in range(8):
    unenforced({"minimum": at})
print(unenforced({"type": "number"}), confined._server is server and not server.ended)
"""


def test_ends_of_processes_that_are_ignored_do_no_harm() -> None:
    assert printed_by(IGNORES) == "[]\n[] True\n"


def test_many_schemas_of_a_request_have_one_limit(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused because of others is not remembered as too large."""

    def regex(at: int) -> str:
        return f"{at}" + "|".join(f"a{part}[0-9]{{1,9}}b" for part in range(3000))

    budget = confined.Budget()
    confined.budget_of_request.set(budget)
    engine.constrain(regex=regex(0))
    confined.budget_of_request.set(None)
    monkeypatch.setattr(confined, "CPU_SECONDS", 4 * (5.0 - budget.left))  # of any processor
    made = []
    with pytest.raises(ConfigError, match="of a request together"), confined.one_budget():
        made.extend(engine.constrain(regex=regex(at)) for at in range(1, 40))
    assert not confined._refused
    for at in range(1, 8):  # each alone has all of it
        made.append(engine.constrain(regex=regex(at)))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing has a low priority")
def test_decoding_has_the_usual_priority_after_a_long_compilation(
    engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "SHORT_SECONDS", 1e-5)
    engine.generate("a", logits_processor=engine.constrain(regex="[ab]{3}"), max_new_tokens=4)
    assert confined._server is not None
    server = confined._server.process.pid
    workers = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    assert workers
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in workers} == {os.getpriority(os.PRIO_PROCESS, 0)}
