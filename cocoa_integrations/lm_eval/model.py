"""The model ``cocoa`` of lm-evaluation-harness."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from json import dumps
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError
from cocoa_engine.messages import unknown
from cocoa_engine.model.generation_config import logits_processors
from cocoa_engine.model.loading import SOURCE_OPTIONS
from cocoa_integrations.settings import split_settings

logger = logging.getLogger(__name__)

DEFAULT_MAX_LENGTH = 2048  # of a model that names no context window, as in the harness's own models
_SURE = -math.log(2)  # a token above this log-probability is the most probable one
_CHUNK = 4  # batches of prompts between two steps of the progress bar
_LOADED = (*SOURCE_OPTIONS, "attn_implementation", "quantization_config")
_NOT_SAMPLED = ("do_sample", "temperature", "top_p", "top_k", "min_p", "num_beams", "use_cache")


@register_model("cocoa")
class CocoaLM(TemplateLM):
    """A :class:`~cocoa_engine.CocoaEngine` under lm-evaluation-harness.

    ``generate_until`` decodes with the configured method. ``loglikelihood`` and ``loglikelihood_rolling`` are the plain
    log-probabilities of the model, whatever the method, so that the harness's own tasks give what its ``hf`` model
    gives; :meth:`span_score`, which our multiple-choice tasks ask for, is the method's score.

    Args:
        pretrained: a local folder or a Hub id; none, or an empty one, is the embedded model.
        engine: take this engine instead of loading one.
        tokenizer: where the tokenizer is, if elsewhere.
        dtype: as in :meth:`CocoaEngine.from_pretrained`.
        device: as in the harness, such as ``cuda:0``; the CPU where there is no such GPU.
        device_map: where the layers go, as in transformers; it goes before ``device``.
        trust_remote_code: run code that comes with the model.
        allow_pickle: read weights stored as pickle.
        threads: CPU threads of torch.
        batch_size: at most so many sequences share a forward pass; ``auto`` is the engine's own choice.
        max_length: at most so many tokens of context and answer together; by default the model's context window.
        max_gen_toks: at most so many new tokens, where a task does not say.
        chat_template_args: what the chat template is given beside the messages.
        enable_thinking: the same, for the templates that have it.
        add_bos_token: put the tokenizer's special tokens before a text, or not; by default as the tokenizer does.
        prefix_token_id: stands before a text without context; by default the tokenizer's first or last token.
        **options: every field of :class:`CocoaConfig` and of :class:`Runtime`, and transformers' options that say where
            a model comes from (``revision``, ``subfolder``, ``gguf_file``, ...). ``middle_layers`` may be written
            ``10-20``, ``dola_layers`` ``16-18-20``.

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
        dtype: str = "auto",
        device: str | None = None,
        device_map: Any = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
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
        _refuse_unknown(rest)
        if isinstance(batch_size, int) or (isinstance(batch_size, str) and batch_size.isdecimal()):
            runtime["max_batch_size"] = int(batch_size)
        elif batch_size is not None and not str(batch_size).startswith("auto"):
            raise ConfigError(f"batch_size must be a whole number or 'auto' (got {batch_size!r})")
        if threads is not None:
            torch.set_num_threads(threads)
        if engine is None:
            engine = CocoaEngine.from_pretrained(
                pretrained or None,
                tokenizer_name=tokenizer,
                runtime=Runtime(**runtime),
                dtype=dtype,
                device_map=_device(device) if device_map is None else device_map,
                trust_remote_code=trust_remote_code,
                allow_pickle=allow_pickle,
                model_kwargs=rest,
            )
        elif runtime.keys() - {"max_batch_size"} or rest or pretrained or tokenizer:
            raise ConfigError("engine is loaded already: give no options of loading or running with it")
        self.engine = engine.without_calibrator()  # nobody reads a risk here
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
        """The token that ends a text."""
        return int(self.engine.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context."""
        first = self.engine.tokenizer.bos_token_id
        known = (self._prefix_token_id, first, self.engine.tokenizer.eos_token_id)
        return int(next(token_id for token_id in known if token_id is not None))

    @property
    def max_length(self) -> int:
        """At most so many tokens of context and answer together."""
        return self._max_length or self.engine.context_window or DEFAULT_MAX_LENGTH

    @property
    def batch_size(self) -> int:
        """At most so many sequences share a forward pass."""
        return int(self._batch_size)

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self.engine.model.device

    @property
    def tokenizer_name(self) -> str:
        """The model's name, by which the harness tells its caches of requests apart."""
        return self.engine.model_name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        return {
            "model_name": self.engine.model_name,
            "model_dtype": str(self.engine.model.dtype),
            "cocoa_config": self.config.model_dump(mode="json"),
            "cocoa_runtime": self.engine.runtime.model_dump(mode="json"),
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, special tokens added once, as the harness's ``hf`` model does."""
        if add_special_tokens is None:
            first = self.engine.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = self._add_bos_token is not False and not has_bos_prefix(string, first)
        return self.engine.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Chat messages as one text. A template that refuses a system message does without, as in the harness.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._chat_template_args,
        }
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
        """log p of each continuation, and whether greedy decoding would write it."""
        results: dict[int, tuple[float, bool]] = {}
        pairs = [(context, continuation) for _, context, continuation in requests]
        with tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            for context, numbers, log_probs in self._log_probs(pairs):
                unsure = [number for number, values in zip(numbers, log_probs, strict=True) if min(values) <= _SURE]
                greedy = dict(zip(unsure, self._are_greedy(context, [pairs[n][1] for n in unsure]), strict=True))
                for number, values in zip(numbers, log_probs, strict=True):
                    results[number] = math.fsum(values), greedy.get(number, True)
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], results[number])
                bar.update(len(numbers))
        return [results[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, in windows of the context's length where one is longer."""
        results = []
        for request in tqdm(requests, desc="Running loglikelihood_rolling requests", disable=disable_tqdm):
            (text,) = request.args
            windows = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,  # of the input: the last token it predicts is fed too
                    context_len=1,
                )
            ]
            total = math.fsum(value for *_, texts in self._log_probs(windows) for values in texts for value in values)
            results.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers by the configured method.

        Raises:
            ConfigError: a task asks for sampling, or for something else that this model does not do.
        """
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        results: dict[int, str] = {}
        with tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for numbers in groups.values():
                config = self._generation_config(requests[numbers[0]].args[1])
                room = self.max_length - config.max_new_tokens
                if room < 1:
                    raise ConfigError(
                        f"max_gen_toks={config.max_new_tokens} leaves no room for a prompt in {self.max_length} tokens"
                    )
                prompts = {number: self.tok_encode(requests[number].args[0])[-room:] for number in numbers}
                # those of a length end at about the same time
                ordered = sorted(numbers, key=lambda number: len(prompts[number]), reverse=True)
                for start in range(0, len(ordered), _CHUNK * self.batch_size):
                    chunk = ordered[start : start + _CHUNK * self.batch_size]
                    batch_size = min(self.batch_size, self.engine.runtime.max_batch_size)
                    answers = self.engine.generate_batch(
                        [prompts[number] for number in chunk], config=config, batch_size=batch_size
                    )
                    for number, answer in zip(chunk, answers, strict=True):
                        results[number] = answer.text
                        self.cache_hook.add_partial("generate_until", requests[number].args, answer.text)
                    bar.update(len(chunk))
        return [results[number] for number in range(len(requests))]

    def span_score(self, requests: list[Any]) -> list[float]:
        """The method's score of each continuation as one span after its context: for CoCoA-SIG
        log p * (1 + alpha * MLDS), for greedy log p (a sum or a mean, by ``span_log_prob``)."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(request.args[0], []).append(number)
        results: dict[int, float] = {}
        with tqdm(total=len(requests), desc="Running span_score requests") as bar:
            for context, numbers in groups.items():
                before = self.tok_encode(context)
                texts = [self._continuation(context, before, requests[number].args[1]) for number in numbers]
                found = self.engine.score(before, texts, config=self.config)
                for number, scored in zip(numbers, found, strict=True):
                    results[number] = math.fsum(span.score for span in scored.spans)
                bar.update(len(numbers))
        return [results[number] for number in range(len(requests))]

    def _continuation(self, context: str, before: list[int], text: str) -> list[int]:
        """Token ids of a text after a context whose ids are ``before``, as the engine splits the two.

        A chat template may have written the first special token already, which the engine would put there again.
        """
        whole = self.tok_encode(context + text)
        if whole[: len(before)] == before and len(whole) > len(before):
            return whole[len(before) :]
        return self.engine.encode(text, add_special_tokens=False)

    def _log_probs(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> Iterator[tuple[list[int], list[int], list[list[float]]]]:
        """For each context: the numbers of its continuations, and the log-probabilities of their tokens."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            room = self.max_length - len(continuation)
            if room < 1:
                raise PromptError(
                    f"a text to score has {len(continuation)} tokens; with a context it must fit {self.max_length}"
                )
            groups.setdefault(tuple(context[-room:]), []).append(number)
        for key in sorted(groups):  # those that begin alike follow each other
            context, numbers = list(key), groups[key]
            texts = [pairs[number][1] for number in numbers]
            scored = self.engine.score(context, texts, config=CocoaConfig(method="greedy"))
            yield context, numbers, [one.spans[0].token_log_probs for one in scored]

    def _are_greedy(self, context: list[int], continuations: Sequence[list[int]]) -> list[bool]:
        """Whether each token of a continuation is the most probable one."""
        if not continuations:
            return []
        longest = max(map(len, continuations))
        model = self.engine.model
        if logits_processors(model, frozenset(), context, longest):
            # the engine would decode with what the model's generation config does to the distribution
            return [self._is_argmax(context, continuation) for continuation in continuations]

        def none_agrees(ids: torch.Tensor, _: Any) -> bool:
            written = ids[0, len(context) :].tolist()
            return not any(continuation[: len(written)] == written for continuation in continuations)

        config = CocoaConfig(method="greedy", max_new_tokens=longest)
        written = self.engine.generate(context, config=config, stopping_criteria=none_agrees).token_ids
        return [written[: len(continuation)] == continuation for continuation in continuations]

    def _is_argmax(self, context: list[int], continuation: list[int]) -> bool:
        model = self.engine.model
        ids = torch.tensor([[*context, *continuation[:-1]]], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, -len(continuation) :]  # [T, V]
        return bool(logits.argmax(dim=-1).tolist() == continuation)

    def _generation_config(self, options: Mapping[str, Any]) -> CocoaConfig:
        """The settings of a task's ``generation_kwargs``."""
        given = normalize_gen_kwargs(dict(options), self.config.max_new_tokens)
        if given.get("do_sample") and given.get("temperature", 0.0) > 0:
            raise ConfigError(
                "the task asks for sampling, which the model 'cocoa' does not do: pass gen_kwargs "
                "do_sample=False,temperature=0 (a model_arg temperature samples the method's branches)"
            )
        if given.get("num_beams", 1) != 1:
            raise ConfigError("the task asks for beam search, which the model 'cocoa' does not do")
        until, length = given.pop("until", None) or [], given.pop("max_gen_toks")
        settings = {name: value for name, value in given.items() if name not in _NOT_SAMPLED}
        if strangers := sorted(settings.keys() - CocoaConfig.model_fields.keys()):
            known = sorted({*CocoaConfig.model_fields, "until", "max_gen_toks", *_NOT_SAMPLED})
            raise ConfigError(f"gen_kwargs: {unknown(strangers, known, what='option')}")
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        return self.config.replace(
            **_as_settings(settings), max_new_tokens=length, stop=tuple(dict.fromkeys((*stop, *self.config.stop)))
        )


def _device(device: str | None) -> str | None:
    """Where the harness wants the model; its command line says ``cuda:0`` by itself, also where there is none."""
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        logger.warning("there is no %s: the model runs on the CPU", device)
        return None
    return None if device == "cpu" else device


def _refuse_unknown(rest: Mapping[str, Any]) -> None:
    if strangers := sorted(rest.keys() - set(_LOADED)):
        own = ("pretrained", "tokenizer", "dtype", "device_map", "threads", "batch_size", "max_length", "max_gen_toks")
        known = sorted({*own, *_LOADED, *CocoaConfig.model_fields, *Runtime.model_fields})
        raise ConfigError(f"model_args: {unknown(strangers, known, what='option')}")


def _as_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a text of options can hold them, where a comma ends an option and a number is read as one.

    A window is written ``10-20``, layers ``16-18-20``, a single one ``16``.
    """
    known = dict(settings)
    if isinstance(known.get("middle_layers"), str):
        known["middle_layers"] = tuple(known["middle_layers"].split("-"))
    if isinstance(known.get("dola_layers"), (int, str)):
        known["dola_layers"] = str(known["dola_layers"]).replace("-", ",")
    return known
