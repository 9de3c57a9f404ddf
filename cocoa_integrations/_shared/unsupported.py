"""Options of other models that CoCoA decoding does not have, and what to give instead."""

from collections.abc import Mapping
from typing import Any

from cocoa_engine.errors import ConfigError

_COMPETE = "gamma and max_candidates set which tokens compete"
_SAMPLING = f"{_COMPETE}; only method='sample' takes it"
_SAMPLE_AGAIN = "call again with a temperature above 0"
_REPETITION = "give repetition_penalty"
_PROCESSOR = "give logits_processor"
_STOP = "give stop"

INSTEAD = {
    "top_k": _SAMPLING,
    "top_p": _SAMPLING,
    "min_p": "gamma is such a threshold: a token competes if its probability is at least gamma times the highest",
    "typical_p": _COMPETE,
    "do_sample": "give temperature: 0 decodes greedily, and a value above 0 samples",
    "n": _SAMPLE_AGAIN,
    "num_return_sequences": _SAMPLE_AGAIN,
    "best_of": "it compares candidate spans instead, see max_candidates",
    "num_beams": "it searches candidate spans instead, see max_candidates and max_span_tokens",
    "presence_penalty": _REPETITION,
    "frequency_penalty": _REPETITION,
    "logit_bias": _PROCESSOR,
    "no_repeat_ngram_size": _PROCESSOR,
    "bad_words_ids": _PROCESSOR,
    "suppress_tokens": _PROCESSOR,
    "max_length": "give max_new_tokens",
    "max_completion_tokens": "give max_new_tokens",
    "max_output_tokens": "give max_new_tokens",
    "stop_sequences": _STOP,
    "stop_strings": _STOP,
    "eos_token_id": "give stopping_criteria, or stop with the text of the token",
    "functions": "give tools and tool_choice",
    "function_call": "give tools and tool_choice",
    "model_id": "give model",
    "pipeline": "give engine=CocoaEngine(pipeline.model, pipeline.tokenizer), or model and its loading options",
    "pipeline_kwargs": "give the decode settings themselves, such as max_new_tokens",
}
"""By the name of the option. An adapter may support some of them."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "top_k": (0,),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "n": (1,),
    "num_return_sequences": (1,),
    "best_of": (1,),
    "num_beams": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "use_cache": (True,),
}
"""By the name of the option, the values that have no effect. They are accepted, and so is ``None``."""


def is_without_effect(name: str, value: Any) -> bool:
    """Whether an option asks for what happens anyway."""
    return value is None or value in WITHOUT_EFFECT.get(name, ())


def refused(options: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """The message that refuses options; ``reasons`` says for each of them what to do instead."""
    by_reason: dict[str, list[str]] = {}
    for name, value in options.items():
        by_reason.setdefault(reasons[name], []).append(f"{name}={value!r}")
    listed = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return f"not supported by CoCoA decoding, leave out: {listed}."


def refuse_unsupported(options: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """The options without those of other models, which are refused unless they have no effect."""
    foreign = {name: value for name, value in options.items() if name in INSTEAD or name in WITHOUT_EFFECT}
    if effective := {name: value for name, value in foreign.items() if not is_without_effect(name, value)}:
        reasons = {name: INSTEAD.get(name, "the key-value cache is always used") for name in effective}
        raise ConfigError(f"{what}: {refused(effective, reasons)}")
    return {name: value for name, value in options.items() if name not in foreign}
