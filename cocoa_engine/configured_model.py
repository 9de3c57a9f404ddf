"""A loaded model with its default settings and its calibrator."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import Self

from cocoa_engine.arguments import given_or_new, of_type
from cocoa_engine.calibration import RiskCalibrator
from cocoa_engine.config import CocoaConfig
from cocoa_engine.engine_risk import EngineRisk
from cocoa_engine.errors import ConfigError
from cocoa_engine.execution.session import Session
from cocoa_engine.loaded_model import LoadedModel
from cocoa_engine.model.blocks import BlockTensor
from cocoa_engine.model.load_options import DeviceMap
from cocoa_engine.model.tokenizer import not_shared
from cocoa_engine.runtime import Runtime

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ConfiguredModel(LoadedModel):
    """The base class of :class:`~cocoa_engine.CocoaEngine`: construction, settings and calibrator.

    Arguments and errors are described there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        config: CocoaConfig | None = None,
        runtime: Runtime | None = None,
        model_name: str | None = None,
        calibrator: RiskCalibrator | str | Path | None = "auto",
    ) -> None:
        runtime = given_or_new(runtime, Runtime, "runtime")
        if runtime.weights != "stored" and not any(isinstance(weight, BlockTensor) for weight in model.parameters()):
            raise ConfigError(f"weights={runtime.weights!r} applies to from_pretrained, not to a model that is loaded")
        super().__init__(Session(model, tokenizer, runtime, model_name))
        self.config = given_or_new(config, CocoaConfig, "config")
        self._risk = EngineRisk(self._session, calibrator)
        self._risk.warn_of_mismatch(config)  # default settings are checked with each call, which may replace them

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | None = None,
        *,
        tokenizer_name: str | None = None,
        config: CocoaConfig | None = None,
        runtime: Runtime | None = None,
        calibrator: RiskCalibrator | str | Path | None = "auto",
        dtype: str | torch.dtype = "auto",
        device_map: DeviceMap = "auto",
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **more_model_kwargs: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            model_name: a local folder or a Hub id. `None` loads the embedded SmolLM2-135M-Instruct.
            tokenizer_name: folder or Hub id of the tokenizer. Default: that of the model.
            config: the engine's default settings.
            runtime: how the model is run.
            calibrator: as for the constructor.
            dtype: ``"auto"`` (as stored), a name such as ``"bfloat16"``, or a ``torch.dtype``.
            device_map: as in transformers, e.g. ``"cuda:0"``. ``"auto"``: the GPUs if there are any, otherwise the CPU.
                `None` is the CPU.
            trust_remote_code: run code that comes with the checkpoint.
            allow_pickle: read weights stored as pickle, which can run code when read.
            model_kwargs: further options of the model's ``from_pretrained``, as are all other keywords.
            tokenizer_kwargs: options of the tokenizer's ``from_pretrained``.

        Raises:
            ModelLoadError: the model cannot be found or read, or was refused.
            UnsupportedModelError: the model is not a causal language model.
            CalibrationError: the calibrator's file cannot be read.
        """
        from cocoa_engine.execution.forward.linears import kernels_name, reads_blocks
        from cocoa_engine.model.loading import load_pretrained

        calibrator = "auto" if calibrator == "auto" else RiskCalibrator.of(calibrator)  # before the weights are read
        linears = "auto" if runtime is None else runtime.linears
        model, tokenizer, name = load_pretrained(
            model_name,
            tokenizer_name=tokenizer_name,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            keeps_blocks=partial(reads_blocks, linears),
            weights="stored" if runtime is None else runtime.weights,
            light_with=partial(kernels_name, linears) if runtime is None or runtime.forward == "auto" else None,
            model_kwargs=dict(model_kwargs or {}),
            tokenizer_kwargs=dict(tokenizer_kwargs or {}),
            **more_model_kwargs,
        )
        model = cast("PreTrainedModel", model)  # a light one is told apart where it matters
        return cls(model, not_shared(tokenizer), config=config, runtime=runtime, model_name=name, calibrator=calibrator)

    @property
    def calibrator(self) -> RiskCalibrator | None:
        """The calibrator of the engine. :meth:`calibrator_for` says whether it applies to a call."""
        return self._risk.calibrator

    @calibrator.setter
    def calibrator(self, calibrator: RiskCalibrator | str | Path | None) -> None:
        self._risk = EngineRisk(self.session, calibrator)

    def calibrator_for(self, config: CocoaConfig) -> RiskCalibrator | None:
        """The calibrator that applies to a call with these settings, if any.

        The default calibrator applies only to the settings that it was fitted for, and where what it needs is measured.
        """
        self._session.require_process()
        return self._risk.applying(config)

    def with_calibrator(self, calibrator: RiskCalibrator | str | Path) -> Self:
        """This engine with another calibrator; everything else is shared, the running batch included.

        Args:
            calibrator: as for the constructor.

        Raises:
            CalibrationError: the calibrator's file cannot be read, or it cannot be used with this model.
        """
        other = self._with(EngineRisk(self.session, calibrator))
        other._risk.warn_of_mismatch(None)
        return other

    def without_calibrator(self) -> Self:
        """This engine without its calibrator; everything else is shared. Without one, returns the engine itself."""
        return self if self.calibrator is None else self._with(EngineRisk(self._session, None))

    def without_answer_risk(self) -> Self:
        """This engine without a calibrator for answers, for texts that are parts of answers; all else is shared."""
        return (
            self if self.calibrator is None or self.calibrator.answer is None else self._with(self._risk.spans_only())
        )

    def _with(self, risk: EngineRisk) -> Self:
        other = copy.copy(self)
        other._risk = risk
        return other

    def _settings(self, config: CocoaConfig | None, settings: dict[str, Any]) -> CocoaConfig:
        base = self.config if config is None else of_type(config, CocoaConfig, "config")
        config = base.replace(**settings) if settings else base
        self._risk.warn_of_mismatch(config)
        return config
