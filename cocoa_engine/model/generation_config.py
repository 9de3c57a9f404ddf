"""Reads the settings of a generation config that apply to decoding without sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from cocoa_engine.config import require_stop_texts
from cocoa_engine.errors import ConfigError, safe_cause

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cocoa_engine.model.light_model import LightModel


@contextmanager
def valid_generation_config() -> Iterator[None]:
    """Convert the errors that values of a generation config cause.

    Raises:
        ConfigError: a value is out of range or of a wrong type, such as a negative ``repetition_penalty``.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the generation config cannot be used: {error}. Correct its value, or remove it."
        ) from safe_cause(error)


def eos_token_ids(
    model: PreTrainedModel | LightModel, tokenizer: PreTrainedTokenizerBase, config: GenerationConfig | None = None
) -> frozenset[int]:
    """The ids of the tokens that end a text, from the generation config if there is one, otherwise the tokenizer's.

    Args:
        config: the generation config. `None` uses the model's own.
    """
    value = getattr(config or getattr(model, "generation_config", None) or tokenizer, "eos_token_id", None)
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else map(int, value))


def stop_texts(model: PreTrainedModel | LightModel, config: GenerationConfig | None = None) -> tuple[str, ...]:
    """The ``stop_strings`` of the generation config. `None` uses the model's own config.

    Raises:
        ValueError: they are above the limits of :attr:`CocoaConfig.stop`, or one is empty.
    """
    value = getattr(config or getattr(model, "generation_config", None), "stop_strings", None) or ()
    return require_stop_texts((value,) if isinstance(value, str) else tuple(value))


def logits_processors(
    model: PreTrainedModel | LightModel,
    eos: frozenset[int],
    prompt: Sequence[int],
    max_new_tokens: int,
    repetition_penalty: float | None = None,
    config: GenerationConfig | None = None,
) -> LogitsProcessorList:
    """The logits processors that ``generate(do_sample=False)`` builds from a generation config, in the same order.

    Args:
        eos: ids of the tokens that end a text.
        prompt: token ids.
        max_new_tokens: the length limit, for a forced end-of-sequence token.
        repetition_penalty: used instead of the generation config's.
        config: the generation config. `None` uses the model's own.
    """
    config = config or getattr(model, "generation_config", None) or GenerationConfig()
    processors = LogitsProcessorList()
    device, eos_list, prompt_length = str(model.device), sorted(eos), len(prompt)

    prompt_ids = torch.tensor([prompt], device=model.device)

    def given(name: str) -> Any:
        return getattr(config, name, None) or None

    if value := given("sequence_bias"):
        processors.append(SequenceBiasLogitsProcessor(sequence_bias=value))
    if (value := given("encoder_repetition_penalty")) and value != 1.0:
        processors.append(EncoderRepetitionPenaltyLogitsProcessor(value, prompt_ids))
    if (value := repetition_penalty or given("repetition_penalty")) and value != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=value))
    if value := given("no_repeat_ngram_size"):
        processors.append(NoRepeatNGramLogitsProcessor(value))
    if value := given("encoder_no_repeat_ngram_size"):
        processors.append(EncoderNoRepeatNGramLogitsProcessor(value, prompt_ids))
    if value := given("bad_words_ids"):
        processors.append(NoBadWordsLogitsProcessor(value, eos_list or None))
    if (value := given("min_length")) and eos:
        processors.append(MinLengthLogitsProcessor(value, eos_list, device=device))
    if (value := given("min_new_tokens")) and eos:
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_length, value, eos_list, device=device))
    if (value := getattr(config, "forced_bos_token_id", None)) is not None:  # 0 is an id
        processors.append(ForcedBOSTokenLogitsProcessor(value))
    if (value := getattr(config, "forced_eos_token_id", None)) is not None:
        processors.append(ForcedEOSTokenLogitsProcessor(prompt_length + max_new_tokens, value, device=device))
    if (value := given("exponential_decay_length_penalty")) and eos:
        processors.append(ExponentialDecayLengthPenalty(value, eos_list, prompt_length))
    if value := given("suppress_tokens"):
        processors.append(SuppressTokensLogitsProcessor(value, device=device))
    if value := given("begin_suppress_tokens"):
        processors.append(SuppressTokensAtBeginLogitsProcessor(value, prompt_length, device=device))
    return processors
