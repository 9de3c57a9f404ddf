"""Parameters of OpenAI's and other servers that are settings or are refused."""

from cocoa_integrations._shared.options import Refusals, refusals

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

_COMPETE = "cocoa.gamma and cocoa.max_candidates set which tokens compete"
_PROMPT = "/v1/completions takes text and token ids as prompt"
TEXT_ONLY, NOT_DECODED = "the model reads and writes text only", "nothing is decoded; leave it out"

REFUSED = refusals(
    {
        "give repetition_penalty": "frequency_penalty presence_penalty repeat_penalty=1 dry_multiplier "
        "repetition_detection no_repeat_ngram_size",
        "repetition_penalty counts the whole text": "repeat_last_n=-1|0|64",
        "repetition_penalty counts line breaks too": "penalize_newline=true penalize_nl=true",
        "give max_tokens": "max_length! max_output_tokens! truncation_length!",
        "close the connection, which ends the work": "t_max_predict_ms=0|-1 t_max_prompt_ms=0|-1",
        "shorten the prompt; the server never does": "truncate truncate_prompt_tokens shift",
        "the context window is the model's": "num_ctx!",
        "give seed": "sampling_seed!",
        "cocoa.gamma is such a threshold": "min_p",
        _COMPETE: "typical_p=1 tfs_z=1 top_n_sigma=0|-1 adaptive_target=0|-1 xtc_probability dynatemp_range mirostat "
        "epsilon_cutoff eta_cutoff top_a",
        "leave it out": "min_keep n_indent skip_special_tokens=true parse_tool_calls=true separate_reasoning=true "
        "stream_reasoning=true include_reasoning=true",
        "cocoa.method says how tokens are chosen": "samplers",
        'give temperature, and "cocoa": {"method": "sample"}': "do_sample",
        "give n, and choose by cocoa_risk": "best_of=1",
        "candidate spans compete: see cocoa.max_candidates and cocoa.max_span_tokens": "num_beams=1 use_beam_search",
        "give cocoa.span_log_prob": "length_penalty=1",
        "give n": "num_return_sequences=1 n_cmpl=1",
        "give logit_bias": "bad_words bad_words_ids suppress_tokens allowed_token_ids min_tokens min_new_tokens "
        "min_length ignore_eos logits_processors custom_logit_processor",
        "give stop": "stop_sequences stop_strings stop_regex stop_token_ids eos_token_id!",
        "an answer ends before the stop text": "include_stop_str_in_output no_stop_trim",
        "give response_format": "json_schema regex ebnf grammar format structural_tag structured_outputs guided_json "
        "guided_regex guided_choice guided_grammar grammar_lazy grammar_triggers",
        "give logprobs and top_logprobs": "n_probs top_n_tokens top_logprobs_num return_logprob decoder_input_details "
        "post_sampling_probs",
        "/v1/completions has echo and logprobs": "prompt_logprobs! logprob_token_ids! token_ids_logprob!",
        "an answer has no such field": "verbose details timings_per_token return_tokens return_progress "
        "return_full_text return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text "
        "return_prompt_token_ids return_meta_info return_hidden_states return_routed_experts "
        "return_cached_tokens_details return_text_in_logprobs stream_options.continuous_usage_stats",
        "chunks are not padded": "stream_options.include_obfuscation",
        "an answer has all its fields": "response_fields",
        "a stream has a chunk for each span": "stream_interval=1",
        "reasoning is in reasoning_content": 'reasoning_format="auto"|"deepseek"',
        "reasoning has no limit of its own; give max_tokens": "reasoning_budget=-1 reasoning_budget_tokens=-1 "
        "thinking_token_budget=-1 thinking_budget=-1 thinking_budget_tokens=-1 reasoning_control",
        "give reasoning_effort or chat_template_kwargs": "think! thinking! enable_thinking! reasoning!",
        "the chat template is the model's": "chat_template template tool_prompt chat_parser generation_prompt",
        "give a system message": "guideline system",
        "/v1/completions continues a text": "raw",
        "give chat_template_kwargs": "documents",
        _PROMPT: "input_ids inputs context prompt_embeds! input_embeds!",
        "the model reads text only": "images image_data audio_data video_data media_io_kwargs images_config "
        "mm_processor_kwargs use_audio_in_video max_dynamic_patch! min_dynamic_patch!",
        "the server has one model, without adapters, in one process": "lora adapter_id lora_path kv_transfer_params "
        "ec_transfer_params bootstrap_host! bootstrap_port! bootstrap_room! routed_dp_rank! disagg_prefill_dp_rank! "
        "data_parallel_rank!",
        "the server has no extensions": "custom_params vllm_xargs session_params",
        "answers are not marked": "watermark watermarking",
        "ask for it in a message": "task!",
        "requests are served in order": "priority",
        "all requests share one cache of prompts": "cache_salt!",
        "give its parameters in the request itself": "options parameters sampling_params extra_body",
    }
)
"""Parameters that no route has. The name of one inside an object has a dot."""

REFUSED_BY_CHAT: Refusals = REFUSED | refusals(
    {
        TEXT_ONLY: 'audio! modalities=["text"]|[]',
        "give tools": "functions",
        "give tool_choice": "function_call!",
        "the server does not search the web": "web_search_options!",
        "the server does not moderate": "moderation!",
        "the server stores no answers": "store",
        "leave it out": 'service_tier="auto"|"default"',
        "ask for it in a message": 'verbosity="medium"',
        "give messages alone": "prompt suffix echo",
        "the chat template adds them": "add_special_tokens",
    }
)

REFUSED_BY_COMPLETIONS: Refusals = REFUSED | refusals(
    {
        "the model continues a prompt only": "suffix",
        "give max_tokens": "max_completion_tokens!",
        "give logprobs": "top_logprobs",
        "/v1/chat/completions has it": 'messages tools functions response_format={"type":"text"} '
        'tool_choice="none"|"auto" parallel_tool_calls=true reasoning_effort=true chat_template_kwargs '
        "continue_final_message add_generation_prompt",
        "give the prompt as token ids": "add_special_tokens=true",
    }
)

REFUSED_BY_SCORE: Refusals = REFUSED | refusals(
    {
        NOT_DECODED: " ".join(f"{name}!" for name in SAME_SETTING if name != "top_logprobs")
        + " frequency_penalty presence_penalty top_logprobs logit_bias stream_options n=1 tools functions "
        'tool_choice="none"|"auto" response_format={"type":"text"} stream echo continue_final_message logprobs '
        "parallel_tool_calls=true reasoning_effort=true",
    }
)
