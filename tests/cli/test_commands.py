"""``cocoa score`` of texts and of rows, ``cocoa info``, ``cocoa bench``, the command as a process, and bad input."""

import codecs
import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaConfig, CocoaEngine, DataError, Generation, ModelInfo, __version__
from cocoa_engine.cli.app import app
from cocoa_engine.cli.options import LoadOptions, commands, with_options
from cocoa_engine.cli.score import risk_of_row, score_rows, scored_row
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, ScoredHead
from cocoa_engine.rendering.wording import NOT_CALIBRATED
from tests.helpers.cocoa import Cocoa, assert_refused, press_ctrl_c, successful
from tests.helpers.made_up_answers import generation
from tests.helpers.processes import LIMIT, run

PROMPT, TEXT = "The capital of France is", " Paris."
COCOA = [sys.executable, "-m", "cocoa_engine.cli"]


def test_score_json_is_the_engines_with_the_claims_of_the_divided_text(cocoa: Cocoa, engine: CocoaEngine) -> None:
    result = cocoa("score", "--prompt", PROMPT, "--text", TEXT, "--alpha", "1", "--json")
    assert Generation.model_validate_json(result.stdout) == engine.score(PROMPT, TEXT, alpha=1.0)
    text = " Paris, on the Seine. It is old."
    shown = json.loads(cocoa("score", "--prompt", PROMPT, "--text", text, "--json").stdout)
    divided = engine.score(PROMPT, text, divide=True)
    assert shown["verdict"] == divided.verdict
    units = {"check": divided.check_these(), "claims": divided.claims, "sentences": divided.sentences}
    for name, found in units.items():
        assert shown[name] == [unit.model_dump(mode="json", exclude={"spans"}) for unit in found]
    assert len({claim["risk"] for claim in shown["claims"]}) > 1
    by_dola = json.loads(cocoa("score", "--prompt", PROMPT, "--text", text, "--method", "dola", "--json").stdout)
    assert {claim["risk"] for claim in by_dola["claims"]} == {by_dola["spans"][0]["risk"]}


def test_every_number_among_the_options_has_bounds() -> None:
    found = {}
    for command, entry in commands().items():
        for name, parameter in inspect.signature(entry.load(), eval_str=True).parameters.items():
            kind, *about = get_args(parameter.annotation) or (None,)
            if {int, float} & {kind, *get_args(kind)}:
                found[command, name] = [about[0].min, about[0].max]
    unbounded = {key for key, bounds in found.items() if None in bounds}
    assert unbounded == {("eval", "shuffle")}  # any number seeds Python's generator
    assert {("serve", "max_n"), ("signal", "draws"), ("score", "threads"), ("score", "num_gpus")} <= found.keys()


def test_a_setting_without_a_description_has_an_option_without_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions are read from the source, which a frozen program does not have."""
    for name in ("gamma", "stop", "max_risk"):
        monkeypatch.setattr(CocoaConfig.model_fields[name], "description", None)

    @with_options("gamma", "stop", "max_risk")
    def command(config: CocoaConfig) -> None: ...

    options = [get_args(each.annotation)[-1].help for each in inspect.signature(command).parameters.values()]
    assert options == [r"\[default: 0.3]", "Repeatable.", ""]


def test_score_shows_every_figure(cocoa: Cocoa, engine: CocoaEngine) -> None:
    span = engine.score(PROMPT, TEXT, span_log_prob="mean").spans[0]
    result = cocoa("score", "--prompt", PROMPT, "--text", TEXT, "--span-log-prob", "mean")
    divided = engine.score(PROMPT, TEXT, span_log_prob="mean", divide=True)
    assert " ".join(result.stdout.split()).startswith(divided.verdict)
    assert result.stdout.count("\n1. ") == bool(divided.check_these())
    rows = {line[:16].strip(): line[16:].split() for line in result.stdout.splitlines()}
    assert rows["log p"][:4] == [f"{span.log_prob:.4f}", "mean", "over", str(len(span.token_ids))]
    assert rows["self-information"][0] == f"{-span.log_prob:.4f}"
    assert rows["ConMLDS"][0] == f"{span.con_mlds:.4f}"
    assert rows["fMLDS"][0] == f"{span.f_mlds:.4f}"
    assert rows["score"][:2] == [f"{span.score:.4f}", "cocoa-sig,"]


def test_score_of_several_texts(cocoa: Cocoa, engine: CocoaEngine) -> None:
    texts = [TEXT, " Berlin.", "\n"]
    options = ["--prompt", PROMPT, *(part for text in texts for part in ("--text", text))]
    expected = engine.score(PROMPT, texts)
    shown = json.loads(cocoa("score", *options, "--json").stdout)
    assert [Generation.model_validate(one) for one in shown] == expected
    heading, *rows = (line.split() for line in cocoa("score", *options).stdout.splitlines())
    assert all(one["verdict"] and len(one["claims"]) <= 1 for one in shown)
    assert heading == ["text", "risk", "tokens", "log", "p", "ConMLDS", "fMLDS", "score"]
    assert [row[0] for row in rows] == ["␣Paris.", "␣Berlin.", "\\n"]
    for row, scored in zip(rows, expected, strict=True):
        (span,) = scored.spans
        assert row[1] == f"{span.risk:.4f}"
        assert row[2:5] == [str(len(span.token_ids)), f"{span.log_prob:.4f}", f"{span.con_mlds:.4f}"]
        assert row[5:] == [f"{span.f_mlds:.4f}", f"{span.score:.4f}"]


def test_info_shows_what_was_asked_for_and_json_is_the_engines(
    cocoa: Cocoa, loads: list[tuple[str | None, object]], engine: CocoaEngine
) -> None:
    result = cocoa("info", "some/model", "--no-color")
    assert [model for model, _ in loads] == ["some/model"]
    rows = {line[:17].strip(): line[17:].strip() for line in result.stdout.splitlines()}
    assert rows["num layers"] == "30"
    assert rows["middle layers"] == "10..20"
    assert rows["has chat template"] == "yes"
    assert rows["backend"] == "shared_cache"
    assert (rows["native obstacle"] == "none") == (engine.info().native_obstacle is None)
    assert "unknown" not in rows.values()
    assert ModelInfo.model_validate_json(cocoa("info", "--json").stdout) == engine.info()


def test_heads_of_the_model_that_was_named(
    cocoa: Cocoa, loads: list[tuple[str | None, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = RetrievalHeads(
        model_name="m\x1b[31m", num_layers=1, num_heads=1, samples=1, heads=[ScoredHead(layer=0, head=0, score=0.5)]
    )
    monkeypatch.setattr("cocoa_engine.lab.heads.find_retrieval_heads", lambda *_, **__: found)
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "cache"))
    result = successful(cocoa("heads", "some/model", "--prompts", "0", "--out", str(tmp_path / "heads.json")))
    assert [model for model, _ in loads] == ["some/model"]
    assert RetrievalHeads.model_validate_json((tmp_path / "heads.json").read_text()) == found
    (kept,) = (tmp_path / "cache" / "heads").glob("*.json")
    assert RetrievalHeads.model_validate_json(kept.read_text()) == found
    shown = "".join(result.stdout.split())  # lines are wrapped
    assert f"Writtento{kept}.Enginesofthismodeluseitfromnowon." in shown
    assert result.stdout.startswith("1 heads of m␛[31m, 1 facts recalled; best: 0.0 (0.50)\n")
    (tmp_path / "file").touch()
    monkeypatch.setenv("COCOA_CACHE_DIR", str(tmp_path / "file"))
    search = Mock(return_value=found)
    monkeypatch.setattr("cocoa_engine.lab.heads.find_retrieval_heads", search)
    assert_refused(cocoa("heads", "some/model", "--prompts", "0"), "Set COCOA_CACHE_DIR")
    search.assert_not_called()
    out = tmp_path / "other.json"
    result = successful(cocoa("heads", "some/model", "--prompts", "0", "--out", str(out)))
    assert "Pass the file as --decore-heads" in result.stderr.replace("\n", " ")
    assert RetrievalHeads.model_validate_json(out.read_text()) == found


def test_version_and_help(cocoa: Cocoa) -> None:
    assert cocoa("--version").stdout == f"cocoa {__version__}\n"
    assert cocoa().stdout == cocoa("--help").stdout
    for command in ("ask", "chat", "score", "info", "bench"):
        assert command in cocoa().stdout
    assert cocoa("aks").exit_code == 2


def test_a_command_that_cannot_be_loaded_fails_alone(
    cocoa: Cocoa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[cocoa.commands]\nbroken = no_such_module:command\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    commands.cache_clear()
    try:
        shown, failed = cocoa("--help"), cocoa("broken")
    finally:
        commands.cache_clear()
    assert shown.exit_code == 0
    assert "eval" in shown.stdout
    assert "(cannot be loaded)" in shown.stdout
    assert_refused(failed, "no_such_module")


def test_every_command_takes_the_model_in_both_ways() -> None:
    for name, entry in commands().items():
        if name != "judge":
            assert {"model", "positional_model"} <= inspect.signature(entry.load()).parameters.keys(), name


def test_help_and_settings_need_no_torch() -> None:
    heavy = {"torch", "transformers", "cocoa_integrations", "lm_eval", "datasets", "ray"}
    code = f"import sys, cocoa_engine.cli.app; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert run([sys.executable, "-c", code]).returncode == 0


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen([*COCOA, "ask", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(LIMIT) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "redirection", "code", "message"),
    [
        (["ask"], "<&-", 2, "there is no question"),
        (["ask", "Hi", "--svg", "/no/such/folder/x.svg"], "</dev/null", 2, "cannot be written"),
        (["--version"], ">&-", 0, ""),
        (["--version"], ">/dev/full", 2, "the output cannot be written"),
        (["ask", "Hi", "--svg", "/no/such/folder/x.svg"], "</dev/null 2>/dev/full", 2, ""),
    ],
)
def test_from_a_shell(arguments: list[str], redirection: str, code: int, message: str) -> None:
    """One line on stderr at the most, also where the shell closed a stream; progress apart."""
    command = shlex.join([sys.executable, "-m", "cocoa_engine.cli", *arguments])
    done = run(["sh", "-c", f"{command} {redirection}"])
    assert done.returncode == code
    assert message in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.endswith(" so far")]
    assert len(lines) == (1 if message else 0)


def test_an_option_of_the_command_s_own_may_be_called_like_a_setting() -> None:
    seen = []

    @with_options("alpha")
    def command(config: CocoaConfig, loading: LoadOptions, seed: int = 0) -> None:
        seen.append((config.alpha, config.seed, seed))

    own = typer.Typer()
    own.command()(command)
    result = CliRunner().invoke(own, ["--alpha", "1", "--seed", "3"])
    assert (result.exit_code, seen) == (0, [(1.0, CocoaConfig().seed, 3)])


ROWS: list[Any] = [
    {"id": 7, "prompt": "abc def", "text": " ghi jkl mno.", "source": "abc"},
    {"prompt": "abc", "text": ""},
    {"prompt": "abc"},
    ["no object"],
    {"prompt": "abc", "text": " ghi", "source": "not in it"},
]


def test_rows_keep_what_they_have_and_their_errors(tiny: CocoaEngine, tmp_path: Path) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    earlier = {"risk": {}, "error": "row 9", "size": float("nan"), "length": 0.5}  # of a file that was scored before
    lines = [json.dumps({**earlier, **row} if isinstance(row, dict) else row) for row in ROWS]
    lines[0] = lines[0].replace("NaN", "1e999")
    given.write_text("\n".join([*lines, "", "{broken"]), encoding="utf-8")
    assert score_rows(tiny, given, out, CocoaConfig()) == (5, 6)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 6
    first = rows[0]
    assert {key: first[key] for key in first if key != "risk"} == {**ROWS[0], "size": None, "length": 0.5}
    scored = tiny.score("abc def", " ghi jkl mno.", divide=True, source=["abc"])
    assert first["risk"] == risk_of_row(scored)
    risk = first["risk"]
    assert risk["verdict"].endswith(NOT_CALIBRATED)
    assert (risk["max_risk"], risk["threshold"], risk["out_of_domain"]) == (scored.max_risk, scored.threshold, False)
    attention = [span.source_attention for span in scored.spans if span.text.strip()]
    assert risk["source_attention"] == pytest.approx(sum(attention) / len(attention))
    passage = [span.passage_attention[0] for span in scored.spans if span.text.strip()]
    assert risk["passage_attention"] == pytest.approx(sum(passage) / len(passage))
    without = risk_of_row(tiny.score("abc def", " ghi jkl mno.", divide=True))
    assert without["passage_attention"] is None
    assert without["max_risk"] > 0
    assert first["risk"]["sentences"][0]["end"] == len(" ghi jkl mno.")
    for number, (row, message) in enumerate(
        zip(rows[1:], ("empty", "text: ", "not a JSON object", "not in it", ""), strict=True), start=2
    ):
        assert row["error"].startswith(f"row {number}: ")
        assert message in row["error"]
        assert "risk" not in row
    for values, row in zip(ROWS[1:], rows[1:], strict=False):
        others = {**values, "size": None, "length": 0.5} if isinstance(values, dict) else {}
        assert row == {**others, "error": row["error"]}


def test_a_row_that_is_nested_too_deeply_keeps_its_error_only(tiny: CocoaEngine) -> None:
    lines = {}
    for depth in range(800, 1000):
        row = f'{{"prompt": "p", "text": "", "deep": {"[" * depth}{"]" * depth}}}'
        lines[depth], has_error = scored_row(tiny, 1, row, CocoaConfig())
        assert has_error
    kept = {"deep" in json.loads(line) for line in lines.values()}
    assert kept == {True, False}


@pytest.mark.parametrize("method", ["dola", "diver"])
def test_a_method_that_divides_no_text_scores_it_as_one_span(tiny: CocoaEngine, tmp_path: Path, method: Any) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps(ROWS[0]), encoding="utf-8")
    assert score_rows(tiny, given, out, CocoaConfig(method=method)) == (0, 1)
    scored = tiny.score("abc def", " ghi jkl mno.", method=method, source=["abc"])
    assert json.loads(out.read_text(encoding="utf-8"))["risk"] == risk_of_row(scored)


def test_values_are_valid_json() -> None:
    risky = generation(("Rome", float("nan")), (" is old", 0.2))
    json.dumps(risk_of_row(risky), allow_nan=False)
    assert risk_of_row(risky)["check"][0]["text"] == "Rome"
    assert risk_of_row(risky)["max_risk"] is None


def test_a_file_without_rows_is_refused(tiny: CocoaEngine, tmp_path: Path) -> None:
    empty = tmp_path / "in.jsonl"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        score_rows(tiny, tmp_path / "none.jsonl", tmp_path / "out.jsonl", CocoaConfig())
    with pytest.raises(DataError, match="no rows"):
        score_rows(tiny, empty, tmp_path / "out.jsonl", CocoaConfig())


def test_the_command(cocoa: Cocoa, engine: CocoaEngine, tmp_path: Path) -> None:
    given, out, page = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "page.html"
    row = {"prompt": "The capital of France is", "text": " Paris, on the Seine."}
    given.write_text(json.dumps(row) + "\n{}\n", encoding="utf-8")
    result = successful(cocoa("score", f"--rows={given}", "--out", str(out)))
    assert "2 rows written" in result.stderr
    assert "1 of them with an error" in result.stderr
    scored = json.loads(out.read_text(encoding="utf-8").splitlines()[0])
    assert {"Paris", "Seine"} >= {one["text"] for one in scored["risk"]["check"]}
    result = successful(cocoa("score", "--prompt", row["prompt"], "--text", row["text"], "--html", str(page)))
    html = page.read_text(encoding="utf-8")
    assert 'class="cocoa-verdict"' in html
    assert "Seine" in html
    by_dola = cocoa("score", "--method", "dola", "--prompt", PROMPT, "--text", TEXT, "--html", str(page))
    assert by_dola.exit_code == 0, by_dola.stderr  # a method that divides no text
    assert "Paris" in page.read_text(encoding="utf-8")


TINY = ["--tokens", "4", "--rounds", "2", "--prompt", "Name a river.", "--prompt", "Who wrote Dune?"]
DECODERS = ["HF generate, greedy", "greedy", "cocoa-sig"]


def test_bench_json_has_every_figure(tiny_cocoa: Cocoa) -> None:
    result = successful(tiny_cocoa("bench", *TINY, "--json"))
    record = json.loads(result.stdout)
    assert (record["tokens"], record["prompts"], record["rounds"], record["base"]) == (4, 2, 2, DECODERS[0])
    assert record["model"] == "tiny"
    assert record["machine"]["torch"]
    assert list(record["decoders"]) == DECODERS
    for name, decoder in record["decoders"].items():
        assert len(decoder["seconds_per_token"]) == 2
        assert all(seconds > 0 for seconds in decoder["seconds_per_token"])
        assert decoder["ratio"]["lowest"] <= decoder["ratio"]["median"] <= decoder["ratio"]["highest"]
        assert bool(decoder["per_kept_token"]) == (name != DECODERS[0])
    assert record["decoders"][DECODERS[0]]["ratio"] == {"median": 1, "lowest": 1, "highest": 1}
    assert record["decoders"]["greedy"]["per_kept_token"]["risk_points"] == 0


def test_a_width_that_is_not_known(cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "threshold" in successful(cocoa("--help")).stdout


def test_bench_table_and_line(tiny_cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = successful(tiny_cocoa("bench", *TINY, "--no-color"))
    title, headings, *rows = result.stdout.splitlines()
    assert title.strip() == "Per kept token, median (prompts: 2, new tokens: 4, rounds: 2)"
    assert headings.split()[:4] == ["decoder", "ms", "ratio", "lowest-highest"]
    assert [row[:20].strip() for row in rows[:3]] == DECODERS
    assert "torch" in " ".join(rows[3:])
    assert max(map(len, result.stdout.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "40")
    assert "…" not in successful(tiny_cocoa("bench", *TINY, "--no-color")).stdout


WARM_UP, ROUND = 2, 4  # answers of the engine: of two methods, to one prompt and to two


@pytest.mark.parametrize(("answer", "options"), [(3, ["--json"]), (3, ["--no-color"]), (0, [])])
def test_ctrl_c_keeps_the_finished_rounds(
    tiny_cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch, answer: int, options: list[str]
) -> None:
    """It is pressed in one of the answers after the first round, or in its last one."""
    press_ctrl_c(monkeypatch, CocoaEngine, "generate", WARM_UP + ROUND + answer)
    result = tiny_cocoa("bench", *TINY, *options)
    words = "1 of 2 rounds were finished; the output is of these" if answer else "no round was finished"
    assert (result.exit_code, result.stderr) == (130, f"cocoa: {words}\ncocoa: interrupted\n")
    if options == ["--json"]:
        record = json.loads(result.stdout)
        assert record["rounds"] == 2
        assert {len(one["seconds_per_token"]) for one in record["decoders"].values()} == {1}
    elif answer:
        title, _, *rows = result.stdout.splitlines()
        assert title.strip().endswith("rounds: 1 of 2, incomplete)")
        assert [row[:20].strip() for row in rows[:3]] == DECODERS
    else:
        assert result.stdout == ""


def test_bench_of_other_methods(tiny_cocoa: Cocoa) -> None:
    result = successful(tiny_cocoa("bench", *TINY, "--methods", "dola, greedy", "--dola-layers", "low", "--json"))
    assert list(json.loads(result.stdout)["decoders"]) == [DECODERS[0], "dola", "greedy"]


UNWRITABLE, DATA = "/no/such/folder/x cannot be written", "--data {answers}"
MANY = ",".join(["1"] * 101)
REFUSED = {
    "alpha": ["ask Who? --alpha -1", "ask Who? --alpha much", "ask Who? --alpha nan"],
    "gamma": ["ask Who? --gamma 0"],
    "did you mean 'cocoa-sig'": ["ask Who? --method cocoasig", "compare Who? --methods greedy,cocoasig"],
    "metric": ["ask Who? --metric g_mlds"],
    "m < n": ["ask Who? --middle-layers 9,3"],
    "middle_layers": ["ask Who? --middle-layers 9"],
    "--system": ["ask Who? --raw --system 'Be brief.'", "compare Who? --raw --system 'Be brief.'"],
    UNWRITABLE: ["ask Who? --svg /no/such/folder/x"],
    f"--html {UNWRITABLE}": [f"{command} Who? --html /no/such/folder/x" for command in ("ask", "compare")],
    "--threads": ["ask Who? --threads 0", "bench --threads 0"],
    "--colour": ["ask Who? --colour"],
    "unexpected extra argument": ["ask Who? too many"],
    "is empty": ["ask Who? --source {empty}", "score --prompt a --text b --source {empty}"],
    "cannot be read": ["ask Who? --source missing.txt", "score --prompt a --text b --source missing.txt"],
    "a number in [0, 1], or auto": [f"ask Who? --fail-on-risk {value}" for value in ("1.5", "-1", "nan", "high")],
    "raw MLDS": ["ask Who? --fail-on-risk 0.5 --risk f_mlds"],
    "two or more different methods": [f"compare Who? --methods {methods}" for methods in ("greedy", "greedy,greedy")],
    "method": ["compare Who? --methods greedy,", "bench --methods nope"],
    "--methods": ["bench --methods ,"],
    "--tokens": ["bench --tokens 1"],
    "--rounds": ["bench --rounds 0"],
    "--prompt": ["bench --prompt ' '"],
    "--no-such": ["bench --no-such"],
    "two": ["bench one two"],
    "--text": ["score --prompt a"],
    "--rows": [
        *("score --text a", "score --rows {answers}", "score --out {answers}"),
        "score --rows {answers} --out {answers}x --json",
    ],
    "whole numbers from 1 to 10000000": [
        f"heads --lengths {lengths}" for lengths in ("1000000000", "256,0", "x", "''", MANY)
    ],
    "no file or folder none.csv": ["signal --data none.csv --out o"],
    "cannot be written to": [f"signal {DATA} --out {{answers}}/x"],
    "unknown format 'xls'": [f"signal {DATA} --format xls --out o"],
    "--out": [f"signal {DATA}"],
    "give one of them": [f"calibrate {DATA} --out r --recall 0.5 --miss 0.1"],
    "give either --out FILE to fit a calibrator, or": [f"calibrate {DATA}"],
    "a threshold cannot be chosen": [f"calibrate {DATA} --check embedded --miss 0.1"],
    "must be above 0 and below 1": [f"calibrate {DATA} --out r --miss 0"],
    "not a calibrator": [f"calibrate {DATA} --check {{answers}}"],
    "give --data PATH": ["calibrate --out r"],
    "leave out --self": ["calibrate --self --out r --probe"],
    "leave out --level answer": ["calibrate --self --out r --level answer"],
    "nor a probe fitted": [f"calibrate {DATA} --check embedded --probe"],
    "question": ["calibrate --questions {answers} --out r"],
    "--plot x.foo: the name must end in one of .eps": [f"calibrate {DATA} --out r --plot x.foo"],
    "must end in one of": [f"calibrate {DATA} --out r --plot x"],
}


@pytest.mark.parametrize(("command", "words"), [(command, words) for words in REFUSED for command in REFUSED[words]])
def test_bad_input_is_one_line_before_any_work(
    cocoa: Cocoa, loads: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("answers", "empty")}
    rows = [{"id": text, "prompt": "Is it?", "text": text, "label": text == "No."} for text in ("Yes.", "No.")]
    files["answers"].write_text("\n".join(map(json.dumps, rows)))
    files["empty"].write_text(" \n")
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    assert_one_line(cocoa(*(word.format(**files) for word in shlex.split(command))), words)
    assert loads == []


def test_bad_stdin(cocoa: Cocoa, loads: list[object]) -> None:
    for stdin in ("", "  \n", b"\xff\xfe\x00"):
        assert_one_line(cocoa("ask", stdin=stdin), "the question is")
    assert loads == []


@pytest.mark.parametrize("command", ["ask --json", "chat"])
def test_piped_questions_are_read_as_files_are(cocoa: Cocoa, command: str) -> None:
    question = "Où est Rome ?\n".encode()
    asked, marked = (
        cocoa(*command.split(), "--max-new-tokens", "3", stdin=mark + question) for mark in (b"", codecs.BOM_UTF8)
    )
    assert successful(marked).stdout == successful(asked).stdout
    assert_one_line(cocoa(*command.split(), stdin=codecs.BOM_UTF16 + question), "to UTF-8")


def test_bytes_that_are_no_text_are_told_in_every_locale() -> None:
    words, question = [*COCOA, "ask"], "Où est Rome ?".encode("latin-1")
    for locale in ("C", "C.UTF-8"):
        done = subprocess.run(
            words, input=question, capture_output=True, timeout=LIMIT, env=os.environ | {"LC_ALL": locale}
        )
        assert (done.returncode, done.stderr) == (2, b"cocoa: the question is not text: convert it to UTF-8 (iconv)\n")


def test_an_empty_name_of_a_model() -> None:
    assert_one_line(CliRunner().invoke(app, ["ask", "Hi", "--model", ""]), "name of the model")


def test_bad_input_that_the_engine_finds(cocoa: Cocoa, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt, text in (("The capital of France is", ""), ("", " Paris.")):
        assert_one_line(cocoa("score", "--prompt", prompt, "--text", text), "")
    assert_one_line(cocoa("ask", "Who?", "--middle-layers", "10,99"), "99")
    assert_one_line(cocoa("ask", "word " * 9000), "tokens")
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    assert_one_line(cocoa("ask", "Who?"), "--raw")


def assert_one_line(result: Result, words: str) -> None:
    assert_refused(result, words, lines=1)
    assert (result.stdout, result.stderr[:7]) == ("", "cocoa: ")
