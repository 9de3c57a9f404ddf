"""Loads the weights of the embedded model's checkpoint without transformers' model classes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_engine.model.gguf_model import mark_initialized, without_weights
from cocoa_engine.model.kept_folders import MANIFEST
from cocoa_engine.model.light_model import LightModel
from cocoa_engine.model.model_classes import import_model_classes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def digest(folder: Path) -> str:
    """A digest of the checkpoint: of the sizes and checksums of its files, which were compared when it was found."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def load(folder: Path) -> LightModel:
    """The weights, in the mapped file. transformers' model is made of them when it is asked for.

    Args:
        folder: what :func:`embedded.embedded_model_path` returns.
    """
    from safetensors.torch import load_file

    fields: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = LightModel(PreTrainedConfig(**fields), fields["model_type"])
    weights = {name: nn.Parameter(weight) for name, weight in load_file(folder / "model.safetensors").items()}
    _place(model, weights)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.built_by(partial(_whole, fields, model.generation_config.to_dict(), weights))  # the folder may be gone then
    model.eval()
    return model


def _whole(
    fields: Mapping[str, Any], generation: Mapping[str, Any], weights: Mapping[str, nn.Parameter]
) -> PreTrainedModel:
    import_model_classes()
    config = AutoConfig.for_model(**fields)
    model: Any = without_weights(config)
    _place(model, weights)
    model.tie_weights()
    mark_initialized(model)
    model.generation_config = GenerationConfig.from_dict(dict(generation))
    config.name_or_path = model.name_or_path = MODEL_NAME
    whole: PreTrainedModel = model.eval()
    return whole


def _place(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    for name, weight in weights.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, weight)
