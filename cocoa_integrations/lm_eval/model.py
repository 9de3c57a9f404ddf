"""The model ``cocoa`` of lm-evaluation-harness."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json import dumps
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime, Span
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError, unknown
from cocoa_engine.integration import SOURCE_OPTIONS, LoadOptions, changed_options, loading_arguments, safe_logger
from cocoa_integrations._shared.options import split_settings

logger = safe_logger(__name__)

KeyT = TypeVar("KeyT")

DEFAULT_MAX_LENGTH = 2048  # for a model without a context window, as in the harness's own models
_CHUNK = 4  # batches of prompts between two steps of the progress bar
_MODEL_KWARGS = (*SOURCE_OPTIONS, "attn_implementation", "quantization_config")
_OTHERWISE = ("model_name", "tokenizer_name", "runtime", "model_kwargs", "tokenizer_kwargs", "calibrator")
_LOADING = [name for name in LoadOptions.model_fields if name not in _OTHERWISE]  # those under their own names
_IGNORED_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "num_beams", "use_cache")


@register_model("cocoa")
class CocoaLM(TemplateLM):
    """A :class:`~cocoa_engine.CocoaEngine` under lm-evaluation-harness.

    ``generate_until`` decodes with the configured method. ``loglikelihood`` and ``loglikelihood_rolling`` return the
    plain log-probabilities of the model for every method, so that the harness's own tasks give the same results as
    with its ``hf`` model. :meth:`span_score` returns the score of the method; the multiple-choice tasks of this package
    request it.

    Args:
        pretrained: a local folder or a Hub id. Without one, or if it is empty, the embedded model is loaded.
        engine: the engine to use, instead of the options that load one.
        tokenizer: Hub id or local folder of the tokenizer, if it is not the model's.
        device: as in the harness, such as ``cuda:0``. Falls back to the CPU if CUDA is not available.
        threads: CPU threads of torch.
        batch_size: maximum number of sequences per forward pass. ``auto``: the default of the engine.
        max_length: maximum number of tokens of context and answer together. Default: the context window of the model.
        max_gen_toks: maximum number of new tokens, for tasks that do not set one.
        chat_template_args: further arguments of the chat template.
        enable_thinking: an argument of chat templates that have it.
        add_bos_token: whether to put the special tokens of the tokenizer before a text. Default: as the tokenizer does.
        prefix_token_id: precedes a text without context. Default: the begin- or end-of-sequence token of the tokenizer.
        **options: every field of :class:`CocoaConfig` and of :class:`Runtime`; the loading options ``dtype``,
            ``device_map`` (takes precedence over ``device``; without either, the GPUs if there are any, otherwise the
            CPU), ``trust_remote_code`` and ``allow_pickle``; and transformers' options for the source of a model
            (``revision``, ``subfolder``, ``gguf_file``, ...). ``middle_layers`` may be written ``10-20``, and
            ``dola_layers`` ``16-18-20``.

    Raises:
        ConfigError: an option is unknown or out of range.
        ModelLoadError: the model cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        engine: CocoaEngine | None = None,
        tokenizer: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        max_gen_toks: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if max_gen_toks is not None:
            options["max_tokens"] = max_gen_toks
        settings, rest = split_settings(options)
        runtime = {name: rest.pop(name) for name in list(rest) if name in Runtime.model_fields}
        loading = {name: rest.pop(name) for name in list(rest) if name in _LOADING}
        if not_known := sorted(rest.keys() - set(_MODEL_KWARGS)):
            own = ("pretrained", "tokenizer", "device", "threads", "batch_size", "max_length", "max_gen_toks")
            names = sorted({*own, *_LOADING, *_MODEL_KWARGS, *CocoaConfig.model_fields, *Runtime.model_fields})
            raise ConfigError(f"model_args: {unknown(not_known, names, what='option')}")
        if isinstance(batch_size, int) or (isinstance(batch_size, str) and batch_size.isdecimal()):
            runtime["max_batch_size"] = int(batch_size)
        elif batch_size is not None and not str(batch_size).startswith("auto"):
            raise ConfigError(f"batch_size must be a whole number or 'auto' (got {batch_size!r})")
        if threads is not None:
            torch.set_num_threads(threads)
        if engine is None:
            if device is not None:
                gone = device.startswith("cuda") and not torch.cuda.is_available()
                if gone:  # the harness's command line passes cuda:0 by default, even without a GPU
                    logger.warning("there is no %s: the model runs on the CPU", device)
                loading.setdefault("device_map", None if gone or device == "cpu" else device)
            declared = LoadOptions(
                model_name=pretrained or None,
                tokenizer_name=tokenizer,
                runtime=Runtime(**runtime),
                model_kwargs=rest,
                **loading,
            )
            engine = CocoaEngine.from_pretrained(**loading_arguments(declared))
        elif runtime.keys() - {"max_batch_size"} or rest or pretrained or tokenizer or changed_options(loading):
            raise ConfigError("engine= is given, so options of loading or running would have no effect; leave them out")
        self.engine = engine.without_calibrator()  # the harness does not read risks
        self.config = engine.config.replace(**_as_settings(settings))
        self.tokenizer = engine.tokenizer
        self._batch_size = runtime.get("max_batch_size", engine.runtime.max_batch_size)
        self._max_length = max_length
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._chat_template_args = {**(chat_template_args or {}), **thinking}
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return int(self.engine.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        tokenizer = self.engine.tokenizer
        candidates = (self._prefix_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        return int(next(token_id for token_id in candidates if token_id is not None))

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of context and answer together."""
        return self._max_length or self.engine.context_window or DEFAULT_MAX_LENGTH

    @property
    def batch_size(self) -> int:
        """Maximum number of sequences per forward pass."""
        return int(self._batch_size)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.engine.held_model.device

    @property
    def tokenizer_name(self) -> str:
        """The name of the model, which the harness uses as a key of its request caches."""
        return self.engine.model_name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """The description of the model that the harness writes to its results."""
        model = {"model_name": self.engine.model_name, "model_dtype": str(self.engine.held_model.dtype)}
        dumped = {"cocoa_config": self.config, "cocoa_runtime": self.engine.runtime}
        return model | {name: settings.model_dump(mode="json") for name, settings in dumped.items()}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text. Special tokens are added once, as in the harness's ``hf`` model."""
        special = self._add_bos_token is not False if add_special_tokens is None else add_special_tokens
        return self.engine.encode(string, add_special_tokens=special)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Chat messages as one text. If the template refuses a system message, it is left out, as in the harness."""
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        options = ends | self._chat_template_args
        try:
            return self.engine.render_chat(chat_history, **options)
        except ChatTemplateError:
            others = [message for message in chat_history if message["role"] != "system"]
            if not self.engine.has_chat_template or len(others) == len(chat_history):
                raise
            logger.warning("the chat template refuses the messages; the system message is left out")
            return self.engine.render_chat(others, **options)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """log p of each continuation, and whether it is what greedy decoding generates."""
        results: dict[int, tuple[float, bool]] = {}
        pairs = [(context, continuation) for _, context, continuation in requests]
        with tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            for number, span in self._scored(pairs):
                best = [top[0][0] for top in span.top_log_probs or ()]
                results[number] = math.fsum(span.token_log_probs), best == span.token_ids
                self.cache_hook.add_partial("loglikelihood", requests[number][0], results[number])
                bar.update()
        return [results[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of complete texts. A text longer than the context is split into windows."""
        results = []
        for request in tqdm(requests, desc="Running loglikelihood_rolling requests", disable=disable_tqdm):
            (text,) = request.args
            # the length is that of the input: the engine also feeds the last predicted token
            ids, length = self.tok_encode(text), self.max_length - 1
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=length, context_len=1)
            windows = list(map(make_disjoint_window, rolling))
            total = math.fsum(value for _, span in self._scored(windows) for value in span.token_log_probs)
            results.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The texts of :meth:`generations`."""
        with tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            return [answer.text for answer in self.generations(requests, bar.update)]

    def generations(self, requests: Sequence[Any], advance: Callable[[int], object]) -> list[Generation]:
        """Answers to requests of ``generate_until``, by the configured method.

        ``advance`` is called with the number of answers since the last call.

        Raises:
            ConfigError: a task asks for sampling, or for another option that is not supported.
        """
        results: dict[int, Generation] = {}
        options_of = [dumps(request.args[1], sort_keys=True, default=str) for request in requests]
        for numbers in _grouped(options_of).values():
            config = self._generation_config(requests[numbers[0]].args[1])
            max_prompt = self.max_length - config.max_new_tokens
            if max_prompt < 1:
                raise ConfigError(
                    f"max_gen_toks={config.max_new_tokens} leaves no tokens for a prompt: {self.max_length} in all"
                )
            prompts = {number: self.tok_encode(requests[number].args[0])[-max_prompt:] for number in numbers}
            # prompts of similar length end at about the same time
            ordered = sorted(numbers, key=lambda number: len(prompts[number]), reverse=True)
            size = _CHUNK * self.batch_size
            batch_size = min(self.batch_size, self.engine.runtime.max_batch_size)
            for chunk in (ordered[start : start + size] for start in range(0, len(ordered), size)):
                asked = [prompts[number] for number in chunk]
                answers = self.engine.generate_batch(asked, config=config, batch_size=batch_size)
                for number, answer in zip(chunk, answers, strict=True):
                    results[number] = answer
                    self.cache_hook.add_partial("generate_until", requests[number].args, answer.text)
                advance(len(chunk))
        return [results[number] for number in range(len(requests))]

    def span_score(self, requests: Sequence[Any]) -> list[float]:
        """The method's score of each continuation, taken as one span after its context.

        The score is log p * (1 + alpha * MLDS) for CoCoA-SIG, and log p for greedy, where log p is by default the sum
        over the tokens (``span_log_prob``).
        """
        with tqdm(total=len(requests), desc="Running span_score requests") as bar:
            return [span.score for span in self.spans(requests, bar.update)]

    def spans(self, requests: Sequence[Any], advance: Callable[[int], object]) -> list[Span]:
        """The spans of :meth:`span_score`. ``advance`` is called with the number of spans since the last call."""
        results: dict[int, Span] = {}
        for context, numbers in _grouped(request.args[0] for request in requests).items():
            before = self.tok_encode(context)
            texts = [self._continuation(context, before, requests[number].args[1]) for number in numbers]
            before = before[-max(1, self.max_length - max(map(len, texts))) :]
            scores = self.engine.score(before, texts, config=self.config)
            results |= {number: scored.spans[0] for number, scored in zip(numbers, scores, strict=True)}
            advance(len(numbers))
        return [results[number] for number in range(len(requests))]

    def _continuation(self, context: str, before: list[int], text: str) -> list[int]:
        """Token ids of a text after a context whose ids are ``before``, split as the engine splits them.

        If a chat template has already added the first special token, it is not added again.
        """
        whole = self.tok_encode(context + text)
        if whole[: len(before)] == before and len(whole) > len(before):
            return whole[len(before) :]
        return self.engine.encode(text, add_special_tokens=False)

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[int, Span]]:
        """The number and the span of each continuation, those of one context together."""
        if (longest := max((len(text) for _, text in pairs), default=0)) >= self.max_length:
            raise PromptError(f"a text to score has {longest} tokens; with a context it must fit {self.max_length}")
        groups = _grouped(tuple(context[len(text) - self.max_length :]) for context, text in pairs)
        for context, numbers in sorted(groups.items()):  # contexts with a common prefix follow each other
            texts = [pairs[number][1] for number in numbers]
            scored = self.engine.score(list(context), texts, config=CocoaConfig(method="greedy", top_logprobs=1))
            yield from ((number, text.spans[0]) for number, text in zip(numbers, scored, strict=True))

    def _generation_config(self, options: Mapping[str, Any]) -> CocoaConfig:
        """The settings from a task's ``generation_kwargs``."""
        options_of_task = normalize_gen_kwargs(dict(options), self.config.max_new_tokens)
        if options_of_task.get("do_sample") and options_of_task.get("temperature", 0.0) > 0:
            raise ConfigError(
                "the task asks for sampling, which the model 'cocoa' does not support: pass gen_kwargs "
                "do_sample=False,temperature=0 (a model_arg temperature samples the method's branches)"
            )
        if options_of_task.get("num_beams", 1) != 1:
            raise ConfigError("the task asks for beam search, which the model 'cocoa' does not support")
        until, length = options_of_task.pop("until", None) or [], options_of_task.pop("max_gen_toks")
        settings = {name: value for name, value in options_of_task.items() if name not in _IGNORED_SAMPLING}
        if not_known := sorted(settings.keys() - CocoaConfig.model_fields.keys()):
            names = sorted({*CocoaConfig.model_fields, "until", "max_gen_toks", *_IGNORED_SAMPLING})
            raise ConfigError(f"gen_kwargs: {unknown(not_known, names, what='option')}")
        texts = [[text] if isinstance(text, str) else text for text in (until, settings.get("stop") or ())]
        stop = filter(None, (*texts[0], *texts[1], *self.config.stop))
        settings |= {"max_new_tokens": length, "stop": tuple(dict.fromkeys(stop))}
        return self.config.replace(**_as_settings(settings))


def _grouped(keys: Iterable[KeyT]) -> dict[KeyT, list[int]]:
    groups: dict[KeyT, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return groups


def _as_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from an argument string, in which a comma ends an argument and numbers are parsed.

    A window is written ``10-20``, several layers ``16-18-20``, and a single layer ``16``.
    """
    parsed = dict(settings)
    if isinstance(parsed.get("middle_layers"), str):
        parsed["middle_layers"] = tuple(parsed["middle_layers"].split("-"))
    if isinstance(parsed.get("dola_layers"), (int, str)):
        parsed["dola_layers"] = str(parsed["dola_layers"]).replace("-", ",")
    return parsed
