"""Parameters of OpenAI's and other servers that are settings or are refused."""

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


def _rows(names: str, instead: str, *neutral: Any) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Rows of :data:`Refused` for several names, which are separated by spaces."""
    return dict.fromkeys(names.split(), (neutral, instead))


_PENALTY = "give repetition_penalty"
_COMPETE = "cocoa.gamma and cocoa.max_candidates set which tokens compete"
_SPANS = "candidate spans compete: see cocoa.max_candidates and cocoa.max_span_tokens"
_FORMAT, _BIAS, _LIMIT, _SYSTEM = "give response_format", "give logit_bias", "give max_tokens", "give a system message"
_LOGPROBS, _NO_FIELD, _LEAVE = "give logprobs and top_logprobs", "an answer has no such field", "leave it out"
_TEMPLATE, _ONE_MODEL = "the chat template is the model's", "the server has one model, without adapters, in one process"
_TEXT, _PROMPT = "the model reads text only", "/v1/completions takes text and token ids as prompt"
TEXT_ONLY, NOT_DECODED = "the model reads and writes text only", "nothing is decoded; leave it out"
_REASONING = "reasoning has no limit of its own; give max_tokens"

REFUSED: Refused = {
    **_rows("frequency_penalty presence_penalty", _PENALTY, 0),
    **_rows("repeat_penalty", _PENALTY, 1),
    **_rows("repeat_last_n", "repetition_penalty counts the whole text", -1, 0, 64),
    **_rows("penalize_newline penalize_nl", "repetition_penalty counts line breaks too", True),
    **_rows("dry_multiplier repetition_detection no_repeat_ngram_size", _PENALTY, 0, {}),
    **_rows("max_length max_output_tokens truncation_length", _LIMIT),
    **_rows("t_max_predict_ms t_max_prompt_ms", "close the connection, which ends the work", 0, -1),
    **_rows("truncate truncate_prompt_tokens shift", "shorten the prompt; the server never does", False),
    **_rows("num_ctx", "the context window is the model's"),
    **_rows("sampling_seed", "give seed"),
    **_rows("min_p", "cocoa.gamma is such a threshold", 0),
    **_rows("typical_p tfs_z", _COMPETE, 1),
    **_rows("top_n_sigma adaptive_target", _COMPETE, 0, -1),
    **_rows("xtc_probability dynatemp_range mirostat epsilon_cutoff eta_cutoff top_a", _COMPETE, 0),
    **_rows("min_keep n_indent", _LEAVE, 0),
    **_rows("samplers", "cocoa.method says how tokens are chosen", []),
    **_rows("do_sample", 'give temperature, and "cocoa": {"method": "sample"}', False),
    **_rows("best_of", "give n, and choose by cocoa_risk", 1),
    **_rows("num_beams", _SPANS, 1),
    **_rows("use_beam_search", _SPANS, False),
    **_rows("length_penalty", "give cocoa.span_log_prob", 1),
    **_rows("num_return_sequences n_cmpl", "give n", 1),
    **_rows("bad_words bad_words_ids suppress_tokens allowed_token_ids", _BIAS, []),
    **_rows("min_tokens min_new_tokens min_length", _BIAS, 0),
    **_rows("ignore_eos", _BIAS, False),
    **_rows("stop_sequences stop_strings stop_regex stop_token_ids", "give stop", []),
    **_rows("eos_token_id", "give stop"),
    **_rows("include_stop_str_in_output no_stop_trim", "an answer ends before the stop text", False),
    **_rows("json_schema regex ebnf grammar format structural_tag structured_outputs", _FORMAT, "", {}),
    **_rows("guided_json guided_regex guided_choice guided_grammar", _FORMAT, "", {}),
    **_rows("grammar_lazy", _FORMAT, False),
    **_rows("grammar_triggers", _FORMAT, []),
    **_rows("n_probs top_n_tokens top_logprobs_num", _LOGPROBS, 0),
    **_rows("return_logprob decoder_input_details post_sampling_probs", _LOGPROBS, False),
    **_rows("prompt_logprobs logprob_token_ids token_ids_logprob", "/v1/completions has echo and logprobs"),
    **_rows("verbose details timings_per_token return_tokens return_progress return_full_text", _NO_FIELD, False),
    **_rows("return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text", _NO_FIELD, False),
    **_rows("return_prompt_token_ids return_meta_info return_hidden_states return_routed_experts", _NO_FIELD, False),
    **_rows("return_cached_tokens_details return_text_in_logprobs", _NO_FIELD, False),
    **_rows("stream_options.continuous_usage_stats", _NO_FIELD, False),
    **_rows("stream_options.include_obfuscation", "chunks are not padded", False),
    **_rows("response_fields", "an answer has all its fields", []),
    **_rows("stream_interval", "a stream has a chunk for each span", 1),
    **_rows("skip_special_tokens parse_tool_calls separate_reasoning stream_reasoning", _LEAVE, True),
    **_rows("include_reasoning", _LEAVE, True),
    **_rows("reasoning_format", "reasoning is in reasoning_content", "auto", "deepseek"),
    **_rows("reasoning_budget reasoning_budget_tokens thinking_token_budget", _REASONING, -1),
    **_rows("thinking_budget thinking_budget_tokens", _REASONING, -1),
    **_rows("reasoning_control", _REASONING, False),
    **_rows("think thinking enable_thinking reasoning", "give reasoning_effort or chat_template_kwargs"),
    **_rows("chat_template template tool_prompt chat_parser generation_prompt", _TEMPLATE, ""),
    **_rows("guideline system", _SYSTEM, ""),
    **_rows("raw", "/v1/completions continues a text", False),
    **_rows("documents", "give chat_template_kwargs", []),
    **_rows("input_ids inputs context", _PROMPT, [], ""),
    **_rows("prompt_embeds input_embeds", _PROMPT),
    **_rows("images image_data audio_data video_data media_io_kwargs images_config", _TEXT, [], {}),
    **_rows("mm_processor_kwargs", _TEXT, [], {}),
    **_rows("use_audio_in_video", _TEXT, False),
    **_rows("max_dynamic_patch min_dynamic_patch", _TEXT),
    **_rows("lora adapter_id lora_path", _ONE_MODEL, [], ""),
    **_rows("logits_processors custom_logit_processor", _BIAS, [], ""),
    **_rows("custom_params vllm_xargs session_params", "the server has no extensions", {}),
    **_rows("watermark watermarking", "answers are not marked", False),
    **_rows("task", "ask for it in a message"),
    **_rows("priority", "requests are served in order", 0),
    **_rows("cache_salt", "all requests share one cache of prompts"),
    **_rows("kv_transfer_params ec_transfer_params", _ONE_MODEL, {}),
    **_rows("bootstrap_host bootstrap_port bootstrap_room routed_dp_rank", _ONE_MODEL),
    **_rows("disagg_prefill_dp_rank data_parallel_rank", _ONE_MODEL),
    **_rows("options parameters sampling_params extra_body", "give its parameters in the request itself", {}),
}
"""Parameters that no route has. The name of one inside an object has a dot."""

REFUSED_BY_CHAT: Refused = {
    **REFUSED,
    **_rows("audio", TEXT_ONLY),
    **_rows("modalities", TEXT_ONLY, ["text"], []),
    **_rows("functions", "give tools", []),
    **_rows("function_call", "give tool_choice"),
    **_rows("web_search_options", "the server does not search the web"),
    **_rows("moderation", "the server does not moderate"),
    **_rows("store", "the server stores no answers", False),
    **_rows("service_tier", "leave it out", "auto", "default"),
    **_rows("verbosity", "ask for it in a message", "medium"),
    **_rows("prompt suffix", "give messages alone", "", []),
    **_rows("echo", "give messages alone", False),
    **_rows("add_special_tokens", "the chat template adds them", False),
}

REFUSED_BY_COMPLETIONS: Refused = {
    **REFUSED,
    **_rows("suffix", "the model continues a prompt only", ""),
    **_rows("max_completion_tokens", "give max_tokens"),
    **_rows("top_logprobs", "give logprobs", 0),
    **_rows("messages tools functions", "/v1/chat/completions has it", []),
    **_rows("response_format", "/v1/chat/completions has it", {"type": "text"}),
    **_rows("tool_choice", "/v1/chat/completions has it", "none", "auto"),
    **_rows("parallel_tool_calls reasoning_effort", "/v1/chat/completions has it", True),
    **_rows("chat_template_kwargs", "/v1/chat/completions has it", {}),
    **_rows("continue_final_message add_generation_prompt", "/v1/chat/completions has it", False),
    **_rows("add_special_tokens", "give the prompt as token ids", True),
}

REFUSED_BY_SCORE: Refused = {
    **REFUSED,
    **_rows(" ".join(SAME_SETTING), NOT_DECODED),
    **_rows("frequency_penalty presence_penalty top_logprobs", NOT_DECODED, 0),
    **_rows("logit_bias stream_options", NOT_DECODED, {}),
    **_rows("n", NOT_DECODED, 1),
    **_rows("tools functions", NOT_DECODED, []),
    **_rows("tool_choice", NOT_DECODED, "none", "auto"),
    **_rows("response_format", NOT_DECODED, {"type": "text"}),
    **_rows("stream echo continue_final_message logprobs", NOT_DECODED, False),
    **_rows("parallel_tool_calls reasoning_effort", NOT_DECODED, True),
}
