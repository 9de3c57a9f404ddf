"""Keeps the text of messages from becoming control tokens: only the chat template's own text does.

Messages are rendered twice: as they are, and with stand-ins for the characters without which no text spells a control
token, such as ``<`` and ``|``. What is a control token in the second text was written by the template, whatever it does
with messages. The stand-ins are lone surrogates, which no message may contain.
"""

import copy
import dataclasses
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from cocoa_engine.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST_STAND_IN = 0xD800
_WITHOUT_STAND_IN = re.compile(r'[\w\s"\\]+')
"""Templates compare words with words and strip spaces, and JSON escapes the others."""
_ESCAPE = re.compile(r"\\(?:u(d8[0-9a-f]{2})|.)")
"""A stand-in as JSON and ``repr`` write it, or another escape."""


class Rendered(NamedTuple):
    """Chat messages as one text."""

    text: str
    marked: str | None  # with stand-ins for characters of the messages; ``None``: their text makes control tokens, too


class ControlTokens:
    """The special tokens of a tokenizer, and the added tokens that its chat template names, such as ``<tool_call>``.

    The lock is held while the tokenizer is used, which is not modified.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str, lock: AbstractContextManager[Any]) -> None:
        self._tokenizer, self._lock = tokenizer, lock
        self._secret_names: tuple[Any, dict[int, int], dict[str, str]] | None = None
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self._added: dict[str, tuple[int, Any]] = {
            token.content: (token_id, token)
            for token_id, token in added
            if token.content.strip() and (token.special or (token.content in template and _marks(token.content)))
        }
        # an ordinary text may have unknown characters
        self._ids = {token_id for token_id, _ in self._added.values()} - {getattr(tokenizer, "unk_token_id", None)}
        self._pattern = _any_of(self._added)
        self._spelled = self._pattern.findall
        self._words = _any_of(content for content in self._added if not _marks(content))
        self._tags = _any_of(content for content, (_, token) in self._added.items() if not token.special)
        marked = [(_marks(content), content[0]) for content in self._added]
        self._stand_ins = {
            char: chr(_FIRST_STAND_IN + at)
            for at, char in enumerate(dict.fromkeys("".join(marks or first for marks, first in marked)))
        }
        self._all = str.maketrans({char: self._stand_ins[char] for marks, _ in marked for char in marks})
        self._fewest = str.maketrans({marks[0]: self._stand_ins[marks[0]] for marks, _ in marked if marks})
        self._show = str.maketrans({stand_in: char for char, stand_in in self._stand_ins.items()})

    def render(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        apply: Callable[[list[dict[str, Any]], Mapping[str, Any]], str],
    ) -> Rendered:
        """Render messages with options of ``apply_chat_template`` by ``apply``, and mark what came from them."""
        text = apply(messages, options)
        template = {name: value for name, value in options.items() if name == "chat_template"}
        hidden_options = self._hidden(options, self._all) | template
        history = len(messages) - bool(options.get("continue_final_message"))  # after it, the answer has begun
        for hide, tags in product((self._all, self._fewest), (None, self._tags)):
            hidden = [
                self._hidden_message(message, hide, tags if number < history else self._tags)
                for number, message in enumerate(messages)
            ]
            if hidden == messages and hidden_options == options:
                return Rendered(text, text)
            try:
                marked = apply(hidden, hidden_options)
            except ChatTemplateError:
                if hide is self._fewest and tags:
                    raise
                continue
            for form in (marked, _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else match[0], marked)):
                if self._shown(form) == text:
                    return Rendered(text, form)
        # The template reads the characters that have stand-ins. A text without control tokens may stay as it is.
        texts = map(self._shown, _texts([hidden, hidden_options | dict.fromkeys(template)]))
        if self._spelled(text) == self._spelled(marked) and not any(map(self._spelled, texts)):
            return Rendered(text, text)
        return Rendered(self._shown(marked), marked)

    def marked(self, text: str) -> Rendered:
        """A text that makes no control tokens."""
        return Rendered(text, self._hidden(text, self._all))

    def encode(self, rendered: Rendered, encode: Callable[..., list[int]]) -> list[int]:
        """Token ids of rendered messages: those of their text, unless a message spells a control token."""
        ids = encode(self._tokenizer, rendered.text)
        if rendered.marked is None:
            return ids
        spelled = self._spelled(rendered.marked)
        written = [self._added[content][0] for content in spelled]
        # the second comparison is for tokenizers that normalise a text before they look for special tokens
        if spelled == self._spelled(rendered.text) and self._control_ids(ids) == self._control_ids(written):
            return ids
        return self._encode_apart(rendered.marked, encode)

    def _hidden_message(
        self, message: Mapping[str, Any], hide: Mapping[int, str], tags: re.Pattern[str] | None
    ) -> dict[str, Any]:
        """A message with stand-ins: those of ``hide`` in its content, without the given tags of an assistant."""
        hidden: dict[str, Any] = {}
        for key, value in message.items():
            if key == "content":
                hidden[key] = self._hidden(value, hide, tags if message["role"] == "assistant" else None)
            elif key == "role":  # may be the name of a control token
                hidden[key] = value.translate(self._all) if isinstance(value, str) else value
            else:
                hidden[self._hidden(key, self._all)] = self._hidden(value, self._all)
        return hidden

    def _hidden(self, value: Any, hide: Mapping[int, str], tags: re.Pattern[str] | None = None) -> Any:
        """Data for a template with stand-ins in all of its texts, keys included, except for the given tags."""
        if isinstance(value, str):
            parts = [value] if tags is None else tags.split(value)
            parts[::2] = [
                self._words.sub(lambda word: self._stand_ins[word[0][0]] + word[0][1:], part).translate(hide)
                for part in parts[::2]
            ]
            return "".join(parts)
        if isinstance(value, Mapping):
            return {self._hidden(key, hide): self._hidden(inner, hide, tags) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._hidden(inner, hide, tags) for inner in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._hidden(dataclasses.asdict(value), hide, tags)
        if hasattr(value, "model_dump") and not isinstance(value, type):  # of pydantic
            return self._hidden(value.model_dump(), hide, tags)
        return value

    def _shown(self, marked: str) -> str:
        return marked.translate(self._show)

    def _control_ids(self, token_ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id in self._ids]

    def _encode_apart(self, marked: str, encode: Callable[..., list[int]]) -> list[int]:
        """Token ids of a text in which only control tokens without stand-ins are such."""
        tokenizer: Any = self._tokenizer
        if getattr(tokenizer, "is_fast", False):
            tokenizer, real_ids, names = self._renamed()
            text = self._shown(self._pattern.sub(lambda spelled: names[spelled[0]], marked))
            ids = encode(tokenizer, text, split_special_tokens=True)
            if not self._control_ids(ids):
                return [real_ids.get(token_id, token_id) for token_id in ids]
        ids = []
        for number, part in enumerate(self._pattern.split(marked)):  # slow tokenizers encode them one by one, too
            if number % 2:
                ids.append(self._added[part][0])
                continue
            text = self._shown(part)
            words = self._pattern.split(text)  # some vocabularies have control tokens as words, which must be divided
            letters = [piece for at, word in enumerate(words) for piece in (word if at % 2 else [word])]
            encoded: list[int] = []
            for pieces in ([text], letters, text):
                encoded = [number for piece in pieces for number in encode(tokenizer, piece, split_special_tokens=True)]
                if not self._control_ids(encoded):
                    break
            ids += encoded
        return ids

    def _renamed(self) -> tuple[Any, dict[int, int], dict[str, str]]:
        """A copy whose control tokens have names that no text contains, the real ids by its ids, and those names."""
        if self._secret_names is None:
            from tokenizers import AddedToken

            with self._lock:
                tokenizer = copy.deepcopy(self._tokenizer)
            secret = secrets.token_hex(16)
            names = {content: f"\U0010fffd{secret}{at:x}\U0010fffd" for at, content in enumerate(self._added)}
            new, old = [], []
            for content, (_, token) in self._added.items():
                flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
                new.append(AddedToken(names[content], special=False, **flags))
                old.append(AddedToken(content, special=True, **flags))  # which split_special_tokens asks for
            tokenizer.add_tokens(new)
            tokenizer.add_tokens(old, special_tokens=True)
            real_ids = {
                tokenizer.convert_tokens_to_ids(names[content]): token_id
                for content, (token_id, _) in self._added.items()
            }
            self._secret_names = tokenizer, real_ids, names
        return self._secret_names


def _marks(text: str) -> str:
    """The characters of a text that get stand-ins."""
    return _WITHOUT_STAND_IN.sub("", text)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of some texts, as a group. There may be thousands: the expression shares their beginnings."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        begun = ""
        while len(node) == 1 and "" not in node:
            [(character, node)] = node.items()
            begun += re.escape(character)
        rest = "|".join(re.escape(character) + expression(node[character]) for character in node if character)
        return f"{begun}(?:{rest}){'?' if '' in node else ''}" if rest else begun

    return re.compile(f"({expression(tree)})" if tree else "((?!))")


def _texts(value: Any) -> Iterator[str]:
    """All texts in data of dicts, lists and their items."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for inner in value.items() if isinstance(value, dict) else value:
            yield from _texts(inner)
