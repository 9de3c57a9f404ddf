"""Text to tokens and back through the user's tokenizer, and chat messages through its template."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from cocoa_engine.errors import ChatTemplateError, UnsupportedModelError


class Tokens:
    """A Hugging Face tokenizer, made safe for threads.

    Raises:
        UnsupportedModelError: it is not a tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
            raise UnsupportedModelError(
                f"the tokenizer is a {type(tokenizer).__name__}; pass e.g. AutoTokenizer.from_pretrained(...)."
            )
        self.tokenizer = tokenizer
        # Encoding sets padding and truncation inside a fast tokenizer: the user's own is not touched, and what other
        # threads do with it cannot cut our prompts short.
        self._own = _copy(tokenizer)
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, never cut short."""
        with self._lock:
            encoded = self._own(text, add_special_tokens=add_special_tokens, truncation=False, verbose=False)
        return list(encoded["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out, spaces are kept as they are."""
        return str(self._own.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def continuation(self, prompt: str, before: list[int], text: str) -> list[int]:
        """Token ids of a text after a prompt whose ids are ``before``, split as the tokenizer splits the two together.

        Where it would merge characters across the border, the text is encoded apart.
        """
        whole = self.encode(prompt + text)
        if whole[: len(before)] == before and len(whole) > len(before):
            # a tokenizer that ends every text with a special token would have put it after the prompt, too
            return whole[len(before) :]
        return self.encode(text, add_special_tokens=False)

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written so, if there is one; decoded text never holds it."""
        added = getattr(self._own, "added_tokens_decoder", {})
        return next((token_id for token_id, token in added.items() if token.special and token.content == text), None)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render_chat(self, messages: Any, **template_kwargs: Any) -> str:
        """Messages (mappings with ``role`` and ``content``) as the text the model was trained on.

        Raises:
            ChatTemplateError: there is no template, there are no messages, or the template refuses them.
        """
        if not self.has_chat_template:
            raise ChatTemplateError(
                "the tokenizer has no chat template; set tokenizer.chat_template, use a chat model, or give a prompt."
            )
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
            raise ChatTemplateError('chat takes a list of messages, e.g. [{"role": "user", "content": "Hi"}].')
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ChatTemplateError(f'message {number} must be a mapping with "role" and "content".')
        options = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template([dict(message) for message in messages], **options))
        except Exception as fault:  # templates are programs: they raise what they like
            raise ChatTemplateError(f"the chat template refuses these messages: {fault}") from fault


def _copy(tokenizer: Any) -> Any:
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # a user's class that cannot be copied is used as it is
        return tokenizer
