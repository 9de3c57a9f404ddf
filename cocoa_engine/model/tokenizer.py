"""Encodes text with the user's tokenizer, renders chat messages with its chat template, and decodes tokens."""

from __future__ import annotations

import codecs
import copy
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cocoa_engine.errors import ChatTemplateError, PromptError, UnsupportedModelError, short_repr
from cocoa_engine.interruptions import at_work, current_cancellation, free_in_child, interruptible
from cocoa_engine.model.control_tokens import ControlTokens, Rendered
from cocoa_engine.model.text import THOUGHT, block_text, require_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RENDERING_SECONDS = 30.0
"""Time in which a chat template must have rendered messages. A template is a program, and may have loops."""

_TRIAL = "a text to see whether a template shows it"
"""The content of a message that is rendered before others."""

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not text."""

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = sorted(set(range(0x100)) - set(_VISIBLE))
_BYTE_OF_LETTER = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + at): byte for at, byte in enumerate(_HIDDEN)}
"""The letters by which a byte-level vocabulary spells bytes."""


class Tokens:
    """A thread-safe wrapper around a Hugging Face tokenizer, which is not modified.

    It is copied if anyone else holds it: encoding changes the padding and truncation settings inside a fast tokenizer,
    and other threads that set them could truncate prompts here.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, is_shared: bool = True) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
            raise UnsupportedModelError(
                f"the tokenizer is a {type(tokenizer).__name__}; pass e.g. AutoTokenizer.from_pretrained(...)."
            )
        self._own = _copy(tokenizer) if is_shared else tokenizer
        self._users = tokenizer if is_shared else None
        self._lock = free_in_child(threading.Lock())
        self.turn_ends: dict[str, int | None] = {}  # by chat template, where it has been asked for
        self._first: list[int] | None = None  # the tokens before a text, once they are known
        self._controls: tuple[str, ControlTokens] | None = None  # and the template that they belong to
        self._only_blocks: tuple[Any, bool] | None = None  # a template, and whether it reads nothing else

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The user's tokenizer. If it was loaded for this object, it is a copy, made when it is first asked for."""
        with self._lock:
            if self._users is None:
                self._users = _copy(self._own)
            return self._users

    @property
    def settings(self) -> PreTrainedTokenizerBase:
        """The tokenizer to read special tokens and the template from. It must not be given to users."""
        return self._own if self._users is None else self._users

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Token ids of a text, without truncation.

        It begins with the tokens that the tokenizer puts before a text, unless it has the first of them. Those that it
        puts after a text are left out: the model would continue a text that has ended. With ``split_special_tokens``
        the text of a control token is encoded like other text.
        """
        current_cancellation().check()
        require_unicode(text, "text")
        if split_special_tokens:
            ids = self.encode_rendered(self._control_tokens.marked(text))
        else:
            ids = list(self._encoded(text)["input_ids"])
        return [*self._before(ids), *ids] if add_special_tokens else ids

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Token ids and their ranges of characters, (0, 0) for special tokens; `None` if the ranges are not known."""
        if not getattr(self._own, "is_fast", False):
            return None
        encoded = self._encoded(text, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        before = self._before(ids) if add_special_tokens else []
        ranges = [(start, end) for start, end in encoded["offset_mapping"]]
        return [*before, *ids], [*[(0, 0)] * len(before), *ranges]

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Token ids of the result of :meth:`render`."""
        require_unicode(rendered.text, "text")
        return self._control_tokens.encode(
            rendered, lambda tokenizer, text, **options: list(self._encoded(text, tokenizer, **options)["input_ids"])
        )

    def _encoded(self, text: str, tokenizer: Any = None, **options: Any) -> Any:
        tokenizer = self._own if tokenizer is None else tokenizer
        with at_work, self._lock:
            return tokenizer(text, **{"add_special_tokens": False, "truncation": False, "verbose": False, **options})

    def _before(self, ids: list[int]) -> list[int]:
        """The tokens that the tokenizer puts before these ids, which are the whole text."""
        if self._first is None:
            inner, outer = ([*self._encoded("a", add_special_tokens=adds)["input_ids"]] for adds in (False, True))
            starts = range(len(outer) - len(inner) + 1) if inner else ()
            bos = int(outer[:1] == [getattr(self._own, "bos_token_id", None)])  # if "a" is no token
            self._first = outer[: next((at for at in starts if outer[at : at + len(inner)] == inner), bos)]
        return [] if ids[:1] == self._first[:1] else self._first

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; spaces are not cleaned up."""
        return str(self._own.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids. Special tokens are skipped; spaces are not cleaned up."""
        try:
            return str(self._own.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        except (TypeError, OverflowError):
            raise PromptError(
                f"decode takes a list of token ids (int, from 0 on), not {short_repr(token_ids)}."
            ) from None

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token, which may be a part of a character; `None` if the tokenizer does not tell them."""
        text = self.decode([token_id])
        if REPLACEMENT not in text:
            return text.encode()
        if not getattr(self._own, "is_fast", False):
            return None
        name = str(self._own.convert_ids_to_tokens(token_id))
        if (byte := _BYTE_TOKEN.fullmatch(name)) is not None:
            return bytes.fromhex(byte[1])
        if REPLACEMENT in name:
            return text.encode()
        return bytes(map(_BYTE_OF_LETTER.__getitem__, name)) if _BYTE_OF_LETTER.keys() >= set(name) else None

    def continuation(self, prompt: str, before: list[int], text: str) -> list[int]:
        """Token ids of a text after a prompt with the ids ``before``, from the encoding of both together.

        If the tokenizer would merge characters across the boundary, the text is encoded on its own.
        """
        whole = self.encode(prompt + text)
        if whole[: len(before)] == before and len(whole) > len(before):
            return whole[len(before) :]
        return self.encode(text, add_special_tokens=False)

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token with this text, or `None`. Decoded text never contains special tokens."""
        added = getattr(self._own, "added_tokens_decoder", {})
        return next((token_id for token_id, token in added.items() if token.special and token.content == text), None)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.settings, "chat_template", None))

    @property
    def _control_tokens(self) -> ControlTokens:
        template = str(getattr(self.settings, "chat_template", None))
        if self._controls is None or self._controls[0] != template:
            self._controls = template, ControlTokens(self._own, template, self._lock)
        return self._controls[1]

    def render(self, messages: Any, *, split_special_tokens: bool = True, **template_kwargs: Any) -> Rendered:
        """Render chat messages to a prompt with the tokenizer's chat template.

        Args:
            messages: mappings with ``role`` and ``content``: a text, or blocks as ``{"type": "text", "text": ...}``.
                Templates that read them also take ``{"type": "thinking", "thinking": ...}``.
            split_special_tokens: whether text in messages and options that spells a control token stays text.
            template_kwargs: options of ``apply_chat_template``. ``add_generation_prompt`` is `True` by default.

        Raises:
            ChatTemplateError: there is no template, there are no messages, or the template raises an error.
            PromptError: the content of a message is no text; or the template takes too long.
        """
        if not self.has_chat_template:
            raise ChatTemplateError(
                "the tokenizer has no chat template; set tokenizer.chat_template, use a chat model, or give a prompt."
            )
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
            raise ChatTemplateError('chat takes a list of messages, e.g. [{"role": "user", "content": "Hi"}].')
        chat = []
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ChatTemplateError(f'message {number} must be a mapping with "role" and "content".')
            chat.append(dict(message))
            content, where = message.get("content"), f"message {number} ({message['role']})"
            if isinstance(content, (list, tuple)):
                texts = [block_text(block, where, thoughts=self._reads_thoughts) for block in content]
                kinds = [THOUGHT if block["type"] == THOUGHT else "text" for block in content]
                blocks = [{"type": kind, kind: text} for kind, text in zip(kinds, texts, strict=True)]
                content = "".join(texts)
                chat[-1]["content"] = blocks if THOUGHT in kinds else content
            elif isinstance(content, Mapping) and message["role"] != "tool":  # some templates read the data of a tool
                raise PromptError(f"the content of {where} takes a text or a list of blocks, not {short_repr(content)}")
            if isinstance(content, str):
                require_unicode(content, f"content of {where}")
        options = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
        controls = self._control_tokens if split_special_tokens else None
        try:
            if controls is None:
                return Rendered(interruptible(lambda: self._apply_template(chat, options), RENDERING_SECONDS), None)
            return interruptible(lambda: controls.render(chat, options, self._apply_template), RENDERING_SECONDS)
        except TimeoutError:
            raise PromptError(
                f"the chat template takes more than {RENDERING_SECONDS:g} seconds for these messages; shorten them, or "
                "see whether its loops end (tokenizer.chat_template)"
            ) from None

    @property
    def _reads_thoughts(self) -> bool:
        """Whether the chat template names blocks of reasoning, as those of Mistral's models do."""
        return re.search(rf"""(["']){THOUGHT}\1""", str(self.settings.chat_template)) is not None

    def _apply_template(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        if self._reads_only_blocks({name: value for name, value in options.items() if name == "chat_template"}):
            messages = [_in_blocks(message) for message in messages]
        try:
            return str(self.settings.apply_chat_template(messages, **options))
        except Exception as fault:  # a template is a program, and may raise any error
            raise ChatTemplateError(f"the chat template rejects these messages: {fault}") from fault

    def _reads_only_blocks(self, options: Mapping[str, Any]) -> bool:
        """Whether a chat template leaves out content that is a text, as those of models for text and images may."""

        def shows(message: dict[str, Any]) -> bool:
            with suppress(Exception):  # a template may want other messages
                return _TRIAL in self.settings.apply_chat_template([message], tokenize=False, **options)
            return False

        template = options.get("chat_template", self.settings.chat_template)
        if self._only_blocks is None or self._only_blocks[0] != template:
            trial = {"role": "user", "content": _TRIAL}
            self._only_blocks = template, not shows(trial) and shows(_in_blocks(trial))
        return self._only_blocks[1]


def _in_blocks(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text is a block."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _copy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # a user's class that cannot be copied is used directly
        return tokenizer


class Detokenizer:
    """Decodes tokens as they arrive. :meth:`fork` makes a copy for a branch.

    Only a short window of tokens is decoded at each step. A character whose bytes are spread over several tokens
    appears with its last byte. Bytes that are not text, and never will be, appear as U+FFFD.

    Args:
        tokens: the tokenizer.
        stops: texts that end the sequence.

    Attributes:
        text: the decoded text, without a character whose last bytes are still to come.
        stop_at: the offset of the stop text that was complete first, or `None`.
    """

    def __init__(self, tokens: Tokens, stops: Sequence[str] = ()) -> None:
        self._tokens = tokens
        self._stops = tuple(stops)
        self._window: list[int] = []  # the last tokens whose text is complete, then the tokens after them
        self._length = 0  # the number of tokens in the window whose text is complete
        self._shown = ""  # the part of the window's text that is already in ``text``
        self.text = ""
        self.stop_at: int | None = None
        self._stopped = 0  # the length of the text when a stop text was complete

    def fork(self) -> Detokenizer:
        """An independent copy."""
        fork = copy.copy(self)
        fork._window = list(self._window)
        return fork

    def push(self, token_id: int) -> None:
        """Add one token."""
        self._window.append(token_id)
        text = self._tokens.decode(self._window)
        complete = self._complete(text)
        if len(complete) <= len(self._shown):
            return
        before = len(self.text)
        self.text += complete[len(self._shown) :]
        if self.stop_at is None:
            places = (self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops)
            self.stop_at = min((place for place in places if place >= 0), default=None)
            self._stopped = len(self.text)
        self._shown = complete
        # The text of a token can depend on the previous token (a leading space is dropped at the start of a text). So
        # the window always begins with tokens whose text is known, and only the new part of its text is added.
        if complete == text:
            self._window = self._window[self._length :]
            self._length = len(self._window)
            self._shown = self._tokens.decode(self._window)

    def stops_at(self, length: int) -> bool:
        """Whether the text of this length has a stop text. It must have been the text after a token."""
        return self.stop_at is not None and length >= self._stopped

    def safe_length(self) -> int:
        """The length of the text that is final. An end that could be the beginning of a stop text is not final."""
        if self.stop_at is not None:
            return self.stop_at
        length = len(self.text)
        for stop in self._stops:
            sizes = (size for size in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:size]))
            length = min(length, len(self.text) - next(sizes, 0))
        return length

    def final_ranges(self, ends: Sequence[int], first: int, *, finished: bool) -> list[tuple[int, int, str]]:
        """``(start, end, text)`` of the spans from number ``first`` on whose text is final.

        A span whose end could be the beginning of a stop text is held back, so that no text has to be withdrawn.
        ``ends`` are where the whole characters of all spans end.
        """
        cut = len(self.text) if finished and self.stop_at is None else self.safe_length()
        ranges = []
        for before, at in pairwise([0, *ends][first:]):
            if not finished and at > cut:
                break
            start, end = min(before, cut), min(at, cut)
            ranges.append((start, end, self.text[start:end]))
        return ranges

    def _complete(self, text: str) -> str:
        """The text of the window without a character whose last bytes are still to come."""
        if not text.endswith(REPLACEMENT):
            return text
        parts = [self._tokens.bytes_of(token_id) for token_id in self._window[self._length :]]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return text.rstrip(REPLACEMENT)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(b"".join(whole))
        begun = len(decoder.getstate()[0])
        while begun and begun >= len(whole[-1]):  # one byte may be one U+FFFD, or all of them
            begun -= len(whole.pop())
        before = self._window[: self._length + len(whole)]
        return text[:-1] if begun else text if len(whole) == len(parts) else self._tokens.decode(before)


def token_ends(tokens: Tokens, token_ids: Iterable[int]) -> tuple[str, list[int]]:
    """The text of tokens, and its length, in complete characters, after each. Some decoders drop its first space."""
    track, ends = Detokenizer(tokens), []
    for token_id in token_ids:
        track.push(token_id)
        ends.append(len(track.text))
    return track.text, ends
