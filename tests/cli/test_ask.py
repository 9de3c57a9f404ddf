"""``cocoa ask`` and ``cocoa compare``, and the pages that they write; ``cocoa chat``, piped and in a terminal."""

import json
import math
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import torch
from pydantic import TypeAdapter
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime
from cocoa_engine.cli.app import app
from cocoa_engine.cli.ask import TOO_RISKY
from cocoa_engine.rendering.highlights import RiskScale
from cocoa_engine.rendering.terminal import check_list
from cocoa_engine.rendering.wording import NOT_CALIBRATED, verdict
from tests.helpers.cocoa import Cocoa, assert_refused, press_ctrl_c, successful
from tests.helpers.reasoning_models import PLAIN, Says, Wavers, reasoning_engine, saying
from tests.helpers.settings import SETTINGS

QUESTION = "What is the capital of France?"
SHORT = ("--max-new-tokens", "12")


def assert_units(shown: dict[str, Any], answer: Generation) -> None:
    """JSON has what a page shows of an answer."""
    assert shown["verdict"] == answer.verdict
    for name, units in (("check", answer.check_these()), ("claims", answer.claims), ("sentences", answer.sentences)):
        assert shown[name] == [unit.model_dump(mode="json") for unit in units]


def assert_candidates(shown: str, answer: Generation) -> None:
    """The details have the score of each candidate."""
    assert answer.usage.risk_points
    assert all(f"{candidate.score:.2f} " in shown for span in answer.spans for candidate in span.candidates)


def messages(question: str, system: str | None = None) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": question}]


SKY = "Why is the sky blue?"


def expected(engine: CocoaEngine, *methods: str) -> list[Generation]:
    return [engine.chat(messages(SKY), max_new_tokens=12, method=method) for method in methods]


def test_in_a_pipe_the_bare_answer_with_its_verdict_on_stderr_or_json(cocoa: Cocoa, engine: CocoaEngine) -> None:
    answer = engine.chat(messages(QUESTION), max_new_tokens=12)
    result = cocoa("ask", QUESTION, *SHORT)
    assert (result.exit_code, result.stdout) == (0, f"{answer.text}\n")
    assert result.stderr == f"cocoa: {answer.verdict}\n"
    for place in ((), ("-",)):
        assert cocoa("ask", *place, *SHORT, stdin=QUESTION + "\n").stdout == answer.text + "\n"
    result = cocoa("ask", QUESTION, "--json", *SHORT)
    assert Generation.model_validate_json(result.stdout) == answer
    assert_units(json.loads(result.stdout), answer)
    assert answer.claims


def test_json_has_no_bare_infinity(cocoa: Cocoa, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a token that was forced: the margin to the next one has no end."""
    monkeypatch.setattr(engine.model.generation_config, "forced_eos_token_id", engine.tokenizer.eos_token_id)
    shown = cocoa("ask", QUESTION, "--json", "--max-new-tokens", "3").stdout

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    answer = json.loads(shown, parse_constant=refuse)
    assert Generation.model_validate(answer).spans[-1].token_margins[-1] == math.inf


def test_what_is_asked(cocoa: Cocoa, engine: CocoaEngine) -> None:
    """After a system message, or as a text to continue."""
    french = engine.chat(messages(QUESTION, "Answer in French."), max_new_tokens=12).text
    assert cocoa("ask", QUESTION, "--system", "Answer in French.", *SHORT).stdout == french + "\n"
    continued = engine.generate("The capital of France is", max_new_tokens=12).text
    assert cocoa("ask", "The capital of France is", "--raw", *SHORT).stdout == continued + "\n"


def test_an_answer_stops_at_a_risk(cocoa: Cocoa, engine: CocoaEngine) -> None:
    stopped = engine.chat(messages(QUESTION), max_new_tokens=12, max_risk=0.1)
    assert stopped.finish_reason == "risk"
    piped = cocoa("ask", QUESTION, "--max-risk", "0.1", *SHORT)
    assert piped.stdout == stopped.text + "\n"
    assert piped.stderr.startswith(f"cocoa: {stopped.verdict}\ncocoa: stopped: ")
    assert f"{stopped.spans[-1].risk:.3f}, reaches max_risk 0.1" in piped.stderr
    shown = cocoa("ask", QUESTION, "--max-risk", "0.1", "--details", *SHORT).stdout
    assert "stopped by max_risk." in " ".join(shown.split())
    assert cocoa("ask", QUESTION, "--max-risk", "0.1", "--json", *SHORT).stderr == ""
    assert "!]" in cocoa("ask", QUESTION, "--max-risk", "0.1", "--no-color", *SHORT).stdout


def test_every_setting_has_an_option_that_reaches_the_engine(cocoa: Cocoa) -> None:
    assert SETTINGS.keys() == CocoaConfig.model_fields.keys()
    args: list[object] = []
    for name, value in SETTINGS.items():
        args += [f"--{name.replace('_', '-')}", ",".join(map(str, value)) if isinstance(value, tuple) else value]
    result = cocoa("ask", QUESTION, "--json", *args, "--stop", "##")
    expected = CocoaConfig(**SETTINGS | {"stop": ("###", "##")})
    assert Generation.model_validate_json(result.stdout).config == expected


def test_help_names_every_setting_with_its_default(cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("TERMINAL_WIDTH", "500")
    shown = " ".join(cocoa("ask", "--help").stdout.split())
    for name, field in CocoaConfig.model_fields.items():
        assert f"--{name.replace('_', '-')} " in shown
        assert str(field.description) in shown
        if field.default not in (None, ()):
            assert f"{field.description} [default: {field.default}]" in shown


def test_loading_options_reach_the_loader(
    cocoa: Cocoa, loads: list[tuple[str | None, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    result = cocoa(
        *("ask", QUESTION, *SHORT, "--model", "some/model", "--dtype", "bfloat16", "--device-map", "cuda:0"),
        *("--threads", "3", "--forward", "modules", "--weights", "q8_0", "--allow-pickle", "--trust-remote-code"),
        *("--calibrator", "risk.json"),
    )
    assert result.exit_code == 0
    expected = {"dtype": "bfloat16", "device_map": "cuda:0", "trust_remote_code": True, "allow_pickle": True}
    expected |= {"runtime": Runtime(forward="modules", weights="q8_0"), "calibrator": "risk.json"}
    expected |= {"tokenizer_name": None, "model_kwargs": {}, "tokenizer_kwargs": {}}
    assert loads == [("some/model", expected)]
    assert threads == [3]
    cocoa("ask", QUESTION, *SHORT)
    assert loads[1][1]["calibrator"] == "auto"


def test_colour_where_there_is_some_and_marks_in_the_text_elsewhere(
    cocoa: Cocoa, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = "Who wrote Dune?"
    first = engine.chat(messages(question), max_new_tokens=12).check_these()[0]
    result = cocoa("ask", question, "--no-color", *SHORT)
    assert "\x1b" not in result.stdout
    words = " ".join(result.stdout.split())
    assert f"[{first.text}|{RiskScale().level(first.risk)}]" in words
    assert f"Check these: 1. {first.text} ({first.risk:.2f})" in words
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = cocoa("ask", question, *SHORT).stdout
    assert re.search(rf"\x1b\[[0-9;]+m{first.text}\x1b\[0m", shown)
    assert "\x1b" in cocoa("ask", QUESTION, *SHORT).stdout  # the verdict; of this answer, nothing is shaded
    monkeypatch.setenv("NO_COLOR", "1")
    shown = cocoa("ask", question, *SHORT).stdout
    assert "\x1b" not in shown
    assert f"[{first.text}|" in shown


def test_on_a_terminal_the_answer_grows(cocoa: Cocoa, engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("cocoa_engine.cli.ask.can_redraw", lambda console: True)
    answer = engine.chat(messages(QUESTION), max_new_tokens=12)
    assert len(answer.spans) > 1
    shown = cocoa("ask", QUESTION, *SHORT).stdout
    assert shown.count(answer.spans[0].text.split()[0]) > len(answer.spans)  # in every state and in the last


def test_details_and_a_picture_of_them(cocoa: Cocoa, engine: CocoaEngine, tmp_path: Path) -> None:
    picture = tmp_path / "answer.svg"
    result = cocoa("ask", SKY, "--svg", str(picture), "--details", *SHORT)
    (answer,) = expected(engine, "cocoa-sig")
    assert "Whole answer:" in result.stdout
    assert_candidates(result.stdout, answer)
    assert all(f"{one.log_prob:.2f} " in result.stdout for span in answer.spans for one in span.candidates)
    words = "".join(ElementTree.parse(picture).getroot().itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert f"cocoa ask '{SKY}'" in words
    assert "candidates" in words
    assert "#c00000" in picture.read_text()
    assert not re.search(r"url\(http|font-face", picture.read_text())


@pytest.mark.parametrize("raw", [False, True])
def test_passages_stand_before_the_question(cocoa: Cocoa, engine: CocoaEngine, tmp_path: Path, raw: bool) -> None:
    question, passages = "When was the lighthouse built?", []
    source = ["The lighthouse was built in 1874.", "The ferry leaves at nine."]
    for number, text in enumerate(source):
        (tmp_path / f"{number}.txt").write_text(f"{text}\n", encoding="utf-8")
        passages += ["--source", tmp_path / f"{number}.txt"]
    prompt = "\n\n".join([*source, question])
    answer, asked = (engine.generate, prompt) if raw else (engine.chat, messages(prompt))
    expected = answer(asked, max_new_tokens=12, source=source)
    result = cocoa("ask", question, *passages, "--json", *SHORT, *(["--raw"] if raw else []))
    assert Generation.model_validate_json(result.stdout) == expected
    assert all(len(span.passage_attention or ()) == 2 for span in expected.spans)
    if raw:
        scored = cocoa("score", "--prompt", question, "--text", " In 1874.", *passages, "--json")
        text = engine.score(prompt, " In 1874.", source=source)
        assert Generation.model_validate_json(scored.stdout) == text
    else:
        compared = cocoa("compare", question, *passages, "--methods", "cocoa-sig,greedy", "--json", *SHORT)
        assert Generation.model_validate(json.loads(compared.stdout)[0]) == expected


def test_an_unforeseen_error_is_one_line(cocoa: Cocoa, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(CocoaEngine, "stream_chat", Mock(side_effect=RuntimeError("out of\n\x1b[31mmemory")))
    result = cocoa("ask", QUESTION, "--html", tmp_path / "page.html", "--svg", tmp_path / "picture.svg")
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])  # no half of a file
    assert result.stderr == "cocoa: RuntimeError: out of ␛[31mmemory (--debug shows where)\n"
    result = cocoa("ask", QUESTION, "--debug")
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("\nRuntimeError: out of\n␛[31mmemory\n")


def test_fail_on_risk_is_an_exit_code(cocoa: Cocoa, engine: CocoaEngine) -> None:
    answer = engine.chat(messages(QUESTION), max_new_tokens=12)
    risk = answer.answer_risk
    assert 0 < risk < 1
    failed = cocoa("ask", QUESTION, *SHORT, "--fail-on-risk", str(risk / 2))
    assert failed.exit_code == TOO_RISKY == 3
    assert failed.stdout == answer.text + "\n"
    assert "--fail-on-risk" in failed.stderr
    assert cocoa("ask", QUESTION, *SHORT, "--fail-on-risk", "1").exit_code == 0
    assert answer.answer_threshold is not None
    automatic = cocoa("ask", QUESTION, *SHORT, "--fail-on-risk", "auto")
    assert automatic.exit_code == (TOO_RISKY if risk >= answer.answer_threshold else 0)
    without = cocoa("ask", QUESTION, *SHORT, "--fail-on-risk", "auto", "--calibrator", "none")
    plain = engine.without_calibrator().chat(messages(QUESTION), max_new_tokens=12)
    assert (plain.answer_risk_source, plain.answer_threshold) == ("rank", 0.9)
    assert without.exit_code == (TOO_RISKY if plain.answer_risk >= plain.answer_threshold else 0)


def test_comparison_as_json_is_the_list_of_answers_and_the_model_is_loaded_once(
    cocoa: Cocoa, engine: CocoaEngine, loads: list[object]
) -> None:
    result = cocoa("compare", SKY, "--json", "--methods", "cocoa-sig, greedy,cocoa", *SHORT)
    answers = TypeAdapter(list[Generation]).validate_json(result.stdout)
    assert answers == expected(engine, "cocoa-sig", "greedy", "cocoa")
    for shown, answer in zip(json.loads(result.stdout), answers, strict=True):
        assert_units(shown, answer)
    assert len(loads) == 1


def test_answers_stand_side_by_side(cocoa: Cocoa, engine: CocoaEngine) -> None:
    result = successful(cocoa("compare", SKY, "--details", *SHORT))
    assert result.stdout.splitlines()[0].split() == ["greedy", "cocoa-sig"]
    assert "\x1b" not in result.stdout
    greedy, cocoa_sig = expected(engine, "greedy", "cocoa-sig")
    assert ("{" in result.stdout) == (greedy.text != cocoa_sig.text)
    assert_candidates(result.stdout, cocoa_sig)


def test_page_of_a_comparison(cocoa: Cocoa, engine: CocoaEngine, tmp_path: Path) -> None:
    page = tmp_path / "answers.html"
    page.write_text("an older one")
    assert cocoa("compare", SKY, "--html", str(page), *SHORT).exit_code == 0
    greedy, cocoa_sig = expected(engine, "greedy", "cocoa-sig")
    assert page.read_text(encoding="utf-8") == greedy.to_html(compared=[cocoa_sig], title=SKY)
    result = cocoa("ask", SKY, "--html", str(page), *SHORT)
    assert result.stdout == cocoa_sig.text + "\n"
    assert f"{page} is replaced" in result.stderr.replace("\n", " ")
    assert page.read_text(encoding="utf-8") == cocoa_sig.to_html(title=SKY)


@pytest.mark.parametrize(("number", "options"), [(2, []), (2, ["--json"]), (1, [])])
def test_complete_answers_survive_an_interrupt(
    cocoa: Cocoa, engine: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, options: list[str]
) -> None:
    page = tmp_path / "page.html"
    (greedy,) = expected(engine, "greedy")
    press_ctrl_c(monkeypatch, engine, "stream_chat", number)
    compared = cocoa("compare", SKY, *SHORT, "--html", page, "--methods", "greedy,cocoa", *options)
    assert compared.exit_code == 130
    if number == 1:
        assert (compared.stdout, page.exists()) == ("", False)
        assert "no answer was complete" in compared.stderr
        return
    assert "1 of 2 answers were complete" in compared.stderr
    assert page.read_text(encoding="utf-8") == greedy.to_html(title=SKY)
    if options:
        assert TypeAdapter(list[Generation]).validate_json(compared.stdout) == [greedy]
    else:
        assert greedy.text in re.sub(r"\[(.*?)\|\d\]", r"\1", " ".join(compared.stdout.split()))


Typed = Callable[..., str]
TEXT = "Paris has 2148000 inhabitants."
USER = [{"role": "user", "content": "Who?"}]


@pytest.fixture(scope="module")
def model() -> CocoaEngine:
    return reasoning_engine(PLAIN)


@pytest.fixture
def calls(model: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces loading by a tiny model; lists the messages and the settings of each question."""
    made: list[dict[str, Any]] = []
    stream_chat = CocoaEngine.stream_chat

    def listed(engine: CocoaEngine, messages: Sequence[dict[str, str]], **options: Any) -> Any:
        made.append({"messages": list(messages), **options})
        return stream_chat(engine, messages, **options)

    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(CocoaEngine, "stream_chat", listed)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLORTERM", raising=False)
    monkeypatch.setenv("COLUMNS", "40")  # no line of a pipe is wrapped
    return made


@pytest.fixture
def chats(calls: list[dict[str, Any]]) -> Cocoa:
    """Runs ``cocoa chat`` with lines piped into it."""

    def run(*lines: str, args: Sequence[str] = SHORT) -> Result:
        return CliRunner().invoke(app, ["chat", *args], input="".join(f"{line}\n" for line in lines), prog_name="cocoa")

    return run


@pytest.fixture
def says(model: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the model answer every question with a text, or with what a processor forces."""

    def choose(text: str, processor: Says | None = None) -> None:
        stream_chat = CocoaEngine.stream_chat
        forced = saying(model, text, kind=Wavers)
        usual = forced.pop("logits_processor")
        processors = usual if processor is None else [processor]

        def chosen(engine: CocoaEngine, messages: Any, *, config: Any, **options: Any) -> Any:
            config = config.replace(**forced)
            return stream_chat(engine, messages, config=config, logits_processor=processors, **options)

        monkeypatch.setattr(CocoaEngine, "stream_chat", chosen)

    return choose


@pytest.fixture
def typed(calls: list[dict[str, Any]], terminal: Callable[..., tuple[str, str]]) -> Typed:
    """Types lines into a real terminal and returns what it shows."""
    return lambda *lines, args=SHORT, code=0: terminal("chat", *args, typed=lines, code=code, COLUMNS="300")[0]


def test_piped_questions_are_turns_of_one_chat(chats: Cocoa, model: CocoaEngine, calls: list[dict[str, Any]]) -> None:
    first = model.chat(USER, max_new_tokens=12)
    turns = [*USER, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And when?"}]
    second = model.chat(turns, max_new_tokens=12)
    result = successful(chats("Who?", "", "And when?"))
    assert [call["messages"] for call in calls] == [USER, turns]
    assert result.stdout.startswith(f"{verdict(first)}\n\n")
    assert f"\n\n{verdict(second).removesuffix(f' {NOT_CALIBRATED}')}\n\n" in result.stdout
    assert result.stdout.count(NOT_CALIBRATED) == 1
    assert second.text != first.text
    assert "\x1b" not in result.stdout


def test_settings_the_system_message_and_another_method(chats: Cocoa, calls: list[dict[str, Any]]) -> None:
    successful(chats("Who?", args=["--system", "Be brief.", "--max-new-tokens", "3", "--alpha", "1.5"]))
    assert calls[0]["messages"] == [{"role": "system", "content": "Be brief."}, *USER]
    assert (calls[0]["config"].max_new_tokens, calls[0]["config"].alpha) == (3, 1.5)
    calls.clear()
    result = chats("/method", "Who?", "/method greedy", "Who?", "/method gredy", "Who?")
    assert [call["config"].method for call in calls] == ["cocoa-sig", "greedy"]
    assert "Method: cocoa-sig. Others: greedy, cocoa, dola," in result.stdout
    assert "Method: greedy. Others: cocoa, cocoa-sig," in result.stdout
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "did you mean 'greedy'" in result.stderr


def test_why_lists_what_to_check(chats: Cocoa, model: CocoaEngine, says: Callable[..., None]) -> None:
    says(TEXT)
    expected = model.chat(USER, **saying(model, TEXT, kind=Wavers))
    result = chats("/why", "Who?", "/why", args=())
    assert result.stdout.startswith("There is no answer yet.\n")
    listed = check_list(expected.check_these()).plain
    assert "the model was unsure" in listed
    assert listed in result.stdout
    assert "|3]" in result.stdout  # the claims are marked in the text


def test_a_file_is_put_before_the_next_question_and_a_reset_forgets_it(
    chats: Cocoa, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "passage.txt"
    file.write_text("Rome is old.\n")
    result = chats("Who?", f"/source {file}", "/reset", "Who?", "/reset", "/why")
    assert [(call["messages"], call["source"]) for call in calls] == [(USER, None)] * 2
    assert result.stdout.endswith("A new chat.\n\nThere is no answer yet.\n\n")
    calls.clear()
    result = chats(f"/source {file}", "/source", f"/source {file}", "Who?", "When?", "/source no/such/file")
    assert "1 file taken back." in result.stdout
    assert f"The next question begins with {file} (12 characters)." in result.stdout
    asked = [call["messages"][-1]["content"] for call in calls]
    assert asked == ["Rome is old.\n\nWho?", "When?"]
    assert [call["source"] for call in calls] == [["Rome is old."]] * 2  # it is still in the prompt
    assert_refused(result, "no/such/file cannot be read")


def test_commands(chats: Cocoa, calls: list[dict[str, Any]]) -> None:
    helped = successful(chats("/help", "/quit", "Who?"))
    assert all(re.search(f"^{name} ", helped.stdout, re.MULTILINE) for name in ("/method", "/why", "/source", "/quit"))
    assert calls == []  # /quit ended the chat
    unknown = chats("/wyh", "Who?")
    assert (unknown.exit_code, calls) == (2, [])
    assert "did you mean '/why'" in unknown.stderr
    assert chats(" /wyh is a question").exit_code == 0
    assert calls[0]["messages"][0]["content"] == "/wyh is a question"


def test_bad_input_is_one_line(chats: Cocoa, model: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = CliRunner().invoke(app, ["chat"], input=b"\xff\xfe\n", prog_name="cocoa")
    assert (bad.exit_code, bad.stderr.count("\n")) == (2, 1)
    assert "not text" in bad.stderr
    long = chats("word " * 9000)
    assert (long.exit_code, long.stderr.count("\n")) == (2, 1)
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    assert_refused(chats("Who?"), "cocoa ask --raw")


def test_control_characters_are_shown_escaped(chats: Cocoa, says: Callable[..., None], typed: Typed) -> None:
    says("Rome\x1b[2J is\x07 old.")
    piped = chats("Who?", args=()).stdout
    assert "Rome␛" in piped
    assert "\x1b" not in piped
    shown = typed("Who?", "/why", args=())
    assert "Rome␛" in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


def test_an_answer_is_coloured_while_it_grows(typed: Typed, says: Callable[..., None]) -> None:
    says(TEXT)
    shown = typed("Who?", args=())
    whole = shown.rindex("Not calibrated")
    assert "/help lists the commands" in shown[:whole]
    assert shown[:whole].count("\x1b[") > 10  # it was redrawn
    one, two, three = (shown[:whole].index(style) for style in ("\x1b[4m", "48;5;221m", "48;5;124m"))
    assert one < two < three  # each span in the style of its level, as it comes
    assert shown[:whole].count("\x1b[4m") > 3  # and with the spans before it
    assert "48;5;124m" in shown[whole:]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is an interrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupts(Wavers):
    """Sends a signal, by default Ctrl-C, in the middle of a forward pass, once, after eight tokens."""

    pressed = False
    number = signal.SIGINT

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self._prompt_length is not None
        if input_ids.shape[1] - self._prompt_length >= 8 and not Interrupts.pressed:
            Interrupts.pressed = True
            signal.raise_signal(self.number)
        return super().__call__(input_ids, scores)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    typed: Typed, says: Callable[..., None], model: CocoaEngine, calls: list[dict[str, Any]]
) -> None:
    Interrupts.pressed = False
    says(TEXT, Interrupts(model, TEXT))
    shown = typed("Who?", "/why", "And when?", args=())
    stopped = re.search(r"Stopped after (\d) spans\.", shown)
    assert stopped
    kept = calls[1]["messages"][1]["content"]
    assert TEXT.startswith(kept)
    assert 0 < len(kept) < len(TEXT)
    assert "Check these" in shown  # of the part that was decoded
    assert "inhabitants" in shown[stopped.end() :]  # the next answer is complete
    assert model.session.scheduler.running == 0


def test_in_a_terminal_an_error_does_not_end_the_chat(
    typed: Typed, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("word " * 900)
    shown = typed("/method gredy", "/wyh", f"/source {tmp_path / 'long.txt'}", "Who?", "/source", "Who?")
    assert shown.count("cocoa: ") == 3
    assert "context window" in shown
    assert calls[-1]["messages"] == USER  # the question that was too long is not kept
    assert "Not calibrated" in shown


@pytest.mark.parametrize("answers", [True, False])
def test_sigterm_ends_the_chat(
    typed: Typed, says: Callable[..., None], model: CocoaEngine, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """While it answers, and while it waits for a question."""
    monkeypatch.setattr(Interrupts, "pressed", False)
    monkeypatch.setattr(Interrupts, "number", signal.SIGTERM)
    says(TEXT, Interrupts(model, TEXT))
    if not answers:
        monkeypatch.setattr("builtins.input", lambda _: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("it would end the process"))
    try:
        shown = typed("Who?", "And when?", args=(), code=143)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "inhabitants" not in shown
    assert shown.endswith("cocoa: interrupted\r\n")


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_pipe_ends_the_chat(chats: Cocoa, says: Callable[..., None], model: CocoaEngine) -> None:
    Interrupts.pressed = False
    says(TEXT, Interrupts(model, TEXT))
    assert chats("Who?", "And when?", args=()).exit_code == 130
