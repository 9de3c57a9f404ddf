"""The parts of a model's own generation config that decoding without sampling honours."""

from __future__ import annotations

from typing import Any

from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
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


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: the generation config's, else the model config's, else the tokenizer's."""
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        if value is not None:
            return frozenset([value] if isinstance(value, int) else map(int, value))
    return frozenset()


def logits_processors(model: Any, eos: frozenset[int], prompt_length: int, max_new_tokens: int) -> LogitsProcessorList:
    """The processors that ``generate(do_sample=False)`` builds from the model's generation config, in its order."""
    config = getattr(model, "generation_config", None)
    processors = LogitsProcessorList()
    if config is None:
        return processors
    device, eos_list = str(model.device), sorted(eos)

    def given(name: str) -> Any:
        return getattr(config, name, None) or None

    if value := given("sequence_bias"):
        processors.append(SequenceBiasLogitsProcessor(sequence_bias=value))
    if (value := given("repetition_penalty")) and value != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=value))
    if value := given("no_repeat_ngram_size"):
        processors.append(NoRepeatNGramLogitsProcessor(value))
    if value := given("bad_words_ids"):
        processors.append(NoBadWordsLogitsProcessor(value, eos_list or None))
    if (value := given("min_length")) and eos:
        processors.append(MinLengthLogitsProcessor(value, eos_list, device=device))
    if (value := given("min_new_tokens")) and eos:
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_length, value, eos_list, device=device))
    if value := given("forced_bos_token_id"):
        processors.append(ForcedBOSTokenLogitsProcessor(value))
    if value := given("forced_eos_token_id"):
        processors.append(ForcedEOSTokenLogitsProcessor(prompt_length + max_new_tokens, value, device=device))
    if value := given("suppress_tokens"):
        processors.append(SuppressTokensLogitsProcessor(value, device=device))
    if value := given("begin_suppress_tokens"):
        processors.append(SuppressTokensAtBeginLogitsProcessor(value, prompt_length, device=device))
    return processors
