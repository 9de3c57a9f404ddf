"""Parameters of requests: those that are settings of the decode, and those of other servers that are refused.

The names are those of OpenAI, llama.cpp, vLLM, TGI, SGLang and Ollama, in their protocols of OpenAI and in their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


REFUSED: Refused = {
    **each("frequency_penalty presence_penalty", "give repetition_penalty", 0),
    **each("repeat_penalty", "give repetition_penalty", 1),
    **each("repeat_last_n", "repetition_penalty counts the whole text", -1, 0, 64),
    **each("penalize_newline penalize_nl", "repetition_penalty counts line breaks too", True),
    **each("dry_multiplier repetition_detection no_repeat_ngram_size", "give repetition_penalty", 0, {}),
    **each("max_length max_output_tokens truncation_length", "give max_tokens"),
    **each("t_max_predict_ms t_max_prompt_ms", "close the connection, which ends the work", 0, -1),
    **each("truncate truncate_prompt_tokens shift", "shorten the prompt; the server never does", False),
    **each("num_ctx", "the context window is the model's"),
    **each("sampling_seed", "give seed"),
    **each("min_p", "cocoa.gamma is such a threshold", 0),
    **each("typical_p tfs_z", "cocoa.gamma and cocoa.max_candidates set which tokens compete", 1),
    **each("top_n_sigma adaptive_target", "cocoa.gamma and cocoa.max_candidates set which tokens compete", 0, -1),
    **each(
        "xtc_probability dynatemp_range mirostat epsilon_cutoff eta_cutoff top_a",
        "cocoa.gamma and cocoa.max_candidates set which tokens compete",
        0,
    ),
    **each("min_keep n_indent", "leave it out", 0),
    **each("samplers", "cocoa.method says how tokens are chosen", []),
    **each("do_sample", 'give temperature, and "cocoa": {"method": "sample"}', False),
    **each("best_of", "give n, and choose by cocoa_risk", 1),
    **each("num_beams", "candidate spans compete: see cocoa.max_candidates and cocoa.max_span_tokens", 1),
    **each("use_beam_search", "candidate spans compete: see cocoa.max_candidates and cocoa.max_span_tokens", False),
    **each("length_penalty", "give cocoa.span_log_prob", 1),
    **each("num_return_sequences n_cmpl", "give n", 1),
    **each("bad_words bad_words_ids suppress_tokens allowed_token_ids", "give logit_bias", []),
    **each("min_tokens min_new_tokens min_length", "give logit_bias", 0),
    **each("ignore_eos", "give logit_bias", False),
    **each("stop_sequences stop_strings stop_regex stop_token_ids", "give stop", []),
    **each("eos_token_id", "give stop"),
    **each("include_stop_str_in_output no_stop_trim", "an answer ends before the stop text", False),
    **each(
        "json_schema regex ebnf grammar format guided_json guided_regex guided_choice guided_grammar structural_tag "
        "structured_outputs",
        "give response_format",
        "",
        {},
    ),
    **each("grammar_lazy", "give response_format", False),
    **each("grammar_triggers", "give response_format", []),
    **each("n_probs top_n_tokens top_logprobs_num", "give logprobs and top_logprobs", 0),
    **each("return_logprob decoder_input_details post_sampling_probs", "give logprobs and top_logprobs", False),
    **each("prompt_logprobs logprob_token_ids token_ids_logprob", "/v1/completions has echo and logprobs"),
    **each(
        "verbose details timings_per_token return_tokens return_progress return_tokens_as_token_ids return_token_ids "
        "return_token_offsets return_prompt_text return_prompt_token_ids return_meta_info return_hidden_states "
        "return_routed_experts return_cached_tokens_details return_text_in_logprobs return_full_text "
        "stream_options.continuous_usage_stats",
        "an answer has no such field",
        False,
    ),
    **each("stream_options.include_obfuscation", "chunks are not padded", False),
    **each("response_fields", "an answer has all its fields", []),
    **each("stream_interval", "a stream has a chunk for each span", 1),
    **each(
        "skip_special_tokens parse_tool_calls separate_reasoning stream_reasoning include_reasoning",
        "leave it out",
        True,
    ),
    **each("reasoning_format", "reasoning is in reasoning_content", "auto", "deepseek"),
    **each(
        "reasoning_budget reasoning_budget_tokens thinking_budget thinking_budget_tokens thinking_token_budget",
        "reasoning has no limit of its own; give max_tokens",
        -1,
    ),
    **each("reasoning_control", "reasoning has no limit of its own; give max_tokens", False),
    **each("think thinking enable_thinking reasoning", "give reasoning_effort or chat_template_kwargs"),
    **each("chat_template template tool_prompt chat_parser generation_prompt", "the chat template is the model's", ""),
    **each("guideline system", "give a system message", ""),
    **each("raw", "/v1/completions continues a text", False),
    **each("documents", "give chat_template_kwargs", []),
    **each("input_ids inputs context", "/v1/completions takes text and token ids as prompt", [], ""),
    **each("prompt_embeds input_embeds", "/v1/completions takes text and token ids as prompt"),
    **each(
        "images image_data audio_data video_data media_io_kwargs mm_processor_kwargs images_config",
        "the model reads text only",
        [],
        {},
    ),
    **each("use_audio_in_video", "the model reads text only", False),
    **each("max_dynamic_patch min_dynamic_patch", "the model reads text only"),
    **each("lora adapter_id lora_path", "the server has one model, without adapters", [], ""),
    **each("logits_processors custom_logit_processor", "give logit_bias", [], ""),
    **each("custom_params vllm_xargs session_params", "the server has no extensions", {}),
    **each("watermark watermarking", "answers are not marked", False),
    **each("task", "ask for it in a message"),
    **each("priority", "requests are served in order", 0),
    **each("cache_salt", "all requests share one cache of prompts"),
    **each("kv_transfer_params ec_transfer_params", "the server has one model in one process", {}),
    **each(
        "bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank",
        "the server has one model in one process",
    ),
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
