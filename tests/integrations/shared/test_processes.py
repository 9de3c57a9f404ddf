"""Forks and exits: a child may use no engine of its parent but its own, and open streams do not disturb an end."""

import json
import os
import signal
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.processes import run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")]

EXITS = """
engine = endless()
streams = [engine.stream([5, 6, 7], max_new_tokens=200)]
streams += [LangChainLLM(engine=engine, max_tokens=200).stream("hello")]
streams += [LlamaIndexLLM(engine=engine, max_tokens=200).stream_complete("hello")]
for stream in streams:
    next(stream)

def note(token_ids, scores):
    begun.set()
    return scores

def read():
    for _ in engine.stream([5, 6], max_new_tokens=400, gamma=1.0, logits_processor=[note]):
        pass

begun = threading.Event()
for _ in range(3):
    threading.Thread(target=read, daemon=True).start()
begun.wait(100)

async def main():
    for stream in (
        LangChainLLM(engine=engine, max_tokens=200).astream("hello"),
        await LlamaIndexLLM(engine=engine, max_tokens=200).astream_complete("hello"),
    ):
        streams.append(stream)
        await stream.__anext__()
    if how == "interrupt":
        raise KeyboardInterrupt

if how == "open loop":
    (loop := asyncio.new_event_loop()).run_until_complete(main())
else:
    asyncio.run(main())
print("end")
"""

FORKS = """
gc.freeze()  # or each exit looks through all that was imported
torch.set_num_threads(2)
engine, ids = engine_of(tiny_model("llama")), [5, 6, 7]
wide = torch.ones(400_000)
wide.exp().sum()  # torch's own threads run
expected = engine.generate(ids, max_new_tokens=5).token_ids
asyncio.run(in_worker(engine, engine.info))
stream = engine.stream(ids, max_new_tokens=40)
next(stream)
langchain, llama_index = LangChainLLM(engine=engine, max_tokens=3), LlamaIndexLLM(engine=engine, max_tokens=3)
held = Held(engine) if how == "fork while held" else None

reading, writing = os.pipe()
child = os.fork()
if not child:
    signal.alarm(300)
    def said(call):
        try:
            return str(call())
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    outcomes = {
        "generate": said(lambda: engine.generate(ids)),
        "stream": said(lambda: engine.stream(ids)),
        "open stream": said(lambda: next(stream)),
        "generate_batch": said(lambda: engine.generate_batch([ids])),
        "score": said(lambda: engine.score(ids, ids)),
        "info": said(engine.info),
        "encode": said(lambda: engine.encode("a")),
        "other calibrator": said(lambda: engine.without_calibrator().generate(ids)),
        "langchain": said(lambda: langchain.invoke("a")),
        "langchain async": said(lambda: asyncio.run(langchain.ainvoke("a"))),
        "llama_index": said(lambda: llama_index.complete("a")),
        "llama_index async": said(lambda: asyncio.run(llama_index.acomplete("a"))),
    }
    known = weakref.ref(engine)
    stream.close()
    del engine, stream, langchain, llama_index, held
    gc.collect()
    own = engine_of(tiny_model("llama"))
    works = [float(wide.exp().sum() > 0), own.generate(ids, max_new_tokens=5).token_ids,
             asyncio.run(in_worker(own, own.generate, ids, max_new_tokens=5)).token_ids]
    os.write(writing, json.dumps([outcomes, works, torch.get_num_threads()]).encode())
    os._exit(0)
os.close(writing)
answer = os.fdopen(reading).read()
status = os.waitpid(child, 0)[1]
rest = [held.let_go().usage.completion_tokens] if held else []
rest += [engine.generate(ids, max_new_tokens=5).token_ids, len(list(stream)) > 0]
print(json.dumps([status, expected, json.loads(answer or "null"), rest]))
"""

CASES = {
    **dict.fromkeys(("end", "interrupt", "open loop"), EXITS),
    **dict.fromkeys(("fork", "fork while held"), FORKS),
}

PROGRAM = """
import asyncio, gc, json, os, signal, sys, threading, weakref
gc.disable()  # while everything is imported
import torch
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from cocoa_integrations._shared.engines import in_worker
from cocoa_engine.model.light_model import import_model_classes

import_model_classes()  # or torchao writes to stderr when the tests' models are made
from tests.helpers.tiny_models import endless, engine_of
from tests.helpers.in_threads import Held
from tests.helpers.tiny_models import tiny_model

gc.enable()
children = {}
for how, program in json.loads(sys.argv[1]).items():
    if not (child := os.fork()):  # which ends as a process that was started anew, and in which nothing was computed
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{how}.{name}", os.O_CREAT | os.O_WRONLY), number)
        exec(program)
        break
    children[how] = child
else:
    for how, child in children.items():
        print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":", flush=True)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """How each program ended: its status, and what it wrote to stdout and stderr."""
    folder = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patched.setenv("OMP_NUM_THREADS", "2")
        patched.setenv("OMP_WAIT_POLICY", "passive")  # they need not spin
        patched.chdir(folder)
        done = run([sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(CASES)])
    assert (done.returncode, done.stderr) == (0, "")
    statuses = dict(line.split(":") for line in done.stdout.splitlines())
    written = {how: [(folder / f"{how}.{name}").read_text() for name in ("stdout", "stderr")] for how in CASES}
    return {how: (statuses[how], stdout, stderr) for how, (stdout, stderr) in written.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [how for how, program in CASES.items() if program is EXITS])
def test_open_streams_and_running_calls_do_not_disturb_exit(how: str, ended: dict[str, tuple[str, str, str]]) -> None:
    status, stdout, stderr = ended[how]
    assert "Exception ignored" not in stderr, stderr
    if how == "interrupt":
        assert status in ("1", f"-{signal.SIGINT:d}")  # which one depends on Python's version
        assert (stdout, stderr.count("Traceback"), stderr.splitlines()[-1]) == ("", 1, "KeyboardInterrupt")
    else:
        assert (status, stdout, stderr) == ("0", "end\n", "")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [how for how, program in CASES.items() if program is FORKS])
def test_a_fork_after_use(how: str, ended: dict[str, tuple[str, str, str]]) -> None:
    status, stdout, stderr = ended[how]
    assert status == "0", stderr
    assert "Exception ignored" not in stderr
    child, expected, said, rest = json.loads(stdout)
    assert child == 0, "the child hangs"
    outcomes, own, threads = said
    for door, outcome in outcomes.items():
        assert outcome.startswith("ForkedProcessError: this engine was loaded before the process forked"), door
        assert "spawn" in outcome
    assert own == [1.0, expected, expected]
    assert threads == 2, "its own engine computes with several threads"
    assert rest[-2:] == [expected, True]
