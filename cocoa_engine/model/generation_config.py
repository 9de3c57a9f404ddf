"""Reads the settings of a generation config that apply to decoding without sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from cocoa_engine.config import require_stop_texts
from cocoa_engine.errors import ConfigError, safe_cause
from cocoa_engine.model.callables import Processor
from cocoa_engine.model.machine_errors import PASSED_ON
from cocoa_engine.safe_text import short_repr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cocoa_engine.model.light_model import LightModel


_NAME = "the generation config"

_NEED_EOS = {"min_length", "min_new_tokens", "exponential_decay_length_penalty"}
_TOKEN_IDS = {"forced_bos_token_id", "forced_eos_token_id"}


@contextmanager
def usable(what: str = _NAME) -> Iterator[None]:
    """Convert the errors that wrong values cause in transformers, which checks few of them.

    Args:
        what: what has the values, for the message.

    Raises:
        ConfigError: a value is out of range or of a wrong type, such as a negative ``repetition_penalty``.
    """
    try:
        yield
    except PASSED_ON:
        raise
    except Exception as error:
        reason = str(error).removesuffix(".") or type(error).__name__
        raise ConfigError(f"{what} cannot be used: {reason}. Correct its value, or remove it.") from safe_cause(error)


class OptionProcessor(LogitsProcessor):
    """A processor that was made of an option's value. Its errors name the option.

    Args:
        what: the option, for messages.
        processor: the processor. It checks some values only when it is called.
    """

    def __init__(self, what: str, processor: Processor) -> None:
        self._what, self._processor = what, processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The processed scores.

        Raises:
            ConfigError: the option's value is wrong.
        """
        with usable(self._what):
            return self._processor(input_ids, scores)


@usable()
def stop_texts(model: PreTrainedModel | LightModel, config: GenerationConfig | None = None) -> tuple[str, ...]:
    """The ``stop_strings`` of the generation config. `None` uses the model's own config.

    Raises:
        ConfigError: they are no texts, they are above the limits of :attr:`CocoaConfig.stop`, or one is empty.
    """
    value = getattr(config or getattr(model, "generation_config", None), "stop_strings", None) or ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stop_strings must be a text or a list of texts, not {short_repr(value)}")
    return require_stop_texts(tuple(texts))


def logits_processors(
    model: PreTrainedModel | LightModel,
    eos: frozenset[int],
    prompt: Sequence[int],
    max_new_tokens: int,
    repetition_penalty: float | None = None,
    config: GenerationConfig | None = None,
    *,
    device: torch.device | None = None,
) -> LogitsProcessorList:
    """The logits processors that ``generate(do_sample=False)`` builds from a generation config, in the same order.

    Args:
        eos: ids of the tokens that end a text.
        prompt: token ids.
        max_new_tokens: the length limit, for a forced end-of-sequence token.
        repetition_penalty: used instead of the generation config's.
        config: the generation config. `None` uses the model's own.
        device: where the scores will be. `None` is the model's device.

    Raises:
        ConfigError: a value is out of range or of a wrong type. The processors raise it too, because some values are
            checked only then.
    """
    config = config or getattr(model, "generation_config", None) or GenerationConfig()
    where = str(device or model.device)
    eos_list, prompt_length = sorted(eos), len(prompt)

    def prompt_ids() -> Tensor:
        return torch.tensor([prompt], device=where)

    makers: dict[str, Callable[[Any], LogitsProcessor]] = {
        "sequence_bias": lambda value: SequenceBiasLogitsProcessor(sequence_bias=value),
        "encoder_repetition_penalty": lambda value: EncoderRepetitionPenaltyLogitsProcessor(value, prompt_ids()),
        "repetition_penalty": lambda value: RepetitionPenaltyLogitsProcessor(penalty=value),
        "no_repeat_ngram_size": lambda value: NoRepeatNGramLogitsProcessor(value),
        "encoder_no_repeat_ngram_size": lambda value: EncoderNoRepeatNGramLogitsProcessor(value, prompt_ids()),
        "bad_words_ids": lambda value: NoBadWordsLogitsProcessor(value, eos_list or None),
        "min_length": lambda value: MinLengthLogitsProcessor(value, eos_list, device=where),
        "min_new_tokens": lambda value: MinNewTokensLengthLogitsProcessor(prompt_length, value, eos_list, device=where),
        "forced_bos_token_id": lambda value: ForcedBOSTokenLogitsProcessor(value),
        "forced_eos_token_id": lambda value: ForcedEOSTokenLogitsProcessor(
            prompt_length + max_new_tokens, value, device=where
        ),
        "exponential_decay_length_penalty": lambda value: ExponentialDecayLengthPenalty(value, eos_list, prompt_length),
        "suppress_tokens": lambda value: SuppressTokensLogitsProcessor(value, device=where),
        "begin_suppress_tokens": lambda value: SuppressTokensAtBeginLogitsProcessor(value, prompt_length, device=where),
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
            if name == "encoder_no_repeat_ngram_size" and value > prompt_length:  # the processor counts up to it
                continue
            processors.append(OptionProcessor(what, make(value)))
    return processors


def try_processors(
    model: PreTrainedModel | LightModel,
    eos: frozenset[int],
    prompt: Sequence[int],
    vocab_size: int,
    repetition_penalty: float | None = None,
    config: GenerationConfig | None = None,
) -> None:
    """Call the processors of a generation config once, so that wrong values are found before the model runs.

    It is done on the CPU: a token id that is out of range would leave a GPU unusable for this process. It is not done
    with the processors of a request, because some keep what they have seen.

    Args:
        eos, prompt, repetition_penalty, config: as for :func:`logits_processors`.
        vocab_size: the number of logits.

    Raises:
        ConfigError: a value is out of range or of a wrong type.
    """
    # with room for one token, a forced end-of-sequence token applies at once
    made = logits_processors(model, eos, prompt, 1, repetition_penalty, config, device=torch.device("cpu"))
    made(torch.tensor([prompt]), torch.zeros(1, vocab_size))
