"""What was measured of answers, kept in a folder, so that an interrupted measurement continues."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


VERSION = 1
"""To be raised when other values are kept, or the same ones are measured in another way."""


class AnswerCache:
    """Plain values of answers, in one file of JSON lines for each model and choice of settings.

    Every answer is written as soon as it has been measured. A last line that was cut off is measured again. Plain
    values identify an answer too, such as its prompt and its text.

    Args:
        folder: the folder of the file; it is created.
        what: what is measured, the beginning of the file's name.
        engine: the engine that measures.
        config: the settings, which decide in which heads source attention is measured.
        settings: whatever else the values depend on, as plain values.

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
            "version": VERSION,
            "model": model_digest(model),
            "model_name": engine.model_name,  # the digest does not see all weights of quantised models
            "tokenizer": _tokenizer_digest(engine.tokenizer),
            "dtype": dtype_name(model),
            "heads": source_heads(config.decore_heads, model, None if calibrator is None else calibrator.heads),
            "linears": engine.runtime.linears,
            **settings,
        }
        self.file = folder / f"{what}-{_digest(conditions)[:16]}.jsonl"
        self._offsets: dict[str, int] = {}  # of the lines: the values of many answers would fill the memory
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file.touch()
            with self.file.open("r+b") as file:
                self._find_lines(file)
        except OSError as error:
            raise ConfigError(f"the cache {self.file} cannot be used: {error}") from error

    def get(self, identity: Any) -> dict[str, Any] | None:
        """The values of an answer; `None` if it has not been measured."""
        offset = self._offsets.get(_digest(identity))
        if offset is None:
            return None
        with self.file.open("rb") as file:
            file.seek(offset)
            values: dict[str, Any] = json.loads(file.readline())["values"]
        return values

    def add(self, identity: Any, values: dict[str, Any]) -> None:
        """Keep the values of an answer, which must be plain.

        Raises:
            ConfigError: the file cannot be written to.
        """
        key = _digest(identity)
        try:
            with self.file.open("ab") as file:
                offset = file.seek(0, os.SEEK_END)
                file.write(json.dumps({"answer": key, "values": values}).encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"the cache {self.file} cannot be written to: {error.strerror}") from error
        self._offsets[key] = offset

    def _find_lines(self, file: BinaryIO) -> None:
        """Note where the line of each answer begins, and remove a last line that was cut off."""
        offset = 0
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(offset)
                return
            try:
                row = json.loads(line)
                self._offsets[row["answer"]] = offset
                row["values"].keys()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"the cache {self.file} has a line that it did not write; delete it.") from error
            offset += len(line)


def _tokenizer_digest(tokenizer: Any) -> str:
    """A digest of how texts become tokens, and chats texts."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if fast is None else fast.to_str()
    return _digest([type(tokenizer).__name__, rules, getattr(tokenizer, "chat_template", None)])


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
