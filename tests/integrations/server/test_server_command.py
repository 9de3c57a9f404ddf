"""``cocoa serve``: its options, its keys, and how it ends."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.cli.app import OneLineErrors
from cocoa_integrations.server import process
from cocoa_integrations.server.command import given_keys, serve
from tests.helpers.in_threads import start, wait_until
from tests.helpers.processes import python
from tests.helpers.reasoning_models import speaker
from tests.helpers.served import CHAT, HELLO, PATIENCE
from tests.helpers.server_process import serves

Run = Callable[..., Result]


@pytest.fixture
def cocoa(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``cocoa`` with some arguments in this process."""
    monkeypatch.delenv("COCOA_API_KEYS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(process, "log_config", lambda shows_texts: None)  # logging is left as it is
    app = typer.Typer(cls=OneLineErrors)
    app.command()(serve)
    app.callback()(lambda: None)
    return lambda *args: CliRunner().invoke(app, ["serve", *map(str, args)], prog_name="cocoa")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Loading returns a tiny engine; what was asked for is in the dict."""
    asked: dict[str, Any] = {}

    def load(model_name: str | None = None, **options: Any) -> CocoaEngine:
        asked.update(options, model_name=model_name)
        return speaker(max_batch_size=options["runtime"].max_batch_size, max_queue=options["runtime"].max_queue)

    monkeypatch.setattr(CocoaEngine, "from_pretrained", load)
    return asked


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Calls a function with the server's address in a thread, and then sends this process a signal."""
    servers: list[process.DrainingServer] = []

    class Noted(process.DrainingServer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, log_config=None)
            servers.append(self)

    monkeypatch.setattr(process, "DrainingServer", Noted)

    def begin(visit: Callable[[str], None], kind: signal.Signals = signal.SIGTERM) -> list[Any]:
        outcome: list[Any] = []

        def run() -> None:
            wait_until(lambda: servers and servers[0].started)
            try:
                visit(f"http://127.0.0.1:{servers[0].servers[0].sockets[0].getsockname()[1]}")
            finally:
                os.kill(os.getpid(), kind)

        start(run, outcome)
        return outcome

    return begin


def until_ready(url: str, **headers: str) -> httpx.Response:
    wait_until(lambda: serves(url))
    return httpx.post(url + CHAT, json={"messages": HELLO}, headers=headers, timeout=PATIENCE)


def test_a_server_from_its_start_to_sigterm(
    cocoa: Run, loaded: dict[str, Any], meanwhile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(process, "keep_one_arena", lambda: seen.update(arena_before_loading=not loaded))

    def visit(url: str) -> None:
        seen["refused"] = until_ready(url).status_code
        seen["answer"] = until_ready(url, authorization="Bearer k2").json()

    outcome = meanwhile(visit)
    options = ["--port", 0, "--api-key", "k1", "--api-key", "k2", "--method", "greedy", "--max-new-tokens", 3]
    options += ["--served-model-name", "small", "--max-batch-size", 3, "--max-queue", 5, "--calibrator", "none"]
    result = cocoa("some/model", "--dtype", "float32", *options)
    assert outcome == [None], outcome
    assert result.exit_code == 0, result.output
    assert loaded["model_name"] == "some/model"
    assert loaded["dtype"] == "float32"
    assert loaded["calibrator"] is None
    assert (loaded["runtime"].max_batch_size, loaded["runtime"].max_queue) == (3, 5)
    assert seen["arena_before_loading"]
    assert seen["refused"] == 401
    assert seen["answer"]["model"] == "small"
    assert seen["answer"]["usage"]["completion_tokens"] == 3
    assert seen["answer"]["choices"][0]["message"]["cocoa_risk"]["method"] == "greedy"


def test_a_model_that_cannot_be_found_ends_the_command(cocoa: Run, tmp_path: Path) -> None:
    result = cocoa(tmp_path / "nothing", "--port", 0)
    assert result.exit_code == 2
    assert "nothing" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "give a key"),
        (["--api-key", ""], "key 0 is empty"),
        (["--api-key-file", "missing"], "--api-key-file missing"),
        (["--alpha", "-1"], "alpha"),
        (["--max-queue", "-1"], "max-queue"),
    ],
)
def test_options_are_refused_before_anything_is_loaded(
    cocoa: Run, loaded: dict[str, Any], options: list[str], message: str
) -> None:
    result = cocoa(*options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not loaded


def test_a_port_that_is_taken_ends_the_command(cocoa: Run, loaded: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cocoa("--port", port)
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in result.stderr
    assert not loaded
    assert cocoa("--host", "203.0.113.7", "--api-key", "k", "--port", 0).exit_code == 2  # of no machine


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loaded_ends_the_command_at_once(
    cocoa: Run, meanwhile: Any, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    done = threading.Event()
    begun = threading.Event()

    def load(*_: Any, **__: Any) -> CocoaEngine:
        begun.set()
        assert done.wait(PATIENCE)
        raise OSError("too late")

    def leave(code: int) -> None:
        raise SystemExit(code + 77)

    monkeypatch.setattr(CocoaEngine, "from_pretrained", load)
    monkeypatch.setattr(os, "_exit", leave)
    outcome = meanwhile(lambda url: begun.wait(PATIENCE) and None, kind)
    try:
        result = cocoa("--port", 0)
    finally:
        done.set()
    assert outcome == [None]
    assert result.exit_code == 77
    assert "stopped before the model was loaded" in result.stderr


def test_keys_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nk3\n\n  k4  \n")
    monkeypatch.setenv("COCOA_API_KEYS", "k5, k6 k7")
    assert sorted(given_keys(["k1", "k2"], file)) == [f"k{number}" for number in range(1, 8)]
    monkeypatch.delenv("COCOA_API_KEYS")
    assert given_keys((), None) == []
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        given_keys((), file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="--api-key-file"):
        given_keys((), file)


def test_listing_the_command_imports_no_web_framework() -> None:
    code = (
        "import sys, cocoa_integrations.server.command\n"
        "assert not {'torch', 'fastapi', 'uvicorn', 'transformers'} & sys.modules.keys()\n"
        "sys.modules['fastapi'] = None\n"
        "from cocoa_engine.errors import MissingExtraError\n"
        "try:\n"
        "    from cocoa_integrations.server import create_app\n"
        "except MissingExtraError as error:\n"
        "    print(error)\n"
    )
    assert python(code) == "cocoa_integrations.server needs fastapi: pip install 'cocoa-integrations[serve]'\n"
