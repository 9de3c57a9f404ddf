"""The settings of a generation config that apply to decoding without sampling, and the tokens that end a text."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as theirs

from cocoa_engine.config import require_stop_texts
from cocoa_engine.errors import ChatTemplateError, ConfigError, short_repr
from cocoa_engine.model.language_model import PASSED_ON, LanguageModel
from cocoa_engine.model.tokenizer import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cocoa_engine.model.light_model import LightModel


_NAME = "the generation config"

_NEED_EOS = {"min_length", "min_new_tokens", "exponential_decay_length_penalty"}
_TOKEN_IDS = {"forced_bos_token_id", "forced_eos_token_id"}


@contextmanager
def usable(what: str = _NAME) -> Iterator[None]:
    """Convert errors of wrong values of ``what`` in transformers, which checks few, to a :class:`ConfigError`."""
    try:
        yield
    except PASSED_ON:
        raise
    except Exception as error:
        reason = str(error).removesuffix(".") or type(error).__name__
        raise ConfigError(f"{what} cannot be used: {reason}. Correct its value, or remove it.") from error


@usable()
def stop_texts(model: "PreTrainedModel | LightModel", config: GenerationConfig | None = None) -> tuple[str, ...]:
    """The ``stop_strings`` of a generation config, or of the model's own, within the limits of ``CocoaConfig.stop``."""
    value = getattr(config or getattr(model, "generation_config", None), "stop_strings", None) or ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stop_strings must be a text or a list of texts, not {short_repr(value)}")
    return require_stop_texts(tuple(texts))


def logits_processors(
    model: LanguageModel,
    eos: frozenset[int],
    prompt: Sequence[int],
    max_new_tokens: int,
    repetition_penalty: float | None = None,
    config: GenerationConfig | None = None,
) -> LogitsProcessorList:
    """The logits processors that ``generate(do_sample=False)`` builds from a generation config, in the same order.

    They are called once before the model runs, because some values are checked only then. It is done on the CPU: a
    token id that is out of range would leave a GPU unusable for this process.

    Args:
        repetition_penalty: used instead of the generation config's.
        config: the generation config. `None` uses the model's own.
    """
    config = config or getattr(model.model, "generation_config", None) or GenerationConfig()
    ends, length = sorted(eos), len(prompt)

    def made(limit: int, device: str) -> LogitsProcessorList:
        def ids() -> Tensor:
            return torch.tensor([prompt], device=device)

        makers: dict[str, Callable[[Any], LogitsProcessor]] = {
            "sequence_bias": theirs.SequenceBiasLogitsProcessor,
            "encoder_repetition_penalty": lambda value: theirs.EncoderRepetitionPenaltyLogitsProcessor(value, ids()),
            "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
            "no_repeat_ngram_size": theirs.NoRepeatNGramLogitsProcessor,
            "encoder_no_repeat_ngram_size": lambda value: theirs.EncoderNoRepeatNGramLogitsProcessor(value, ids()),
            "bad_words_ids": lambda value: theirs.NoBadWordsLogitsProcessor(value, ends or None),
            "min_length": lambda value: theirs.MinLengthLogitsProcessor(value, ends, device),
            "min_new_tokens": lambda value: theirs.MinNewTokensLengthLogitsProcessor(length, value, ends, device),
            "forced_bos_token_id": theirs.ForcedBOSTokenLogitsProcessor,
            "forced_eos_token_id": lambda value: theirs.ForcedEOSTokenLogitsProcessor(limit, value, device),
            "exponential_decay_length_penalty": lambda value: theirs.ExponentialDecayLengthPenalty(value, ends, length),
            "suppress_tokens": lambda value: theirs.SuppressTokensLogitsProcessor(value, device),
            "begin_suppress_tokens": lambda value: theirs.SuppressTokensAtBeginLogitsProcessor(value, length, device),
        }
        processors = LogitsProcessorList()
        for name, make in makers.items():
            value = getattr(config, name, None)
            if name == "repetition_penalty":
                value = repetition_penalty or value
            what = f"{name} of {_NAME}"
            with usable(what):
                if value is None or (not value and name not in _TOKEN_IDS):  # 0 is an id
                    continue
                if (name.endswith("repetition_penalty") and value == 1.0) or (name in _NEED_EOS and not eos):
                    continue
                if name == "encoder_no_repeat_ngram_size" and value > length:  # the processor counts up to it
                    continue
                processors.append(usable(what)(make(value)))  # some values are checked only when it is called
        return processors

    if tried := made(length + 1, "cpu"):  # with room for one token, a forced end-of-sequence token applies at once
        tried(torch.tensor([prompt], device="cpu"), torch.zeros(1, model.vocab_size, device="cpu"))
    return made(length + max_new_tokens, str(model.model.device))


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
    model: "PreTrainedModel | LightModel", tokens: Tokens, config: GenerationConfig | None = None
) -> frozenset[int]:
    """The ids of the tokens that end a text.

    They are those of the generation config (of ``config`` if it states any, otherwise the model's own), of the
    tokenizer, and the one that ends an assistant's turn in the chat template: a model that has learnt a template ends
    its answers with that one. Ids that the model has no embedding of are left out.
    """
    own = getattr(model, "generation_config", None)
    stated = next((ends for source in (config, own) if (ends := getattr(source, "eos_token_id", None)) is not None), ())
    try:
        ids = [stated] if isinstance(stated, int) else list(map(operator.index, stated))
    except TypeError:
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {short_repr(stated)}") from None
    ends = {*ids, getattr(tokens.settings, "eos_token_id", None), turn_end(tokens)}
    size = int(model.get_input_embeddings().weight.shape[0])
    return frozenset(end for end in ends if end is not None and 0 <= end < size)


def eos_of_gguf(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of the tokens that end a text, from the metadata of a GGUF file: its keys, and the names of its tokens.

    ``</s>`` is a tag of HTML too, and an end only as a control token. ``<|end|>`` ends a part of a turn where other
    tokens end the turn.
    """
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    names = set(_NAMED)
    ids = {number for number, kind in enumerate(kinds) if kind == CONTROL_TOKEN and tokens[number] == "</s>"}
    if {"<|return|>", "<|call|>"} <= (markers := names.intersection(tokens)) or {"<|calls|>", "<|flush|>"} <= markers:
        names.remove("<|end|>")
    ids |= {number for number, token in enumerate(tokens) if token in names}
    ids |= {metadata[key] for name in _GGUF_KEYS if (key := f"tokenizer.ggml.{name}_token_id") in metadata}
    return sorted(number for number in ids if 0 <= number < len(tokens))


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
    for text, candidates in ((after, ends), (until_next, special)):
        for token_id in tokens.encode(text, add_special_tokens=False):
            if token_id in candidates:
                return token_id
    return None
