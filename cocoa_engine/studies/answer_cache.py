"""What was measured of answers, kept in a folder, so that an interrupted measurement continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.output_files import write_file

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


class AnswerCache:
    """Plain values of answers, in one file of JSON lines for each model and choice of settings.

    Every answer is written as soon as it has been measured. A last line that was cut off is measured again. Plain
    values identify an answer too, such as its prompt and its text.

    Args:
        folder: the folder of the file; it is created.
        what: what is measured, the beginning of the file's name.
        engine: the engine that measures.
        config: the settings. Of these, only the heads whose source attention is measured count by themselves.
        settings: the settings that the values depend on, as plain values.

    Raises:
        ConfigError: the folder or the file cannot be written to.
    """

    def __init__(
        self, folder: Path, what: str, engine: CocoaEngine, config: CocoaConfig, settings: Mapping[str, Any]
    ) -> None:
        from cocoa_engine.methods.retrieval_heads import source_heads
        from cocoa_engine.model.language_model import dtype_name
        from cocoa_engine.model.weight_samples import model_digest

        model, calibrator = engine.session.model, engine.calibrator_for(config)
        conditions = {
            "model": model_digest(model),
            "dtype": dtype_name(model),
            "heads": source_heads(config.decore_heads, model, None if calibrator is None else calibrator.heads),
            "linears": engine.runtime.linears,
            **settings,
        }
        self.file = folder / f"{what}-{_digest(conditions)[:16]}.jsonl"
        self._known: dict[str, dict[str, Any]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file.touch()
            text = self.file.read_text(encoding="utf-8")
            if text and not text.endswith("\n"):  # a line that was cut off
                text = text[: text.rfind("\n") + 1]
                write_file(self.file, text)
        except (OSError, ValueError) as error:  # ValueError: not UTF-8
            raise ConfigError(f"the cache {self.file} cannot be used: {error}") from error
        for line in text.splitlines():
            try:
                row = json.loads(line)
                self._known[row["answer"]] = row["values"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"the cache {self.file} has a line that it did not write; delete it.") from error

    def get(self, identity: Any) -> dict[str, Any] | None:
        """The values of an answer; `None` if it has not been measured."""
        return self._known.get(_digest(identity))

    def add(self, identity: Any, values: dict[str, Any]) -> None:
        """Keep the values of an answer, which must be plain.

        Raises:
            ConfigError: the file cannot be written to.
        """
        key = _digest(identity)
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"answer": key, "values": values}) + "\n")
        except OSError as error:
            raise ConfigError(f"the cache {self.file} cannot be written to: {error.strerror}") from error
        self._known[key] = values


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
