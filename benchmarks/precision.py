"""Speed and changed answers of narrower weights on a CPU: bfloat16 (``Runtime``) and torchao's int8."""

from __future__ import annotations

from itertools import takewhile
from statistics import mean
from typing import Any

from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig

from benchmarks.command import main
from benchmarks.measure import Bench, EngineCompetitor, one_by_one, rounds_of_parts
from benchmarks.prompts import questions
from cocoa_engine import CocoaEngine, Generation, Runtime

EXACT, HALVED, INT8 = "float32", "bfloat16", "int8"


def measure(bench: Bench) -> dict[str, Any]:
    """Times of CoCoA-SIG with each kind of weights, and the differences of the answers from those of float32."""
    settings = bench.settings
    engines = {
        EXACT: bench.engine(draft_tokens=0),
        HALVED: bench.engine(draft_tokens=0, linears="bfloat16"),
        INT8: CocoaEngine.from_pretrained(
            settings.model,
            runtime=Runtime(prefix_cache_mb=0, draft_tokens=0),
            quantization_config=TorchAoConfig(Int8WeightOnlyConfig()),
        ),
    }
    decoders = {name: EngineCompetitor(engine, max_new_tokens=settings.tokens) for name, engine in engines.items()}
    cases = one_by_one(questions(bench.loaded, settings.prompts))
    comparison = bench.compare("precision", decoders, rounds_of_parts(cases, 2))
    exact = decoders.pop(EXACT).answers()
    change = {name: _change(list(zip(exact, decoder.answers(), strict=True))) for name, decoder in decoders.items()}
    return {"comparison": comparison, "change": change}


def _change(pairs: list[tuple[Generation, Generation]]) -> dict[str, float]:
    """How long pairs of answers agree, and the differences of the values of the spans that both contain.

    Spans are compared if they are at the same position of both answers and have the same offset and tokens.
    """
    alike = [_common(a.token_ids, b.token_ids) for a, b in pairs]
    spans = [(x, y) for a, b in pairs for x, y in zip(a.spans, b.spans, strict=False)]
    same = [(x, y) for x, y in spans if (x.start, x.token_ids) == (y.start, y.token_ids)]
    return {
        "texts_alike": mean(a.token_ids == b.token_ids for a, b in pairs),
        "tokens_before_the_first_other_one": mean(alike),
        "f_mlds_apart": mean(abs(x.f_mlds - y.f_mlds) for x, y in same),
        "con_mlds_apart": mean(abs(x.con_mlds - y.con_mlds) for x, y in same),
        "log_prob_per_token_apart": mean(abs(x.log_prob - y.log_prob) / len(x.token_ids) for x, y in same),
    }


def _common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


if __name__ == "__main__":
    main("precision")
