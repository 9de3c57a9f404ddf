"""The settings of a server, and the parameters of other servers that it refuses or ignores."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, SecretStr, model_validator

from cocoa_engine.arguments import SettingsModel

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""The names by which programs of the same machine reach a server on a loopback address."""


class ServerSettings(SettingsModel):
    """Settings of a server: who may use it, and the limits of a request. Immutable.

    Raises:
        ConfigError: settings are unknown or out of range, or another machine could use the server without a key.
    """

    _what: ClassVar[str] = "server setting"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="Address to listen on. Any other than a loopback address needs a key.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on. 0: a free one.")
    api_keys: tuple[SecretStr, ...] = Field(
        (), description="Keys, one of which a client must send as its API key. Without keys, every client is served."
    )
    allow_no_key: bool = Field(
        False, description="Serve other machines without a key, as behind a proxy that checks who calls."
    )
    allowed_hosts: tuple[str, ...] | None = Field(
        None,
        description="Names by which clients may call the server (the header Host), against DNS rebinding; `*` allows "
        "all. Default: localhost, if the server listens on a loopback address, otherwise all.",
    )
    served_names: tuple[str, ...] = Field(
        (),
        description="Names of the model. Other names are then refused. Default: every name is served, and the model is "
        "listed under its own.",
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1, le=2**30, description="Maximum size of the body of a request.")
    max_prompt_chars: int = Field(
        2**20,
        ge=1,
        le=2**30,
        description="Maximum number of characters of all that a prompt may contain: messages, tools, formats and "
        "variables of the template. Texts of messages count as they are, other values as JSON writes them, and a token "
        "id as one.",
    )
    max_prompts: int = Field(256, ge=1, le=10_000, description="Maximum number of prompts or texts in one request.")
    max_messages: int = Field(2000, ge=1, description="Maximum number of messages.")
    max_tools: int = Field(128, ge=0, description="Maximum number of tools.")
    max_json_depth: int = Field(64, ge=1, le=200, description="Maximum nesting of the JSON of a request.")
    max_n: int = Field(8, ge=1, le=10_000, description="Maximum number of answers to one request (`n`).")
    max_stop: int = Field(16, ge=0, description="Maximum number of stop texts.")
    max_answer_tokens: int = Field(
        32768, ge=1, le=10**7, description="Maximum number of new tokens that a request may ask for."
    )
    max_candidates: int = Field(64, ge=1, description="Maximum of `max_candidates` in a request.")
    max_span_tokens: int = Field(256, ge=1, description="Maximum of `max_span_tokens` in a request.")
    retry_after: int = Field(1, ge=0, description="Seconds after which a refused client should try again.")
    progress_interval: float = Field(
        5.0, gt=0, description="Seconds between signs of life in a stream while its next span is not decided."
    )
    write_timeout: float = Field(
        60.0,
        ge=0.01,
        le=86400,
        description="Seconds after which a stream ends whose client does not read what it was sent.",
    )
    shutdown_timeout: float = Field(
        30.0, ge=0, le=10**6, description="Seconds that running answers are given to end after SIGTERM."
    )
    risk_in_logprobs: bool = Field(
        True,
        description="Whether risk is also in `logprobs`, the only place where some clients keep fields that they do "
        "not know.",
    )
    log_prompts: bool = Field(False, description="Write prompts and answers to the log.")

    @property
    def known_hosts(self) -> tuple[str, ...]:
        """The accepted names in the header Host; ``*`` stands for all."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return (*LOOPBACK_NAMES, self.host) if is_loopback(self.host) else ("*",)

    @model_validator(mode="after")  # an error of the field would show the keys
    def _keys_are_visible(self) -> ServerSettings:
        for number, key in enumerate(self.api_keys):
            text = key.get_secret_value()
            if not text or not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError(f"api_keys: key {number} is empty, or has characters that a header cannot carry")
        return self

    @model_validator(mode="after")
    def _other_machines_need_a_key(self) -> ServerSettings:
        if not (is_loopback(self.host) or self.api_keys or self.allow_no_key):
            raise ValueError(
                f"host {self.host!r} can be reached from other machines: give a key (--api-key-file), or "
                "--allow-no-key if something else checks who calls"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether an address or a name is that of the machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


SAME_SETTING = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "top_logprobs": "top_logprobs",
}
"""Parameters that are settings, with the name of the setting."""

Refused = Mapping[str, tuple[tuple[Any, ...], str]]
"""By the name of a parameter: the values that ask for what happens anyway, besides ``None``, and what to do instead."""


def each(names: str, instead: str, *neutral: Any) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Entries of :data:`Refused` for several names, which are separated by spaces."""
    return dict.fromkeys(names.split(), (neutral, instead))


_PENALTY = "give repetition_penalty"
_COMPETE = "cocoa.gamma and cocoa.max_candidates set which tokens compete"
_SPANS = "candidate spans compete: see cocoa.max_candidates and cocoa.max_span_tokens"
_FORMAT, _BIAS, _LIMIT, _SYSTEM = "give response_format", "give logit_bias", "give max_tokens", "give a system message"
_LOGPROBS, _NO_FIELD, _LEAVE = "give logprobs and top_logprobs", "an answer has no such field", "leave it out"
_TEMPLATE, _ONE_MODEL = "the chat template is the model's", "the server has one model, without adapters, in one process"
_TEXT, _PROMPT = "the model reads text only", "/v1/completions takes text and token ids as prompt"
_REASONING = "reasoning has no limit of its own; give max_tokens"

REFUSED: Refused = {
    **each("frequency_penalty presence_penalty", _PENALTY, 0),
    **each("repeat_penalty", _PENALTY, 1),
    **each("repeat_last_n", "repetition_penalty counts the whole text", -1, 0, 64),
    **each("penalize_newline penalize_nl", "repetition_penalty counts line breaks too", True),
    **each("dry_multiplier repetition_detection no_repeat_ngram_size", _PENALTY, 0, {}),
    **each("max_length max_output_tokens truncation_length", _LIMIT),
    **each("t_max_predict_ms t_max_prompt_ms", "close the connection, which ends the work", 0, -1),
    **each("truncate truncate_prompt_tokens shift", "shorten the prompt; the server never does", False),
    **each("num_ctx", "the context window is the model's"),
    **each("sampling_seed", "give seed"),
    **each("min_p", "cocoa.gamma is such a threshold", 0),
    **each("typical_p tfs_z", _COMPETE, 1),
    **each("top_n_sigma adaptive_target", _COMPETE, 0, -1),
    **each("xtc_probability dynatemp_range mirostat epsilon_cutoff eta_cutoff top_a", _COMPETE, 0),
    **each("min_keep n_indent", _LEAVE, 0),
    **each("samplers", "cocoa.method says how tokens are chosen", []),
    **each("do_sample", 'give temperature, and "cocoa": {"method": "sample"}', False),
    **each("best_of", "give n, and choose by cocoa_risk", 1),
    **each("num_beams", _SPANS, 1),
    **each("use_beam_search", _SPANS, False),
    **each("length_penalty", "give cocoa.span_log_prob", 1),
    **each("num_return_sequences n_cmpl", "give n", 1),
    **each("bad_words bad_words_ids suppress_tokens allowed_token_ids", _BIAS, []),
    **each("min_tokens min_new_tokens min_length", _BIAS, 0),
    **each("ignore_eos", _BIAS, False),
    **each("stop_sequences stop_strings stop_regex stop_token_ids", "give stop", []),
    **each("eos_token_id", "give stop"),
    **each("include_stop_str_in_output no_stop_trim", "an answer ends before the stop text", False),
    **each("json_schema regex ebnf grammar format structural_tag structured_outputs", _FORMAT, "", {}),
    **each("guided_json guided_regex guided_choice guided_grammar", _FORMAT, "", {}),
    **each("grammar_lazy", _FORMAT, False),
    **each("grammar_triggers", _FORMAT, []),
    **each("n_probs top_n_tokens top_logprobs_num", _LOGPROBS, 0),
    **each("return_logprob decoder_input_details post_sampling_probs", _LOGPROBS, False),
    **each("prompt_logprobs logprob_token_ids token_ids_logprob", "/v1/completions has echo and logprobs"),
    **each("verbose details timings_per_token return_tokens return_progress return_full_text", _NO_FIELD, False),
    **each("return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text", _NO_FIELD, False),
    **each("return_prompt_token_ids return_meta_info return_hidden_states return_routed_experts", _NO_FIELD, False),
    **each("return_cached_tokens_details return_text_in_logprobs", _NO_FIELD, False),
    **each("stream_options.continuous_usage_stats", _NO_FIELD, False),
    **each("stream_options.include_obfuscation", "chunks are not padded", False),
    **each("response_fields", "an answer has all its fields", []),
    **each("stream_interval", "a stream has a chunk for each span", 1),
    **each("skip_special_tokens parse_tool_calls separate_reasoning stream_reasoning", _LEAVE, True),
    **each("include_reasoning", _LEAVE, True),
    **each("reasoning_format", "reasoning is in reasoning_content", "auto", "deepseek"),
    **each("reasoning_budget reasoning_budget_tokens thinking_token_budget", _REASONING, -1),
    **each("thinking_budget thinking_budget_tokens", _REASONING, -1),
    **each("reasoning_control", _REASONING, False),
    **each("think thinking enable_thinking reasoning", "give reasoning_effort or chat_template_kwargs"),
    **each("chat_template template tool_prompt chat_parser generation_prompt", _TEMPLATE, ""),
    **each("guideline system", _SYSTEM, ""),
    **each("raw", "/v1/completions continues a text", False),
    **each("documents", "give chat_template_kwargs", []),
    **each("input_ids inputs context", _PROMPT, [], ""),
    **each("prompt_embeds input_embeds", _PROMPT),
    **each("images image_data audio_data video_data media_io_kwargs images_config", _TEXT, [], {}),
    **each("mm_processor_kwargs", _TEXT, [], {}),
    **each("use_audio_in_video", _TEXT, False),
    **each("max_dynamic_patch min_dynamic_patch", _TEXT),
    **each("lora adapter_id lora_path", _ONE_MODEL, [], ""),
    **each("logits_processors custom_logit_processor", _BIAS, [], ""),
    **each("custom_params vllm_xargs session_params", "the server has no extensions", {}),
    **each("watermark watermarking", "answers are not marked", False),
    **each("task", "ask for it in a message"),
    **each("priority", "requests are served in order", 0),
    **each("cache_salt", "all requests share one cache of prompts"),
    **each("kv_transfer_params ec_transfer_params", _ONE_MODEL, {}),
    **each("bootstrap_host bootstrap_port bootstrap_room routed_dp_rank", _ONE_MODEL),
    **each("disagg_prefill_dp_rank data_parallel_rank", _ONE_MODEL),
    **each("options parameters sampling_params extra_body", "give its parameters in the request itself", {}),
}
"""Parameters that no route has. The name of one inside an object has a dot."""

WITHOUT_EFFECT = (
    *("user", "metadata", "safety_identifier", "request_id", "session_id", "rid", "extra_key", "custom_labels"),
    *("prediction", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt"),
    *("n_cache_reuse", "id_slot", "keep_alive", "n_keep", "num_keep", "n_discard", "num_batch", "num_gpu", "main_gpu"),
    *("num_thread", "numa", "low_vram", "use_mmap", "use_mlock", "f16_kv", "vocab_only", "logits_all", "use_cache"),
    *("backend_sampling", "sse_ping_interval", "ngram_corpus_id", "speculative.n_max", "speculative.n_min"),
    *("speculative.p_min", "speculative.type", "speculative.ngram_size_n", "speculative.ngram_size_m"),
    *("speculative.ngram_min_hits", "return_mm_kwargs", "spaces_between_special_tokens"),
    # details of parameters that are refused themselves
    *("xtc_threshold", "dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "mirostat_tau", "mirostat_eta", "adaptive_decay", "grammar_type", "preserved_tokens"),
    *("chat_format", "guided_decoding_backend", "guided_whitespace_pattern", "truncation_side", "logprob_start_len"),
    *("routed_experts_start_len", "routed_experts_prompt_start", "reasoning_budget_start_tag"),
    *("reasoning_budget_end_tag", "reasoning_budget_end_tags", "reasoning_budget_message"),
)
"""Parameters of other servers that are accepted with every value, because the answer would be the same."""
