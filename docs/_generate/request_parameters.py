"""The table of parameters of other servers, from the table that the server checks."""

from __future__ import annotations

from itertools import groupby

from cocoa_integrations.server.parameters import REFUSED, SAME_SETTING
from docs._generate.markdown import code, prose, table

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


def request_parameters() -> str:
    """The table of the parameters of a request that are settings, refused, or without effect."""
    rows = [
        [
            _listed([name for name, setting in SAME_SETTING.items() if setting == setting_of]),
            "any",
            f"the setting {code(setting_of)}",
        ]
        for setting_of in dict.fromkeys(SAME_SETTING.values())
    ]
    for (neutral, instead), entries in groupby(REFUSED.items(), key=lambda entry: entry[1]):
        accepted = ", ".join(code(repr(value).lower().replace("'", '"')) for value in neutral) or "none"
        rows.append([_listed([name for name, _ in entries]), accepted, f"refused: {prose(instead)}"])
    rows.append([_listed(WITHOUT_EFFECT), "any", "no effect: the answer would be the same"])
    return table(["Parameter", "Values that are accepted", "What it does"], rows)


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(map(code, names))
