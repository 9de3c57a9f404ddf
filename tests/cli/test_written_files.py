"""What commands leave behind: whole files or none, nothing overwritten by accident, and a note after Ctrl-C."""

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import CocoaEngine, Generation, RiskCalibrator, SpanStream
from cocoa_engine.cli.output import reserved
from cocoa_engine.errors import ConfigError, OutputError
from cocoa_engine.files import append, draft_of, locked, open_in_place, require_writable, write_file
from cocoa_engine.lab.fit_calibrator import verdict
from tests.helpers.cocoa import Cocoa, assert_refused, press_ctrl_c, successful
from tests.helpers.in_threads import join, start, together
from tests.helpers.made_up_risk import fitted, labelled_items, risk
from tests.helpers.mutations import outcome
from tests.helpers.processes import LIMIT, limited


@pytest.fixture(scope="module")
def engine(tiny: CocoaEngine) -> CocoaEngine:
    return tiny


ASK = ("ask", "Hello", "--raw", "--max-new-tokens", "4")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    write_file(file, "old")

    def interrupted() -> None:
        with draft_of(file) as draft:
            draft.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.svg"]
    (tmp_path / "link").symlink_to(file)
    write_file(tmp_path / "link", "new")
    assert file.read_text() == "new"
    assert (tmp_path / "link").is_symlink()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user, outside the folder that others can write to."""
    file = tmp_path / "private"
    file.write_text("secret")
    return file


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that others can write to."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


posix = pytest.mark.skipif(os.name != "posix", reason="needs owners and rights of files")
as_root = pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can give a file away")


@posix
def test_nobody_else_reads_a_draft_and_the_file_gets_its_mode(shared: Path) -> None:
    file = shared / "risk.json"
    for umask, mode in ((0o022, 0o644), (0o027, 0o640), (0o000, 0o666)):
        before = os.umask(umask)
        try:
            with draft_of(file) as draft:
                (there,) = shared.iterdir()
                assert (there, there.stat().st_mode & 0o777) == (Path(draft.name), 0o600)
                assert os.umask(umask) == umask
        finally:
            os.umask(before)
        assert file.stat().st_mode & 0o777 == mode
        file.unlink()
    file.touch()
    file.chmod(0o604)
    write_file(file, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o604)


@as_root
def test_the_mode_of_another_user_s_file_is_not_taken(shared: Path) -> None:
    file = shared / "risk.json"
    file.touch()
    file.chmod(0o666)
    os.chown(file, 12345, 12345)
    write_file(file, "new")
    umask = os.umask(0o022)
    os.umask(umask)
    assert (file.stat().st_uid, file.stat().st_mode & 0o777) == (os.getuid(), 0o666 & ~umask)


@posix
@pytest.mark.parametrize("name", ["a.svg", "b", ".c", "x" * 200])
def test_links_in_the_place_of_drafts_locks_and_trials_lead_nowhere(shared: Path, victim: Path, name: str) -> None:
    """Neither one that was there before nor one that takes the draft's place."""
    file, locked_file = shared / name, shared / "risk.json"
    drafts = (f".{file.stem}.{os.getpid()}{file.suffix}", f"{name}.incomplete")
    for link in (*drafts, ".risk.json.lock", ".lock", ".writable"):
        (shared / link).symlink_to(victim)
    with draft_of(file) as draft:
        Path(draft.name).unlink()
        Path(draft.name).symlink_to(victim)
        draft.write(b"new")
    with reserved(shared / "other.json", overwrite=False):
        pass
    require_writable(locked_file)
    for path in (shared, locked_file):
        with pytest.raises(ConfigError), locked(path):
            pass
    assert victim.read_text() == "secret"
    assert (shared / ".writable").is_symlink()


@as_root
def test_another_user_s_link_is_not_followed(shared: Path, victim: Path) -> None:
    """One that leads to it over a link of one's own is neither."""
    link, over = shared / "results.json", shared / "over.json"
    link.symlink_to(victim)
    over.symlink_to(link)
    os.chown(link, 12345, 12345, follow_symlinks=False)
    for file in (link, over):
        for write in (partial(write_file, data=b"new"), partial(append, data=b"new"), require_writable, open_in_place):
            with pytest.raises(ConfigError, match="is a link of another user"):
                write(file)
    assert victim.read_text() == "secret"
    assert sorted(each.name for each in shared.iterdir()) == ["over.json", "results.json"]


@posix
def test_a_file_is_changed_in_place(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    assert [append(file, b"one\n"), append(file, b"two\n")] == [0, 4]
    with open_in_place(file) as lines:
        assert lines.readline() == b"one\n"
        lines.truncate(4)
        lines.write(b"three")
    assert file.read_bytes() == b"one\nthree"


@posix
@pytest.mark.parametrize("write", [write_file, append])
def test_a_full_disk_is_told(tmp_path: Path, write: Callable[[Path, bytes], Any]) -> None:
    file = tmp_path / "a"
    write_file(file, "kept")
    with limited(100), pytest.raises(OutputError, match=f"{file} cannot be written: File too large"):
        write(file, bytes(1000))
    assert file.read_bytes()[:4] == b"kept"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Another process writes a file meanwhile."""
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()

    def hold() -> None:
        with locked(file):
            ready.set()
            done.wait(60)

    other = context.Process(target=hold)
    other.start()
    assert ready.wait(60)
    try:
        yield
    finally:
        done.set()
        other.join(60)


def test_two_processes_do_not_write_one_file(
    cocoa: Cocoa, loads: list[Any], data: dict[str, Path], tmp_path: Path
) -> None:
    """A command says so before it loads the model."""
    calibrator, file, record = fitted(), tmp_path / "risk.json", tmp_path / "study" / "signal.json"
    record.parent.mkdir()
    before = sorted(tmp_path.iterdir())
    with held(file), held(record):
        with pytest.raises(ConfigError, match="another process is using"):
            calibrator.save(file)
        with pytest.raises(ConfigError, match="another process is using"), reserved(file, overwrite=False):
            pass
        for command, out, written in (("signal", record.parent, record), ("calibrate", file, file)):
            refused = cocoa(command, "--data", data["texts"], "--out", out, "--overwrite")
            assert_refused(refused, f"another process is using {written}; wait for it")
    assert loads == list(record.parent.iterdir()) == []
    assert sorted(tmp_path.iterdir()) == before
    with reserved(file, overwrite=False):
        calibrator.save(file)
    assert RiskCalibrator.load(file) == calibrator
    assert sorted(tmp_path.iterdir()) == sorted([*before, file])


WRITES = re.compile(
    r"write_text\(|write_bytes\(|ParquetWriter\(|save_pretrained\(|savetxt\(|\.to_csv\(|\.to_parquet\("
    r"|\b(?:torch|np|numpy|pickle|image)\.(?:save\w*|dump)\(|savefig\((?!draft)|write_table\(.*(?<!draft)\)"
    r"|\bopen\([^)\n]*[\"'](?:[wax]b?\+?|rb?\+)[\"']"
)
OTHER_WRITERS = {
    "cocoa_engine/cli/app.py": "a missing stdout or stderr becomes /dev/null",
    "cocoa_engine/confined.py": "/proc",
    "cocoa_engine/rendering/plot.py": "into memory",
}


def test_files_are_written_by_output_files_alone() -> None:
    """Other ways leave half a file after an interruption."""
    root = Path(__file__).parents[2]
    paths = [path for package in ("cocoa_engine", "cocoa_integrations") for path in (root / package).rglob("*.py")]
    found = {path.relative_to(root).as_posix() for path in paths if WRITES.search(path.read_text(encoding="utf-8"))}
    assert found - {"cocoa_engine/files.py"} == set(OTHER_WRITERS)


@pytest.mark.parametrize(
    ("command", "there", "words"),
    [
        ("score --rows {texts} --out {texts}", "texts.jsonl", "name a new file"),
        ("score --rows {texts} --out {link}", "texts.jsonl", "name a new file"),
        ("ask Hello --raw --svg {out} --html {out}", "new", "name a new file"),
        ("signal --data {texts} --out {folder}", "signal.json", "--overwrite"),
        ("signal --data {texts} --out {folder}", "auroc-span.svg", "--overwrite"),
        ("calibrate --data {texts} --out {out}", "out.json", "--overwrite"),
        ("calibrate --data {texts} --out {out}", "out-span.svg", "--overwrite"),
        ("heads --out {out}", "out.json", "--overwrite"),
    ],
)
def test_what_is_there_is_not_overwritten(
    cocoa: Cocoa, loads: list[Any], data: dict[str, Path], tmp_path: Path, command: str, there: str, words: str
) -> None:
    file, link = tmp_path / there, tmp_path / "link"
    if not file.exists():
        file.write_text("kept")
    before = file.read_text()
    link.symlink_to(data["texts"])
    places = {**data, "folder": tmp_path, "out": tmp_path / "out.json", "link": link}
    assert_refused(cocoa(*(word.format(**places) for word in command.split())), words)
    assert file.read_text() == before
    assert loads == []


@pytest.mark.parametrize("json_output", [False, True])
def test_ctrl_c_keeps_the_spans_so_far(cocoa: Cocoa, tmp_path: Path, json_output: bool, monkeypatch: Any) -> None:
    whole = Generation.model_validate_json(cocoa(*ASK, "--json").stdout)
    press_ctrl_c(monkeypatch, SpanStream, "__next__", 2)
    page = tmp_path / "page.html"
    result = cocoa(*ASK, "--html", page, *(["--json"] if json_output else []))
    assert result.exit_code == 130
    assert result.stdout == ("" if json_output else f"{whole.spans[0].text}\n")
    assert "no file was written" in result.stderr
    assert ("no JSON is printed" if json_output else "1 spans were decoded") in result.stderr
    assert result.stderr.endswith("cocoa: interrupted\n")
    assert not page.exists()


def test_the_model_is_an_option_and_an_argument(cocoa: Cocoa, loads: list[Any]) -> None:
    for arguments in (
        ("info", "a"),
        ("info", "--model", "a"),
        ("info", "a", "--model", "a"),
        (*ASK[:2], "a", *ASK[2:]),
        (*ASK, "--model", "a"),
        ("score", "a", "--prompt", "x", "--text", "y"),
        ("bench", "a", "--tokens", "4", "--rounds", "1", "--prompt", "x"),
    ):
        successful(cocoa(*arguments))
        assert loads.pop()[0] == "a", arguments
    assert_refused(cocoa("info", "a", "--model", "b"), "two models are given: --model b and the argument 'a'")
    assert loads == []


@pytest.mark.slow
def test_a_fit_that_is_worth_nothing_is_said() -> None:
    good = risk(labelled_items(signal=2.0), folds=2).validation
    assert verdict(good, "span").finding == "holds"
    useless = risk(labelled_items(signal=0.0, seed=3), folds=2).validation
    assert useless.auroc.low <= 0.5
    assert verdict(useless, "span").finding == "chance"
    assert "no better than chance here: AUROC" in verdict(useless, "span").sentence
    elsewhere = good.model_copy(update={"brier": good.brier_of_base_rate + 0.01})
    assert verdict(elsewhere, "answer").finding == "ranks"
    assert "ranks but is not calibrated here" in verdict(elsewhere, "answer").sentence


def test_strict_calibration_exits_with_1(cocoa: Cocoa, tmp_path: Path, engine: CocoaEngine) -> None:
    """The labels have nothing to do with the texts."""
    rows = [
        {"prompt": f"Question {number}:", "text": "yes, no, so.", "spans": [[0, 3]] if number % 2 else [[8, 10]]}
        for number in range(24)
    ]
    data, out = tmp_path / "labelled.jsonl", tmp_path / "risk.json"
    data.write_text("\n".join(json.dumps({"id": str(number), **row}) for number, row in enumerate(rows)))
    options = ("calibrate", "--data", str(data), "--folds", "2", "--draws", "20", "--level", "span")
    result = cocoa(*options, "--out", str(out), "--strict")
    poor = "do not rely on it" in result.stderr
    assert result.exit_code == int(poor), result.output
    checked = successful(cocoa(*options, "--check", str(out)))
    last = " ".join(checked.stdout.split()).rpartition("Verdict: ")[2]
    assert last.startswith("the risk of spans ")
    found = json.loads(cocoa(*options, "--check", str(out), "--json").stdout)["span"]["verdict"]
    strict = cocoa(*options, "--check", str(out), "--strict")
    assert strict.exit_code == (0 if found == "holds" else 1)


@contextmanager
def read_to_its_end(pipe: Path) -> Iterator[list[bytes]]:
    """A reader of a pipe. What it has read, up to the end, is in the list after the block."""
    read: list[bytes] = []
    reader = start(pipe.read_bytes, read)
    yield read
    join([reader])


def within_limit(work: Callable[[], Any]) -> Any:
    """What a call returns that must not wait for anybody."""
    [done] = together([partial(outcome, work)])
    return done


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    file = tmp_path / "pipe.jsonl"
    os.mkfifo(file)
    return file


@posix
def test_a_pipe_is_not_opened_before_it_is_written(pipe: Path, tmp_path: Path) -> None:
    """Its reader would see an end; without a reader, opening waits for one."""
    assert within_limit(lambda: require_writable(pipe)) is None
    with read_to_its_end(pipe) as read:
        require_writable(pipe)
        with reserved(pipe, overwrite=False):
            write_file(pipe, "text")
    assert read == [b"text"]
    assert [each.name for each in tmp_path.iterdir()] == ["pipe.jsonl"]
    assert pipe.is_fifo()
    # a file that grows is no pipe
    for work in (lambda: append(pipe, b"x"), lambda: open_in_place(pipe)):
        assert isinstance(within_limit(work), ConfigError)


@posix
def test_a_device_is_written_to_and_a_folder_and_a_socket_are_refused(tmp_path: Path) -> None:
    require_writable(Path(os.devnull))
    write_file(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for error, work in (
            (ConfigError, lambda: require_writable(tmp_path)),
            (OutputError, lambda: write_file(tmp_path, "text")),
            (OutputError, lambda: write_file(tmp_path / "socket", "text")),
        ):
            with pytest.raises(error, match="cannot be written"):
                work()


@posix
def test_a_reader_who_leaves_is_told(pipe: Path) -> None:
    def write() -> None:
        with draft_of(pipe) as draft:
            os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
            os.close(reader)
            draft.write(b"x" * 10**6)

    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OutputError, match="Broken pipe"):
        write()


def write_in_a_process(file: str, **options: Any) -> bytes:
    """What a program prints that writes a file between two lines."""
    program = f"""from pathlib import Path
from cocoa_engine.files import *
print("first", flush=True)
require_writable(file := Path({file!r}))
with locked(file): write_file(file, "text")
print("last")"""
    options = {"stdout": subprocess.PIPE, **options}
    done = subprocess.run([sys.executable, "-c", program], timeout=LIMIT, check=True, **options)
    return done.stdout or b""


@pytest.mark.slow
@posix
@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="there is no /dev/stdout")
def test_the_standard_output_and_descriptors_are_written_wherever_they_lead(tmp_path: Path, pipe: Path) -> None:
    """To a pipe, a socket, a file that has lines already, and one that was removed."""
    whole = b"first\ntextlast\n"
    assert write_in_a_process("/dev/stdout") == whole
    with (tmp_path / "out").open("w+b") as out:
        out.write(b"before\n")
        out.flush()
        write_in_a_process("/dev/stdout", stdout=out)
        assert (tmp_path / "out").read_bytes() == b"before\n" + whole
        (tmp_path / "out").unlink()
        write_in_a_process("/dev/stdout", stdout=out)
        assert not (tmp_path / "out").exists()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        write_in_a_process("/dev/stdout", stdout=theirs)
        assert ours.recv(100) == whole
    if Path("/dev/fd").exists():
        read, write = os.pipe()  # as of `>(process substitution)` and `3>file` in a shell
        write_in_a_process(f"/dev/fd/{write}", pass_fds=[write])
        os.close(write)
        with open(read, "rb") as pipe:
            assert pipe.read() == b"text"


@posix
def test_rows_are_scored_into_a_pipe(cocoa: Cocoa, data: dict[str, Path], pipe: Path, tmp_path: Path) -> None:
    with read_to_its_end(pipe) as read:
        result = cocoa("score", "--rows", data["texts"], "--out", pipe)
    assert result.exit_code == 0, result.output
    assert len([json.loads(line) for line in read[0].splitlines()]) == 24
    assert "is replaced" not in result.output
    os.mkfifo(tmp_path / "rows.parquet")
    refused = within_limit(lambda: cocoa("score", "--rows", data["texts"], "--out", tmp_path / "rows.parquet"))
    assert_refused(refused, "to which Parquet cannot be written")
