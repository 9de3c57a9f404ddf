"""CoCoA-SIG decoding for local causal language models, with per-span hallucination risk.

>>> from cocoa_engine import CocoaEngine
>>> engine = CocoaEngine.from_pretrained()  # the embedded SmolLM2-135M-Instruct
>>> answer = engine.chat([{"role": "user", "content": "What is the capital of France?"}])
>>> [(span.text, span.f_mlds) for span in answer.spans]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocoa_engine.config import CocoaConfig, Runtime
from cocoa_engine.errors import (
    CalibrationError,
    ChatTemplateError,
    CocoaError,
    ConfigError,
    DataError,
    EngineBusyError,
    ForkedProcessError,
    HallucinationRiskError,
    MissingExtraError,
    ModelLoadError,
    NonFiniteLogitsError,
    PromptError,
    RequestCancelledError,
    UnsupportedModelError,
    WorkerError,
)
from cocoa_engine.interruptions import Cancellation
from cocoa_engine.memory import collector_paused, quiet_torchao
from cocoa_engine.methods import METHODS
from cocoa_engine.results import Generation
from cocoa_engine.risk import CalibrationWarning, Check, MeasuredText, RiskCalibrator, Unit, UnitLevel
from cocoa_engine.spans import Candidate, Preceding, RiskSource, Span, Usage
from cocoa_engine.timeline import Timeline

if TYPE_CHECKING:
    from cocoa_engine.consistency import Consistency
    from cocoa_engine.context import passage_attention
    from cocoa_engine.decoding.grammar import GrammarProcessor
    from cocoa_engine.decoding.matchers import json_rule, unenforced
    from cocoa_engine.decoding.request import PerPrompt
    from cocoa_engine.engine import CocoaEngine
    from cocoa_engine.execution.session import ModelInfo
    from cocoa_engine.lab.fit import FitSettings
    from cocoa_engine.lab.fit_calibrator import fit_calibrator, fit_self_made
    from cocoa_engine.model.loading import load_tokenizer, read_context_window
    from cocoa_engine.model.tokenizer import Detokenizer
    from cocoa_engine.scoring.given_texts import rescore
    from cocoa_engine.stream import SpanStream

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "CalibrationError",
    "CalibrationWarning",
    "Cancellation",
    "Candidate",
    "ChatTemplateError",
    "Check",
    "CocoaConfig",
    "CocoaEngine",
    "CocoaError",
    "ConfigError",
    "Consistency",
    "DataError",
    "Detokenizer",
    "EngineBusyError",
    "FitSettings",
    "ForkedProcessError",
    "Generation",
    "GrammarProcessor",
    "HallucinationRiskError",
    "MeasuredText",
    "MissingExtraError",
    "ModelInfo",
    "ModelLoadError",
    "NonFiniteLogitsError",
    "PerPrompt",
    "Preceding",
    "PromptError",
    "RequestCancelledError",
    "RiskCalibrator",
    "RiskSource",
    "Runtime",
    "Span",
    "SpanStream",
    "Timeline",
    "Unit",
    "UnitLevel",
    "UnsupportedModelError",
    "Usage",
    "WorkerError",
    "__version__",
    "fit_calibrator",
    "fit_self_made",
    "json_rule",
    "load_tokenizer",
    "passage_attention",
    "read_context_window",
    "rescore",
    "unenforced",
]

# torch and transformers take seconds to import: settings and results are imported without them
_LAZY = {
    "CocoaEngine": "engine",
    "Consistency": "consistency",
    "Detokenizer": "model.tokenizer",
    "FitSettings": "lab.fit",
    "GrammarProcessor": "decoding.grammar",
    "ModelInfo": "execution.session",
    "PerPrompt": "decoding.request",
    "SpanStream": "stream",
    "json_rule": "decoding.matchers",
    "load_tokenizer": "model.loading",
    "fit_calibrator": "lab.fit_calibrator",
    "fit_self_made": "lab.fit_calibrator",
    "passage_attention": "context",
    "read_context_window": "model.loading",
    "rescore": "scoring.given_texts",
    "unenforced": "decoding.matchers",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        with quiet_torchao(), collector_paused():
            value = getattr(import_module(f"cocoa_engine.{_LAZY[name]}"), name)
        globals()[name] = value  # not looked up again
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
