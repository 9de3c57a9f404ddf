"""Cache of measured answers, and the answers of a model to many prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from zlib import crc32

from cocoa_engine.cache_directory import parse_note
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError, OutputError
from cocoa_engine.model.prompts import Prompt, Source
from cocoa_engine.output_files import append, open_in_place
from cocoa_engine.results import Generation

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

VERSION = 2
"""To be raised when other values are kept, or the same ones are measured in another way."""

_CHECKSUM = b', "crc32": %d}\n'


@dataclass
class CacheFolder:
    """A folder for what is measured of answers.

    Attributes:
        path: the folder; it is created.
        required: whether an error of its files is raised. Otherwise, nothing more is kept in it after the first one.
        error: this error.
    """

    path: Path
    required: bool = True
    error: OSError | None = None

    def answers(self) -> int:
        """The number of answers in its files. A file that cannot be read has none."""
        count = 0
        for file in self.path.glob("*.jsonl"):
            with suppress(OSError), file.open("rb") as lines:
                count += sum(line.endswith(b"\n") for line in lines)
        return count

    def failed(self, file: Path, error: OSError) -> None:
        """Note an error of a file.

        Raises:
            ConfigError: it is required.
        """
        if self.required:
            why = error.__cause__ if isinstance(error, OutputError) else error
            raise ConfigError(f"the cache {file} cannot be used: {getattr(why, 'strerror', None) or why}") from error
        self.error = error


class AnswerCache:
    """Plain values of answers, in one file of JSON lines for each model and choice of settings.

    Every answer is written as soon as it has been measured. A last line that was cut off is measured again. Plain
    values identify an answer too, such as its prompt and its text.

    Args:
        folder: the folder of the file.
        what: what is measured, the beginning of the file's name.
        engine: the engine that measures.
        config: the settings, which decide in which heads source attention is measured.
        settings: whatever else the values depend on, as plain values.

    Raises:
        ConfigError: the file is required, and cannot be written to or has a line of something else.
    """

    def __init__(
        self, folder: CacheFolder, what: str, engine: CocoaEngine, config: CocoaConfig, settings: Mapping[str, Any]
    ) -> None:
        from cocoa_engine.methods.retrieval_heads import source_heads
        from cocoa_engine.model.language_model import dtype_name
        from cocoa_engine.model.weight_identity import model_digest

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
        self.file = folder.path / f"{what}-{_digest(conditions)[:16]}.jsonl"
        self._folder = folder
        self._offsets: dict[str, int] = {}  # of the lines: the values of many answers would fill the memory
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            with open_in_place(self.file) as file:
                self._find_lines(file)
        except OSError as error:
            folder.failed(self.file, error)

    def get(self, identity: Any) -> dict[str, Any] | None:
        """The values of an answer; `None` if it has not been measured.

        Raises:
            ConfigError: the file is required and cannot be read.
        """
        offset = self._offsets.get(_digest(identity))
        if offset is None:
            return None
        try:
            with self.file.open("rb") as file:
                file.seek(offset)
                line = file.readline()
        except OSError as error:
            self._folder.failed(self.file, error)
            return None
        row = _read(line)
        if row is None:  # the file has changed since it was opened
            self._damaged()
            return None
        values: dict[str, Any] = row["values"]
        return values

    def add(self, identity: Any, values: dict[str, Any]) -> None:
        """Keep the values of an answer, which must be plain.

        Raises:
            ConfigError: the file is required and cannot be written to.
        """
        if self._folder.error is not None:
            return
        key = _digest(identity)
        try:
            self._offsets[key] = append(self.file, _line(key, values))
        except OSError as error:
            self._folder.failed(self.file, error)

    def get_or_measure(self, identity: Any, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The values of an answer, which is measured and kept if it has not been measured."""
        values = self.get(identity)
        if values is None:
            values = measure()
            self.add(identity, values)
        return values

    def _find_lines(self, file: BinaryIO) -> None:
        """Note where the line of each answer begins, and remove a last line that was cut off.

        If the file is not required, everything from a bad line on is removed: a power failure may have damaged it.
        """
        offset = 0
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(offset)
                return
            row = _read(line)
            if row is None:
                self._damaged()
                file.truncate(offset)
                return
            self._offsets[row["answer"]] = offset
            offset += len(line)

    def _damaged(self) -> None:
        """Refuse a file that is required and has a line of something else."""
        if self._folder.required:
            raise ConfigError(f"the cache {self.file} has a line that it did not write; delete it.")


def _line(key: str, values: dict[str, Any]) -> bytes:
    """The line of an answer. It ends with a checksum of what comes before."""
    text = json.dumps({"answer": key, "values": values}).encode()[:-1]
    return text + _CHECKSUM % crc32(text)


def _read(line: bytes) -> dict[str, Any] | None:
    """What :func:`_line` was given; `None` for another line."""
    text, mark, rest = line.rpartition(_CHECKSUM[: _CHECKSUM.index(b"%")])
    row = parse_note(line) if mark and mark + rest == _CHECKSUM % crc32(text) else None
    known = row is not None and isinstance(row.get("answer"), str) and isinstance(row.get("values"), dict)
    return row if known else None


def _tokenizer_digest(tokenizer: Any) -> str:
    """A digest of how texts become tokens, and chats texts."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    # the tokens of some tokenizers in Python are bytes
    rules = sorted(map(repr, tokenizer.get_vocab().items())) if fast is None else fast.to_str()
    return _digest([type(tokenizer).__name__, rules, getattr(tokenizer, "chat_template", None)])


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


ItemT = TypeVar("ItemT")


def generated(
    engine: CocoaEngine,
    items: Sequence[ItemT],
    prompts: Sequence[Prompt],
    config: CocoaConfig,
    *,
    source: Sequence[Source | None] | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[ItemT, Generation]]:
    """Each item with the model's answer to its prompt.

    Args:
        engine: the engine with the model.
        items: what is asked, such as questions.
        prompts: the prompt of each item.
        config: the settings. ``max_risk`` is left out: only complete answers can be judged.
        source: the passages of each prompt, as for :meth:`~cocoa_engine.CocoaEngine.generate_batch`.
        advance: called with the number of prompts answered since the last call.
    """
    config, size = config.replace(max_risk=None), engine.runtime.max_batch_size
    for start in range(0, len(items), size):
        batch = slice(start, start + size)
        passages = None if source is None else source[batch]
        generations = engine.generate_batch(prompts[batch], config=config, source=passages)
        advance(len(generations))
        yield from zip(items[batch], generations, strict=True)


def answered(
    engine: CocoaEngine,
    items: Sequence[ItemT],
    prompts: Sequence[Prompt],
    config: CocoaConfig,
    values_of: Callable[[Generation], dict[str, Any]],
    *,
    source: Sequence[Sequence[str] | None] | None = None,
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[ItemT, dict[str, Any]]]:
    """Each item with plain values of the model's answer to its prompt, in order, each as soon as it is known.

    Args:
        engine, items, prompts, config, source: as for :func:`generated`.
        values_of: measures an answer.
        cache: values of prompts that were answered before are taken from here, and others are added.
        advance: called with the number of prompts answered since the last call.
    """
    passages = source or [None] * len(prompts)
    identities = [prompt if one is None else [prompt, one] for prompt, one in zip(prompts, passages, strict=True)]
    known = [None if cache is None else cache.get(identity) for identity in identities]
    missing = [number for number, values in enumerate(known) if values is None]
    advance(len(known) - len(missing))
    asked, of_asked = [prompts[at] for at in missing], [passages[at] for at in missing]
    answers = generated(engine, missing, asked, config, source=of_asked, advance=advance)
    for number, (item, values) in enumerate(zip(items, known, strict=True)):
        if values is None:
            values = values_of(next(answers)[1])
            if cache is not None:
                cache.add(identities[number], values)
        yield item, values


def answers_cache(folder: CacheFolder, what: str, engine: CocoaEngine, config: CocoaConfig) -> AnswerCache:
    """A cache of the model's answers with some settings, for :func:`answered`.

    Raises:
        ConfigError: as for :class:`.AnswerCache`.
    """
    calibrator = engine.calibrator_for(config)
    settings = {
        "config": config.model_dump(mode="json"),
        "calibrator": None if calibrator is None else calibrator.model_dump(mode="json"),
    }
    return AnswerCache(folder, what, engine, config, settings)
