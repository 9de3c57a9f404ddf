"""Settings of DoLa, DeCoRe and Diver for any model."""

from pathlib import Path
from typing import Any

from cocoa_engine import CocoaConfig
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, ScoredHead

RIVALS = ("dola", "decore", "diver")


def heads_file(folder: Path, model: Any, heads: list[tuple[int, int]] | None = None) -> str:
    """The name of a file with heads of a model, by default :func:`heads_of` it."""
    num_layers, num_heads = model.config.num_hidden_layers, model.config.num_attention_heads
    scored = [ScoredHead(layer=layer, head=head, score=0.5) for layer, head in heads or heads_of(model)]
    found = RetrievalHeads(model_name="m", num_layers=num_layers, num_heads=num_heads, samples=1, heads=scored)
    path = folder / f"heads-{num_layers}-{num_heads}.json"
    path.write_text(found.model_dump_json())
    return str(path)


def heads_of(model: Any) -> list[tuple[int, int]]:
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    return [(layer, (layer * 2 + 1) % heads) for layer in range(0, layers, 2)]


def config_of(method: str, model: Any, folder: Path, **settings: Any) -> CocoaConfig:
    if method == "decore":
        masked = len(heads_of(model))
        settings = {"decore_heads": heads_file(folder, model), "decore_masked_heads": masked, **settings}
    return CocoaConfig(method=method, **settings)
