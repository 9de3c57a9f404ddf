"""A value for every setting, none of them the default."""

from pathlib import Path
from typing import Any

from cocoa_engine import methods

SETTINGS: dict[str, Any] = {
    "method": "cocoa", "metric": "con_mlds", "risk": "f_mlds", "alpha": 1.5, "gamma": 0.5, "max_candidates": 3,
    "max_span_tokens": 4, "span_boundary": "left", "span_log_prob": "mean", "middle_layers": (5, 12),
    "final_layer": "pre_norm", "dola_layers": "16,18", "dola_relative_top": 0.2,
    "decore_heads": str(Path(methods.__file__).with_name("embedded_heads.json")), "decore_masked_heads": 3,
    "diver_weight": 0.5, "repetition_penalty": 1.3, "max_risk": 0.9, "max_new_tokens": 3, "temperature": 0.7,
    "top_k": 5, "top_p": 0.9, "seed": 11, "top_logprobs": 2, "stop": ("###",),
}  # fmt: skip
