"""``cocoa serve --ray`` as a process, with the embedded model and a cluster of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.live_server import Reader
from tests.helpers.ray_cluster import LIMIT, STARTS, STUCK, eventually, free_port
from tests.helpers.served import CHAT, error_of
from tests.helpers.server_process import serves

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(STUCK)]

TELL = [{"role": "user", "content": "Tell a long story about a dragon."}]
STORY = {"messages": TELL, "max_tokens": 300, "stream": True}


def test_the_server_starts_answers_and_drains_and_ends_with_its_cluster(tmp_path: Path) -> None:
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
