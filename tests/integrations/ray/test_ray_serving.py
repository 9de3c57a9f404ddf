"""The server on a Ray cluster of this machine: two replicas on two cores."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cocoa_engine import CocoaEngine, Runtime
from cocoa_integrations.server import create_app
from tests.helpers.in_threads import start, together
from tests.helpers.live_server import Reader
from tests.helpers.processes import free_port
from tests.helpers.ray_cluster import LIMIT, STARTS, STUCK, Deployed, eventually, replicas
from tests.helpers.served import CHAT, HELLO, error_of, post
from tests.helpers.server_process import serves

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(STUCK)]

LONG = {"messages": HELLO, "max_tokens": 1500, "stream": True}


@pytest.fixture(autouse=True)
def _idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test with two replicas begins and ends with replicas that do nothing."""
    if "deployed" not in request.fixturenames:
        yield
        return
    deployed: Deployed = request.getfixturevalue("deployed")

    def idle() -> bool:
        return deployed.count == 2 and deployed.running == 0

    eventually(idle, STARTS)
    yield
    eventually(idle, STARTS)


TELL = [{"role": "user", "content": "Tell a long story about a dragon."}]
STORY = {"messages": TELL, "max_tokens": 300, "stream": True}


def test_the_server_starts_answers_and_drains_and_ends_with_its_cluster(tmp_path: Path) -> None:
    """``cocoa serve --ray`` as a process, with the embedded model and a cluster of its own."""
    port = free_port()
    own = {"COCOA_API_KEYS": "secret", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "RAY_TMPDIR": "/tmp"}
    (tmp_path / "token").write_text("a" * 64, encoding="utf-8")
    options = ["--ray", "--replicas", "1", "--port", str(port), "--max-batch-size", "2", "--shutdown-timeout", "120"]
    command = [sys.executable, "-m", "cocoa_engine.cli", "serve", *options]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **own}, cwd=tmp_path, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: process.poll() is not None or serves(url), STARTS)
        assert process.poll() is None, (tmp_path / "log").read_text()
        asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24}
        assert httpx.post(url + CHAT, json=asked, timeout=LIMIT).status_code == 401
        key = {"authorization": "Bearer secret"}
        answer = httpx.post(url + CHAT, json=asked, headers=key, timeout=LIMIT).json()
        message = answer["choices"][0]["message"]
        assert "Paris" in message["content"]
        assert message["cocoa_risk"]["spans"]
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) > 3
        reader = Reader(url, STORY, **key)
        eventually(lambda: len(reader.events) > 2)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{url}/health", timeout=LIMIT).status_code == 503)
        refused = httpx.post(url + CHAT, json=asked, headers=key, timeout=LIMIT)
        assert not reader.ended
        assert (refused.status_code, error_of(refused)["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) >= 1
        reader.finish()
        assert (reader.error, reader.events[-1]) == (None, "[DONE]")
        assert process.wait(LIMIT) == 0, (tmp_path / "log").read_text()
        _, alive = psutil.wait_procs(children, timeout=LIMIT)
        assert alive == []
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in children:
                child.kill()


def conversation(word: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief. " * 8}, {"role": "user", "content": f"Say {word}."}]


def served_by(deployed: Deployed, *bodies: dict[str, Any], **headers: str) -> set[str]:
    """The replicas that answer some requests, one after the other."""
    before = after = deployed.values("cocoa:request_success_total")
    for body in bodies:
        assert deployed.post({"max_tokens": 3, **body}, **headers).status_code == 200

    def all_counted() -> bool:
        nonlocal after
        after = deployed.values("cocoa:request_success_total")
        return sum(after.values()) == sum(before.values()) + len(bodies)

    eventually(all_counted)
    return {replica for replica, count in after.items() if count > before.get(replica, 0)}


async def test_answers_are_those_of_the_server_in_one_process(deployed: Deployed, tiny_folder: str) -> None:
    runtime = Runtime(draft_tokens=0, max_batch_size=2, max_queue=1)
    app = create_app(CocoaEngine.from_pretrained(tiny_folder, runtime=runtime))
    for body in ({"n": 2, "seed": 5, "temperature": 1.5, "logprobs": True}, {"cocoa": {"method": "cocoa-sig"}}):
        asked = {"messages": HELLO, "max_tokens": 20, **body}
        here, there = (await post(app, asked)).json(), deployed.post(asked).json()
        assert there["choices"] == here["choices"]
        assert there["usage"] == here["usage"]
    asked = {"messages": HELLO, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    assert _choices(deployed.post(asked).text) == _choices((await post(app, asked)).text)
    scored = {"prompt": "One", "texts": [" two", " three"]}
    here, there = (await post(app, scored, "/v1/cocoa/score")).json(), deployed.post(scored, "/v1/cocoa/score").json()
    assert there["data"] == here["data"]
    wrong = deployed.post({"messages": []})
    assert (wrong.status_code, error_of(wrong)) == (400, error_of(await post(app, {"messages": []})))
    assert httpx.get(deployed.url + "/", timeout=30).text.startswith("<!DOCTYPE html>")


def _choices(text: str) -> list[Any]:
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [(event["choices"], event["usage"]) for event in map(json.loads, events)]


def test_a_session_stays_at_one_replica(deployed: Deployed) -> None:
    several = [{"messages": conversation(word)} for word in ("one", "two", "three", "four", "five", "six")]
    assert len(served_by(deployed, *several)) == 2  # without a session, conversations are spread
    for session in ("a", "b", "c"):
        assert len(served_by(deployed, *several, **{"x-session-id": session})) == 1
    keyed = [{**one, "prompt_cache_key": "mine"} for one in several]
    assert len(served_by(deployed, *keyed)) == 1


def test_the_turns_of_a_conversation_find_its_cache_without_a_session(deployed: Deployed) -> None:
    for word in ("red", "green", "blue"):
        turns = conversation(word)
        first = deployed.post({"messages": turns, "max_tokens": 3}).json()
        turns += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        second = deployed.post({"messages": turns, "max_tokens": 3}).json()
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


def test_what_is_too_much_is_refused_as_by_openai(deployed: Deployed) -> None:
    """Six places and two that wait."""
    asked = {"messages": HELLO, "max_tokens": 60}
    answers = together([lambda: deployed.post(asked)] * 16)
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = [answer for answer in answers if answer.status_code == 429]
    for answer in refused:
        error = error_of(answer)
        assert (error["type"], error["code"]) == ("rate_limit_error", "engine_busy")
        assert int(answer.headers["retry-after"]) >= 1


def test_a_client_that_goes_ends_the_work(deployed: Deployed) -> None:
    before = sum(deployed.values("cocoa:cancelled_total").values())
    reader = Reader(deployed.url, LONG)
    eventually(lambda: len(reader.events) > 2)
    reader.leave()
    eventually(lambda: deployed.running == 0)
    eventually(lambda: sum(deployed.values("cocoa:cancelled_total").values()) == before + 1)


def test_a_killed_replica_loses_only_its_streams(deployed: Deployed) -> None:
    """A replica has three places, so that both work on the four streams."""
    readers = [Reader(deployed.url, LONG, **{"x-session-id": f"session {number}"}) for number in range(4)]
    eventually(lambda: all(len(reader.events) > 2 for reader in readers))
    assert not any(reader.ended for reader in readers)
    replicas()[0].kill()
    calls = [deployed.post({"messages": conversation(str(number)), "max_tokens": 3}) for number in range(6)]
    assert [call.status_code for call in calls] == [200] * 6
    for reader in readers:
        reader.finish()
    assert [reader.error for reader in readers] == [None] * 4
    last = [reader.events[-1] for reader in readers]
    lost = [json.loads(event)["error"] for event in last if event != "[DONE]"]
    assert 1 <= len(lost) <= 3
    assert {(error["type"], error["code"]) for error in lost} == {("server_error", "replica_lost")}


def test_a_call_whose_replica_is_killed_begins_anew(deployed: Deployed) -> None:
    asked = {"messages": conversation("more"), "max_tokens": 2000}
    answers: list[httpx.Response] = []
    before = deployed.values("cocoa:request_success_total")
    there = deployed.values("cocoa:num_requests_running").keys()
    thread = start(lambda: answers.append(deployed.post(asked)))
    eventually(lambda: deployed.running == 1)
    max(replicas(), key=lambda one: one.cpu_percent(0.3)).kill()
    assert not answers
    thread.join(LIMIT)
    assert answers[0].status_code == 200, answers[0].text
    eventually(lambda: len(deployed.values("cocoa:num_requests_running").keys() & there) == 1)
    (survivor,) = deployed.values("cocoa:num_requests_running").keys() & there
    count = before.get(survivor, 0) + 1
    eventually(lambda: deployed.values("cocoa:request_success_total").get(survivor, 0) == count)
    answer = answers[0].json()
    assert answer["usage"]["completion_tokens"] == 2000  # whole, and from its beginning
    again = deployed.post({**asked, "max_tokens": 8}).json()["choices"][0]["message"]["content"]
    assert answer["choices"][0]["message"]["content"].startswith(again[:4])


def test_replicas_share_their_metrics_a_token_and_an_arena_of_the_allocator(deployed: Deployed) -> None:
    from ray._raylet import AuthenticationMode, get_authentication_mode

    text = httpx.get(deployed.url + "/metrics", timeout=30).text
    assert text.count("# TYPE cocoa:num_requests_running gauge") == 1
    assert len(deployed.values("cocoa:num_requests_running")) == 2
    assert [process.environ()["MALLOC_ARENA_MAX"] for process in replicas()] == ["1", "1"]
    assert get_authentication_mode() == AuthenticationMode.TOKEN
