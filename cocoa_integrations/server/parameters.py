"""Parameters of requests that are settings of the decode under another name, or the same one."""

from __future__ import annotations

SAME_SETTING = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "top_logprobs": "top_logprobs",
}
"""Parameters of OpenAI's, and of other servers for local models, that are settings, with the name of the setting."""
