"""CoCoA decoding in transformers' ``generate``: ``model.generate(**inputs, custom_generate=cocoa)``."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cocoa_engine import (
    METHODS,
    CocoaConfig,
    CocoaEngine,
    ConfigError,
    Generation,
    PerPrompt,
    PromptError,
    RiskCalibrator,
    Runtime,
)
from cocoa_engine.model.light_model import import_model_classes
from cocoa_integrations._shared.options import OF_SAMPLING

import_model_classes()  # before transformers' own imports, which would show torchao's messages

# isort: split
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import (  # noqa: E402
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402
from transformers.generation.utils import ALL_CACHE_NAMES  # noqa: E402

__all__ = ["Cocoa", "CocoaGenerateOutput", "cocoa"]

GIVEN_BY_GENERATE = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty")
"""Settings that ``generate`` already has, under the same names."""

_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_k": (None, 0),
    "top_p": (None, 1.0),
    "min_p": (None,),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "cache_implementation": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
"""Unsupported options of a generation config, each with the values that have no effect."""

_PREPARED = {*ALL_CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
"""Arguments that ``generate`` always prepares for the forward pass of the model."""


@dataclass
class CocoaGenerateOutput(GenerateDecoderOnlyOutput):
    """The output of ``generate`` with ``return_dict_in_generate=True``.

    Attributes:
        sequences: ``[B, T + t]``, prompts and answers.
        generations: the answer to each row, with the risk of its spans.
    """

    generations: list[Generation] | None = None


class Cocoa:
    """A decoding loop for ``generate(..., custom_generate=...)`` with the same results as :class:`CocoaEngine`.

    The arguments of ``generate`` keep their meaning: ``max_new_tokens``, end and pad tokens, logits processors,
    stopping criteria, a streamer, left-padded batches. ``do_sample`` samples spans, with ``temperature``; ``top_k`` has
    no effect if it is at least ``max_candidates``, and is refused otherwise. With ``method="sample"``, ``do_sample``
    samples tokens as ``generate`` does, with ``temperature``, ``top_k`` and ``top_p``. Every other field of
    :class:`~cocoa_engine.CocoaConfig` can also be given to ``generate``, where it takes precedence. A pipeline of
    transformers takes the loop too: ``pipe(prompt, custom_generate=cocoa)``. Pipelines sample by default; give
    ``do_sample=False`` for greedy choices.

    Example:
        >>> output = model.generate(**inputs, custom_generate=cocoa, max_new_tokens=64, alpha=1.0)
        >>> calibrated = Cocoa(tokenizer=tokenizer, calibrator="embedded", max_risk=0.8)
        >>> output = model.generate(**inputs, custom_generate=calibrated, return_dict_in_generate=True)
        >>> output.generations[0].max_risk

    Args:
        tokenizer: for the texts of spans, which are empty without one, and for ``stop``. The ``tokenizer`` argument of
            ``generate`` does not reach a callable ``custom_generate``, and transformers therefore refuses
            ``stop_strings``: give ``stop`` instead.
        config: the settings to start from.
        runtime: how the model is run.
        calibrator: a risk calibrator, its JSON file, or `None`; as for :class:`~cocoa_engine.CocoaEngine`.
        **settings: single fields of :class:`~cocoa_engine.CocoaConfig`.

    Raises:
        ConfigError: a setting is unknown, out of range, or one that ``generate`` already has. A call also raises it for
            an argument of ``generate`` that is not supported.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: CocoaConfig | None = None,
        runtime: Runtime | None = None,
        calibrator: RiskCalibrator | str | Path | None = "auto",
        **settings: Any,
    ) -> None:
        if taken := [name for name in GIVEN_BY_GENERATE if name in settings]:
            raise ConfigError(f"give {', '.join(taken)} to generate itself.")
        self._decoder = _Decoder(tokenizer)
        self._config = (config or CocoaConfig()).replace(**settings)
        self._runtime = runtime
        self._calibrator = "auto" if calibrator == "auto" else RiskCalibrator.of(calibrator)
        self._refuse_stop_without_tokenizer(self._config)
        # generate inspects the signature to find the keyword arguments for this loop
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in sorted(_SETTINGS)]
        usual = inspect.signature(Cocoa.__call__).parameters.values()
        *first, last = [parameter for parameter in usual if parameter.name != "self"]
        self.__signature__ = inspect.Signature([*first, *own, last])

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[LogitsProcessor],
        stopping_criteria: Sequence[StoppingCriteria],
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> CocoaGenerateOutput | Tensor:
        """Decode. ``generate`` calls this with the inputs it has prepared.

        Returns:
            Token ids of prompts and answers, ``[B, T + t]``, padded on the right; with ``return_dict_in_generate``, a
            :class:`CocoaGenerateOutput`.

        Raises:
            ConfigError: an option is not supported, or a batch has a streamer or no pad token.
            PromptError: a prompt is not left-padded, or has unusual position ids.
        """
        streamer = streamer or _of_generate(sys._getframe(1), "streamer")
        if _of_generate(sys._getframe(1), "assistant_model") is not None:
            raise ConfigError("CoCoA decoding does not support assistant_model; leave it out.")
        settings = {name: options.pop(name) for name in _SETTINGS if options.get(name) is not None}
        config = _sampling(generation_config, self._config.replace(**settings))
        _refuse(generation_config, options, config)
        self._refuse_stop_without_tokenizer(config)
        rows, width = input_ids.shape
        if streamer is not None and rows > 1:
            raise ConfigError(f"a streamer takes one answer at a time; this batch has {rows} rows.")
        lengths = [criterion.max_length for criterion in stopping_criteria if isinstance(criterion, MaxLengthCriteria)]
        config = config.replace(max_new_tokens=max(1, min(lengths, default=generation_config.max_length) - width))
        if generation_config.repetition_penalty not in (None, 1.0):
            config = config.replace(repetition_penalty=1.0)  # generate's own processor applies it
        prompts, paddings = _unpadded(input_ids, options.get("attention_mask"), options.get("position_ids"))
        pad = getattr(generation_config, "_pad_token_tensor", None)
        if pad is None and rows > 1:
            raise ConfigError("the answers of a batch may differ in length: give generate a pad_token_id.")

        engine = CocoaEngine(
            model, self._decoder, config=config, runtime=self._runtime, calibrator=self._calibrator
        )  # cheap: the analysis of the model is cached with the model
        own = (MaxLengthCriteria, EosTokenCriteria)
        ends = {
            int(end) for rule in stopping_criteria if isinstance(rule, EosTokenCriteria) for end in rule.eos_token_id
        }
        only_ends = GenerationConfig(eos_token_id=sorted(ends))  # generate's processors do everything else
        processors = [processor for processor in logits_processor if not _applied_by_the_engine(processor, config)]
        criteria = [criterion for criterion in stopping_criteria if not isinstance(criterion, own)]
        row_processors, row_criteria = [], []
        for row, padding in enumerate(paddings):
            row_processors.append([_for_row(processor, row, rows, padding, processes=True) for processor in processors])
            row_criteria.append([_for_row(criterion, row, rows, padding, processes=False) for criterion in criteria])

        generations: list[Generation]
        if streamer is None:
            generations = engine.generate_batch(
                prompts,
                logits_processor=PerPrompt(row_processors),
                stopping_criteria=PerPrompt(row_criteria),
                generation_config=only_ends,
            )
        else:
            try:
                with engine.stream(
                    prompts[0],
                    logits_processor=row_processors[0],
                    stopping_criteria=row_criteria[0],
                    generation_config=only_ends,
                ) as spans:
                    for span in spans:
                        for token_id in span.token_ids:
                            streamer.put(torch.tensor([token_id]))
            finally:
                streamer.end()
            assert spans.generation is not None
            generations = [spans.generation]
        length = max(len(generation.token_ids) for generation in generations)
        fill = 0 if pad is None else int(pad)  # a single row needs no padding
        answers = [[*answer.token_ids, *[fill] * (length - len(answer.token_ids))] for answer in generations]
        answer_ids = torch.tensor(answers, dtype=input_ids.dtype, device=input_ids.device)
        sequences = torch.cat([input_ids, answer_ids], dim=1)
        if generation_config.return_dict_in_generate:
            return CocoaGenerateOutput(sequences=sequences, generations=generations)
        return sequences

    def _refuse_stop_without_tokenizer(self, config: CocoaConfig) -> None:
        if config.stop and self._decoder.tokenizer is None:
            raise ConfigError("stop needs a tokenizer: custom_generate=Cocoa(tokenizer=tokenizer).")


class _Decoder:
    """The part of a tokenizer that the engine needs when prompts are token ids. Copying it returns the same object.

    Without a tokenizer, tokens have no text.
    """

    eos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.added_tokens_decoder = getattr(tokenizer, "added_tokens_decoder", {})
        self.is_fast = getattr(tokenizer, "is_fast", False)
        self.convert_ids_to_tokens = getattr(tokenizer, "convert_ids_to_tokens", None)

    def __call__(self, text: str, **_: Any) -> NoReturn:
        raise PromptError("prompts are token ids here.")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Decoder":
        return self

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode(token_ids, **options))


_SETTINGS = CocoaConfig.model_fields.keys() - {*GIVEN_BY_GENERATE}


def _for_row(
    call: Callable[..., Any], row: int, rows: int, padding: Tensor, *, processes: bool
) -> Callable[[Tensor, Any], Any]:
    """A processor or a criterion for one row of a batch, called as ``generate`` would: padded, at its index.

    Some of them store state for each row, such as the n-grams of the prompt or the length of its padding. ``padding``,
    ``[1, P]``, has the pad tokens before the prompt; only processors have scores with rows.
    """

    def for_row(ids: Tensor, scores: Any) -> Any:
        batch = torch.cat([padding.to(ids), ids], dim=1).repeat(rows, 1)
        result = call(batch, scores.repeat(rows, 1) if processes else scores)
        if not isinstance(result, Tensor) or result.ndim == 0 or len(result) != rows:
            return result
        return result[row : row + 1] if processes else result[row]

    return for_row


def _of_generate(caller: FrameType, name: str) -> Any:
    """A local variable of the calling ``generate``, or ``None`` for another caller.

    ``generate`` does not pass ``streamer`` to a callable (true up to transformers 5.23). If the loop ignored the
    streamer, its consumer would wait forever.
    """
    is_generate = caller.f_code is inspect.unwrap(GenerationMixin.generate).__code__
    return caller.f_locals.get(name) if is_generate else None


def _refuse(generation_config: GenerationConfig, options: Mapping[str, Any], config: CocoaConfig) -> None:
    """Refuse unsupported options, all of them in one :class:`ConfigError`.

    When a method samples spans, it does so among ``max_candidates`` tokens at most. A larger ``top_k``, such as the
    default 50 of transformers, keeps all of them.
    """
    refused = dict(_UNSUPPORTED)
    if generation_config.do_sample:
        drawn_with = OF_SAMPLING if METHODS[config.method].samples else ()
        refused |= {name: value for name, value in _SAMPLING.items() if name not in drawn_with}
    values = {name: getattr(generation_config, name, None) for name in refused}
    top_k = values.get("top_k")
    if top_k is not None and _keeps_all_candidates(top_k, config):
        del values["top_k"]
    unsupported = [f"{name}={value!r}" for name, value in values.items() if value not in refused[name]]
    caches = [name for name in ALL_CACHE_NAMES if name in options]
    unsupported += [name for name in caches if getattr(options[name], "_is_user_defined", False)]
    unsupported += [name for name, value in options.items() if value is not None and name not in _PREPARED]
    if unsupported:
        hint = ""
        if any(option.partition("=")[0] in _SAMPLING for option in unsupported):
            hint = (
                " gamma and max_candidates set what may be sampled: give do_sample=False (the model's own generation "
                "config may enable sampling), or top_p=1.0 and top_k=0 together with a temperature."
            )
        raise ConfigError(f"not supported by CoCoA decoding, leave out: {', '.join(unsupported)}.{hint}")


def _keeps_all_candidates(top_k: int, config: CocoaConfig) -> bool:
    return top_k >= config.max_candidates and METHODS[config.method].branches


def _applied_by_the_engine(processor: LogitsProcessor, config: CocoaConfig) -> bool:
    """Whether a processor is one of ``generate`` for sampling that the engine applies itself, or has no effect."""
    samples = METHODS[config.method].samples  # others are the caller's own
    match processor:
        case TopKLogitsWarper():
            return bool(processor.top_k == config.top_k) if samples else _keeps_all_candidates(processor.top_k, config)
        case TopPLogitsWarper():
            return samples and bool(processor.top_p == config.top_p)
    return isinstance(processor, TemperatureLogitsWarper)


def _sampling(generation_config: GenerationConfig, config: CocoaConfig) -> CocoaConfig:
    """The settings with those of ``generate`` for sampling."""
    if not generation_config.do_sample:
        return config.replace(temperature=0.0)
    temperature = generation_config.temperature
    names = OF_SAMPLING if METHODS[config.method].samples else ()
    options = {name: getattr(generation_config, name) for name in names}
    return config.replace(
        temperature=1.0 if temperature is None else temperature,
        **{name: value for name, value in options.items() if value is not None},
    )


def _unpadded(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> tuple[list[list[int]], list[Tensor]]:
    """The prompt of each row, and the ``[1, P]`` pad tokens before it, which must be on the left."""
    prompts, paddings = [], []
    for row, ids in enumerate(input_ids):
        length = len(ids) if mask is None else int(mask[row].sum())
        start = len(ids) - length
        if mask is not None and not bool(mask[row, start:].all()):
            raise PromptError(f"row {row}: prompts must be padded on the left only (tokenizer.padding_side = 'left').")
        if positions is not None:
            own = positions[min(row, len(positions) - 1), start:]
            if own.tolist() != list(range(length)):
                raise PromptError(f"row {row}: position_ids other than 0, 1, 2, ... are not supported; leave them out.")
        prompts.append(ids[start:].tolist())
        paddings.append(ids[None, :start])
    return prompts, paddings


cocoa = Cocoa()
"""The decoding loop with default settings."""
