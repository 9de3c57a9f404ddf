"""Every parameter that other servers document is a setting, has no effect, or is refused by its own name."""

from __future__ import annotations

import re
from typing import Any, get_type_hints

import pytest

from cocoa_engine import CocoaConfig
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.protocol.chat_request import ChatRequest
from cocoa_integrations.server.protocol.completion_request import CompletionRequest
from cocoa_integrations.server.protocol.decoding import DecodingRequest, StreamOptions
from cocoa_integrations.server.protocol.score_request import ScoreRequest
from cocoa_integrations.server.settings import REFUSED, SAME_SETTING, WITHOUT_EFFECT
from docs._generate.request_parameters import request_parameters
from tests.conformance.tools import source_if_there
from tests.helpers.served import HELLO, client_of, refusal, speaker

VLLM = """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice reasoning_effort
thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p repetition_penalty
watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids
bad_words echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text
return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
prompt suffix prompt_embeds best_of guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern structural_tag logits_processors"""
"""Of its models of OpenAI's chat completions and completions, and former names."""

SGLANG = """messages prompt model best_of echo frequency_penalty logit_bias logprobs top_logprobs max_tokens
max_completion_tokens n presence_penalty response_format seed stop stream stream_options suffix temperature top_p user
tools tool_choice parallel_tool_calls return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details return_prompt_token_ids return_token_ids return_meta_info reasoning_effort reasoning task
top_k min_p min_tokens regex ebnf json_schema repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
continue_final_message skip_special_tokens lora_path session_id session_params separate_reasoning stream_reasoning
chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video images_config custom_logit_processor
custom_params input_ids rid extra_key cache_salt ngram_corpus_id priority custom_labels bootstrap_host bootstrap_port
bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank max_new_tokens min_new_tokens sampling_params
return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs image_data audio_data
video_data spaces_between_special_tokens structural_tag sampling_seed input_embeds"""
"""Of its models of OpenAI's chat completions and completions, and of `/generate`."""

TGI = """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens n presence_penalty response_format
seed stop stream stream_options temperature top_p tools tool_choice tool_prompt guideline inputs parameters adapter_id
best_of decoder_input_details details do_sample grammar max_new_tokens repetition_penalty return_full_text top_k
top_n_tokens truncate typical_p watermark"""
"""Of `/v1/chat/completions` and of `/generate`."""

OLLAMA = """messages model prompt suffix images format options system template stream raw keep_alive think context
truncate shift tools logprobs top_logprobs response_format stream_options reasoning_effort reasoning max_tokens
frequency_penalty presence_penalty seed stop temperature top_p tool_choice logit_bias user n num_keep num_predict top_k
min_p typical_p tfs_z repeat_last_n repeat_penalty penalize_newline mirostat mirostat_tau mirostat_eta numa num_ctx
num_batch num_gpu main_gpu low_vram vocab_only use_mmap use_mlock num_thread f16_kv logits_all"""
"""Of `/v1/chat/completions`, `/api/chat` and `/api/generate`, and of their `options`."""

LLAMA_CPP = """verbose timings_per_token stream stream_options cache_prompt return_tokens return_progress n_predict
n_indent n_keep n_discard n_cmpl n_cache_reuse t_max_predict_ms response_fields top_k top_p min_p top_n_sigma
xtc_probability xtc_threshold typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty
frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
mirostat mirostat_tau mirostat_eta seed n_probs min_keep post_sampling_probs lora json_schema grammar grammar_lazy
grammar_triggers preserved_tokens reasoning_format chat_format parse_tool_calls logit_bias ignore_eos stop samplers
id_slot image_data chat_template_kwargs add_generation_prompt reasoning_budget_tokens thinking_budget_tokens"""
"""Of its page; the source has all."""

QWEN = "enable_thinking thinking_budget"
"""Of the service of its makers, which pages of its models show."""

ROUTES: dict[type[DecodingRequest], dict[str, Any]] = {
    ChatRequest: {"messages": HELLO},
    CompletionRequest: {"prompt": "Hi"},
    ScoreRequest: {"prompt": "Hi", "text": "you"},
}
VALUES = [True, False, 0.37, -1, 0, 1, 7, "", "x", [], ["x"], {}, {"x": 1}, "auto"]
LIMITS = ServerSettings()


def names_of_route(route: type[DecodingRequest]) -> set[str]:
    nested = {f"stream_options.{name}" for name in StreamOptions.model_fields}
    return {*route.model_fields, *route.refused, *WITHOUT_EFFECT, *nested}


@pytest.mark.parametrize("documented", [VLLM, SGLANG, TGI, OLLAMA, LLAMA_CPP, QWEN])
def test_all_that_other_servers_document_is_known(documented: str) -> None:
    for route in (ChatRequest, CompletionRequest):
        assert {*documented.split(), "stream_options.continuous_usage_stats"} - names_of_route(route) == set()


def test_all_that_openai_documents_is_known() -> None:
    chat = pytest.importorskip("openai.types.chat.completion_create_params")
    text = pytest.importorskip("openai.types.completion_create_params")
    options = pytest.importorskip("openai.types.chat").ChatCompletionStreamOptionsParam
    nested = {f"stream_options.{name}" for name in get_type_hints(options)}
    assert {*get_type_hints(chat.CompletionCreateParamsBase), *nested} - names_of_route(ChatRequest) == set()
    assert {*get_type_hints(text.CompletionCreateParamsBase), *nested} - names_of_route(CompletionRequest) == set()


def test_all_that_the_source_of_llama_cpp_reads_is_known() -> None:
    folder = source_if_there("llama-cpp-python") / "vendor" / "llama.cpp" / "tools" / "server"
    source = (folder / "server-schema.cpp").read_text(encoding="utf-8")
    names = set(re.findall(r'(?:new field_\w+(?:<\w+>)?|add_alias)\("([\w.]+)"', source))
    assert len(names) > 80
    assert names - {"include_usage"} - names_of_route(ChatRequest) == set()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_a_value_is_accepted_or_named(route: type[DecodingRequest]) -> None:
    def check(name: str, value: Any) -> None:
        outer, _, inner = name.partition(".")
        given = {"stream": True, outer: {inner: value}} if outer == "stream_options" else {name: value}
        route.model_validate({**ROUTES[route], **given}).check(LIMITS)  # type: ignore[attr-defined]

    own = [*route.model_fields, *(["stream_options"] if route is ScoreRequest else [])]  # with types of their own
    for name, (neutral, instead) in route.refused.items():
        if name.partition(".")[0] in own and (name in own or "stream_options" in route.refused):
            continue
        for value in (None, *neutral):
            check(name, value)
        for value in (value for value in VALUES if value not in neutral):
            with pytest.raises(ApiError) as caught:
                check(name, value)
            assert (caught.value.status, caught.value.param) == (400, name)
            assert f"{name}=" in str(caught.value)
            assert instead in str(caught.value)
    for name in WITHOUT_EFFECT:
        assert name not in {*route.refused, *route.model_fields}
        for value in VALUES:
            check(name, value)


@pytest.mark.parametrize("name", [name for name, setting in SAME_SETTING.items() if setting == "max_new_tokens"])
@pytest.mark.parametrize("route", [ChatRequest, CompletionRequest])
def test_every_name_of_the_limit_is_the_limit(route: type[DecodingRequest], name: str) -> None:
    def config(**given: Any) -> CocoaConfig:
        request = route.model_validate({**ROUTES[route], **given})
        request.check(LIMITS)  # type: ignore[attr-defined]
        return request.config(CocoaConfig(), LIMITS)

    if name in route.refused:
        with pytest.raises(ApiError, match=name):
            config(**{name: 7})
        return
    assert config(**{name: 7}).max_new_tokens == 7
    for value in (0, -1, 10**9):
        with pytest.raises(ApiError, match=f"^{name}") as caught:
            config(**{name: value})
        assert caught.value.param == name
        assert name == "max_new_tokens" or "max_new_tokens" not in str(caught.value)
    other = "max_tokens" if name != "max_tokens" else "n_predict"
    with pytest.raises(ApiError, match=r"are the same setting, but differ: \d+ and \d+"):
        config(**{name: 7, other: 8})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"cocoa": {"alpha": -1}}, "cocoa.alpha"),
        ({"cocoa": {"max_new_tokens": 0}}, "cocoa.max_new_tokens"),
        ({"cocoa": {"method": "sample"}, "top_p": 3}, "top_p"),
        ({"logprobs": True, "top_logprobs": 3, "cocoa": {"top_logprobs": 4}}, "top_logprobs"),
    ],
)
def test_a_message_begins_with_what_the_client_sent(body: dict[str, Any], param: str) -> None:
    request = ChatRequest.model_validate({"messages": HELLO, **body})
    request.check(LIMITS)
    with pytest.raises(ApiError, match=f"^{re.escape(param)}") as caught:
        request.config(CocoaConfig(), LIMITS)
    assert caught.value.param == param


async def test_limits_of_other_servers_are_refused_over_http() -> None:
    engine = speaker()
    for name in ("json_schema", "regex", "ebnf", "grammar", "format", "repeat_penalty"):
        error = await refusal(engine, max_tokens=2, **{name: "x"})
        assert (error["type"], error["param"]) == ("invalid_request_error", name)
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert (await refusal(engine, **options))["param"] == "stream_options.continuous_usage_stats"


def test_the_generation_prompt_is_the_contrary_of_continuing() -> None:
    answer = [*HELLO, {"role": "assistant", "content": "I"}]
    for continues, adds, right in (
        (False, True, True),
        (True, False, True),
        (False, False, False),
        (True, True, False),
        (True, None, True),
        (False, None, True),
    ):
        request = ChatRequest.model_validate(
            {"messages": answer, "continue_final_message": continues, "add_generation_prompt": adds}
        )
        if right:
            request.check(LIMITS)
        else:
            with pytest.raises(ApiError) as caught:
                request.check(LIMITS)
            assert caught.value.param == "add_generation_prompt"


def test_the_page_lists_every_parameter_once() -> None:
    listed = re.findall(r"`([\w.]+)`", "".join(line.split("|")[1] for line in request_parameters().splitlines()[2:]))
    assert sorted(listed) == sorted([*SAME_SETTING, *REFUSED, *WITHOUT_EFFECT])


async def test_head_works_wherever_get_does() -> None:
    app = create_app(speaker())
    async with client_of(app) as client:
        paths = [
            path
            for path, operations in (await client.get("/openapi.json")).json()["paths"].items()
            if "get" in operations
        ]
        assert len(paths) > 6
        paths = [path.replace("{name}", "tiny") for path in paths]
        paths += [path.removeprefix("/v1") for path in paths if path.startswith("/v1")]
        for path in [*paths, "/", "/openapi.json"]:
            got, head = await client.get(path), await client.head(path)
            assert (got.status_code, head.status_code, head.content) == (200, 200, b""), path
            assert got.content
            assert head.headers["content-type"] == got.headers["content-type"]
        assert (await client.head("/v1/models/other")).status_code == 404
        assert (await client.head("/v1/chat/completions")).status_code == 405
        assert (await client.head("/nowhere")).status_code == 404
