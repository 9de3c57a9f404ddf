"""A chat in the terminal. Answers are streamed and coloured by the risk of their spans. An empty line or Ctrl-D exits.

python examples/chat.py
"""

from __future__ import annotations

from rich.console import Console
from rich.live import Live

from cocoa_engine import CocoaEngine
from cocoa_engine.rendering.terminal import spans_text

MAX_MESSAGES = 7  # in the prompt: three earlier turns and the question


def main() -> None:
    """Chat with the embedded model. Pass a model name to ``from_pretrained`` to use another one."""
    engine = CocoaEngine.from_pretrained()
    console = Console(markup=False, emoji=False, highlight=False)
    marks = console.color_system is None  # without colours, risky spans are marked in the text
    messages: list[dict[str, str]] = []
    while question := read(console):
        messages = [*messages, {"role": "user", "content": question}][-MAX_MESSAGES:]
        with (
            engine.stream_chat(messages, max_new_tokens=64) as stream,
            Live(console=console, auto_refresh=False, transient=True) as live,
        ):
            spans = []
            for span in stream:
                spans.append(span)
                live.update(spans_text(spans, marks=marks), refresh=True)
        assert stream.generation is not None
        messages.append({"role": "assistant", "content": stream.generation.text})
        console.print(stream.generation.to_rich(marks=marks), "")


def read(console: Console) -> str:
    """The next line, or an empty string at the end of the input."""
    try:
        return console.input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
