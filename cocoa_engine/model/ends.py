"""The tokens that end a text: those that a model's files name, and the one that ends a turn in its chat template."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from cocoa_engine.errors import ChatTemplateError
from cocoa_engine.model.generation_config import usable
from cocoa_engine.model.tokenizer import Tokens
from cocoa_engine.safe_text import short_repr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cocoa_engine.model.light_model import LightModel

CONTROL_TOKEN = 3  # GGUF's type of special tokens

_GGUF_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_NAMED = {
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]"),
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<|end|>"),
    *("<EOT>", "_<EOT>", "[EOT]"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
}
"""The tokens after which llama.cpp ends a text, whatever the keys of the file say."""

_THOUGHT, _ANSWER, _NEXT = "A thought of mine.", "An answer of mine.", "Another question of mine?"


@usable()
def eos_token_ids(
    model: PreTrainedModel | LightModel, tokens: Tokens, config: GenerationConfig | None = None
) -> frozenset[int]:
    """The ids of the tokens that end a text.

    They are those of the generation config, the tokenizer's, and the one that ends an assistant's turn in the chat
    template. A model that has learnt a template ends its answers with that one, whatever the other files say. Ids that
    the model has no embedding of are left out.

    Args:
        config: a generation config whose end tokens, if it states any, are used instead of those of the model's own.

    Raises:
        ConfigError: those of a generation config are not whole numbers.
    """
    own = getattr(model, "generation_config", None)
    stated = next((ends for each in (config, own) if (ends := getattr(each, "eos_token_id", None)) is not None), ())
    try:
        ids = [stated] if isinstance(stated, int) else list(map(operator.index, stated))
    except TypeError:
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {short_repr(stated)}") from None
    found = {*ids, getattr(tokens.settings, "eos_token_id", None), turn_end(tokens)}
    size = int(model.get_input_embeddings().weight.shape[0])
    return frozenset(one for one in found if one is not None and 0 <= one < size)


def of_gguf(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of the tokens that end a text, from the metadata of a GGUF file: its keys, and the names of its tokens.

    ``</s>`` is a tag of HTML too, and an end only as a control token. ``<|end|>`` ends a part of a turn where other
    tokens end the turn.
    """
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    names = set(_NAMED)
    ids = {number for number, kind in enumerate(kinds) if kind == CONTROL_TOKEN and tokens[number] == "</s>"}
    if {"<|return|>", "<|call|>"} <= (given := names.intersection(tokens)) or {"<|calls|>", "<|flush|>"} <= given:
        names.remove("<|end|>")
    ids |= {number for number, token in enumerate(tokens) if token in names}
    ids |= {metadata[key] for name in _GGUF_KEYS if (key := f"tokenizer.ggml.{name}_token_id") in metadata}
    return sorted(one for one in ids if 0 <= one < len(tokens))


def turn_end(tokens: Tokens) -> int | None:
    """The token that ends an assistant's turn in the chat template; `None` if there is no template, or text ends it."""
    if not tokens.has_chat_template:
        return None
    template = str(tokens.settings.chat_template)
    if template not in tokens.turn_ends:  # rendering takes 2 to 7 ms
        tokens.turn_ends[template] = _rendered_end(tokens)
    return tokens.turn_ends[template]


def _rendered_end(tokens: Tokens) -> int | None:
    thought = dict.fromkeys(("reasoning", "reasoning_content", "thinking", "thought"), _THOUGHT)
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER, **thought}]
    try:
        last, inner = (
            tokens.render([*turns, *following], split_special_tokens=False, add_generation_prompt=False, tools=[]).text
            for following in ([], [{"role": "user", "content": _NEXT}])
        )
    except ChatTemplateError:
        return None
    before, _, after = last.partition(_ANSWER)
    until_next = inner.partition(_ANSWER)[2].partition(_NEXT)[0]
    # what stands between a thought and its answer ends a part of a turn
    passed = tokens.encode(before.partition(_THOUGHT)[2], add_special_tokens=False)
    added = getattr(tokens.settings, "added_tokens_decoder", {})
    ends = {number for number, token in added.items() if not token.content.isspace()}.difference(passed)
    special = {number for number in ends if added[number].special}  # the next turn may begin with a known word
    after_answer = [one for one in tokens.encode(after, add_special_tokens=False) if one in ends]
    before_next = [one for one in tokens.encode(until_next, add_special_tokens=False) if one in special]
    return next(iter(after_answer + before_next), None)
