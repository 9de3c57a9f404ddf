"""``cocoa chat``, piped and in a terminal."""

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaEngine
from cocoa_engine.cli.app import app
from cocoa_engine.rendering.terminal import check_list
from cocoa_engine.rendering.wording import NOT_CALIBRATED, verdict
from tests.helpers.cocoa import Cocoa, assert_refused, successful
from tests.helpers.reasoning_models import PLAIN, Says, Wavers, reasoning_engine, wavering

Typed = Callable[..., str]

SHORT = ("--max-new-tokens", "12")
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
def cocoa(calls: list[dict[str, Any]]) -> Cocoa:
    """Runs ``cocoa chat`` with lines piped into it."""

    def run(*lines: str, args: Sequence[str] = SHORT) -> Result:
        return CliRunner().invoke(app, ["chat", *args], input="".join(f"{line}\n" for line in lines), prog_name="cocoa")

    return run


@pytest.fixture
def says(model: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the model answer every question with a text, or with what a processor forces."""

    def choose(text: str, processor: Says | None = None) -> None:
        stream_chat = CocoaEngine.stream_chat
        forced = wavering(model, text)
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


def test_piped_questions_are_turns_of_one_chat(cocoa: Cocoa, model: CocoaEngine, calls: list[dict[str, Any]]) -> None:
    first = model.chat(USER, max_new_tokens=12)
    turns = [*USER, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And when?"}]
    second = model.chat(turns, max_new_tokens=12)
    result = successful(cocoa("Who?", "", "And when?"))
    assert [call["messages"] for call in calls] == [USER, turns]
    assert result.stdout.startswith(f"{verdict(first)}\n\n")
    assert f"\n\n{verdict(second).removesuffix(f' {NOT_CALIBRATED}')}\n\n" in result.stdout
    assert result.stdout.count(NOT_CALIBRATED) == 1
    assert second.text != first.text
    assert "\x1b" not in result.stdout


def test_settings_the_system_message_and_another_method(cocoa: Cocoa, calls: list[dict[str, Any]]) -> None:
    successful(cocoa("Who?", args=["--system", "Be brief.", "--max-new-tokens", "3", "--alpha", "1.5"]))
    assert calls[0]["messages"] == [{"role": "system", "content": "Be brief."}, *USER]
    assert (calls[0]["config"].max_new_tokens, calls[0]["config"].alpha) == (3, 1.5)
    calls.clear()
    result = cocoa("/method", "Who?", "/method greedy", "Who?", "/method gredy", "Who?")
    assert [call["config"].method for call in calls] == ["cocoa-sig", "greedy"]
    assert "Method: cocoa-sig. Others: greedy, cocoa, dola," in result.stdout
    assert "Method: greedy. Others: cocoa, cocoa-sig," in result.stdout
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "did you mean 'greedy'" in result.stderr


def test_why_lists_what_to_check(cocoa: Cocoa, model: CocoaEngine, says: Callable[..., None]) -> None:
    says(TEXT)
    expected = model.chat(USER, **wavering(model, TEXT))
    result = cocoa("/why", "Who?", "/why", args=())
    assert result.stdout.startswith("There is no answer yet.\n")
    listed = check_list(expected.check_these()).plain
    assert "the model was unsure" in listed
    assert listed in result.stdout
    assert "|3]" in result.stdout  # the claims are marked in the text


def test_a_file_is_put_before_the_next_question_and_a_reset_forgets_it(
    cocoa: Cocoa, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "passage.txt"
    file.write_text("Rome is old.\n")
    result = cocoa("Who?", f"/source {file}", "/reset", "Who?", "/reset", "/why")
    assert [(call["messages"], call["source"]) for call in calls] == [(USER, None)] * 2
    assert result.stdout.endswith("A new chat.\n\nThere is no answer yet.\n\n")
    calls.clear()
    result = cocoa(f"/source {file}", "/source", f"/source {file}", "Who?", "When?", "/source no/such/file")
    assert "1 file taken back." in result.stdout
    assert f"The next question begins with {file} (12 characters)." in result.stdout
    asked = [call["messages"][-1]["content"] for call in calls]
    assert asked == ["Rome is old.\n\nWho?", "When?"]
    assert [call["source"] for call in calls] == [["Rome is old."]] * 2  # it is still in the prompt
    assert_refused(result, "no/such/file cannot be read")


def test_commands(cocoa: Cocoa, calls: list[dict[str, Any]]) -> None:
    helped = successful(cocoa("/help", "/quit", "Who?"))
    assert all(re.search(f"^{name} ", helped.stdout, re.MULTILINE) for name in ("/method", "/why", "/source", "/quit"))
    assert calls == []  # /quit ended the chat
    unknown = cocoa("/wyh", "Who?")
    assert (unknown.exit_code, calls) == (2, [])
    assert "did you mean '/why'" in unknown.stderr
    assert cocoa(" /wyh is a question").exit_code == 0
    assert calls[0]["messages"][0]["content"] == "/wyh is a question"


def test_bad_input_is_one_line(cocoa: Cocoa, model: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = CliRunner().invoke(app, ["chat"], input=b"\xff\xfe\n", prog_name="cocoa")
    assert (bad.exit_code, bad.stderr.count("\n")) == (2, 1)
    assert "not text" in bad.stderr
    long = cocoa("word " * 9000)
    assert (long.exit_code, long.stderr.count("\n")) == (2, 1)
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    assert_refused(cocoa("Who?"), "cocoa ask --raw")


def test_control_characters_are_shown_escaped(cocoa: Cocoa, says: Callable[..., None], typed: Typed) -> None:
    says("Rome\x1b[2J is\x07 old.")
    piped = cocoa("Who?", args=()).stdout
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
def test_ctrl_c_in_a_pipe_ends_the_chat(cocoa: Cocoa, says: Callable[..., None], model: CocoaEngine) -> None:
    Interrupts.pressed = False
    says(TEXT, Interrupts(model, TEXT))
    assert cocoa("Who?", "And when?", args=()).exit_code == 130
