"""Cache of measured answers, and the answers of a model to many prompts."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError, OutputError
from cocoa_engine.files import append, open_in_place, parse_note
from cocoa_engine.model.prompts import Prompt, Source
from cocoa_engine.results import Generation

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

VERSION = 4
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
        """Note an error of a file, or raise it as a ConfigError if the folder is required."""
        if self.required:
            why = error.__cause__ if isinstance(error, OutputError) else error
            raise ConfigError(f"the cache {file} cannot be used: {getattr(why, 'strerror', None) or why}") from error
        self.error = error


class AnswerCache:
    """Plain values of answers, in one file of JSON lines for each model and choice of settings.

    Every answer is written as soon as it has been measured. A last line that was cut off is measured again. Plain
    values identify an answer too, such as its prompt and its text.

    Args:
        folder, what: the folder of the file, and the beginning of its name.
        engine, config: what measures. The settings decide in which heads source attention is measured.
        settings: whatever else the values depend on, as plain values. Default: all settings, and the calibrator.

    Raises:
        ConfigError: the file is required, and cannot be written to or has a line of something else.
    """

    def __init__(
        self,
        folder: CacheFolder,
        what: str,
        engine: "CocoaEngine",
        config: CocoaConfig,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        from cocoa_engine.methods.retrieval_heads import source_heads
        from cocoa_engine.model.language_model import dtype_name
        from cocoa_engine.model.weight_identity import model_digest

        model, calibrator = engine.session.model, engine.calibrator_for(config)
        if settings is None:
            plain = None if calibrator is None else calibrator.model_dump(mode="json")
            settings = {"config": config.model_dump(mode="json"), "calibrator": plain}
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
                offset = 0
                for line in file:
                    row = _read(line) if line.endswith(b"\n") else None
                    if row is None:  # cut off, or damaged by a power failure: what follows is measured again
                        if line.endswith(b"\n"):
                            self._damaged()
                        file.truncate(offset)
                        break
                    self._offsets[row["answer"]] = offset
                    offset += len(line)
        except OSError as error:
            folder.failed(self.file, error)

    def get(self, identity: Any) -> dict[str, Any] | None:
        """The values of an answer; `None` if it has not been measured. Raises as the constructor does."""
        offset = self._offsets.get(_digest(identity))
        if offset is None:
            return None
        try:
            with self.file.open("rb") as file:
                file.seek(offset)
                row = _read(file.readline())
        except OSError as error:
            self._folder.failed(self.file, error)
            return None
        if row is None:  # the file has changed since it was opened
            self._damaged()
            return None
        values: dict[str, Any] = row["values"]
        return values

    def add(self, identity: Any, values: dict[str, Any]) -> None:
        """Keep the values of an answer, which must be plain. Raises as the constructor does."""
        if self._folder.error is not None:
            return
        key = _digest(identity)
        text = json.dumps({"answer": key, "values": values}).encode()[:-1]
        try:
            self._offsets[key] = append(self.file, text + _CHECKSUM % crc32(text))
        except OSError as error:
            self._folder.failed(self.file, error)

    def _damaged(self) -> None:
        if self._folder.required:
            raise ConfigError(f"the cache {self.file} has a line that it did not write; delete it.")


def _read(line: bytes) -> dict[str, Any] | None:
    """The values of a line that :meth:`AnswerCache.add` wrote; `None` for another line."""
    text, mark, rest = line.rpartition(_CHECKSUM[: _CHECKSUM.index(b"%")])
    row = parse_note(line) if mark and mark + rest == _CHECKSUM % crc32(text) else None
    is_answer = row is not None and isinstance(row.get("answer"), str) and isinstance(row.get("values"), dict)
    return row if is_answer else None


def _tokenizer_digest(tokenizer: Any) -> str:
    """A digest of how texts become tokens, and chats texts."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    # the tokens of some tokenizers in Python are bytes
    rules = sorted(map(repr, tokenizer.get_vocab().items())) if fast is None else fast.to_str()
    return _digest([type(tokenizer).__name__, rules, getattr(tokenizer, "chat_template", None)])


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


ItemT = TypeVar("ItemT")


def answered(
    engine: "CocoaEngine",
    items: Sequence[ItemT],
    prompts: Sequence[Prompt],
    config: CocoaConfig,
    values_of: Callable[[Generation], dict[str, Any]],
    *,
    source: Sequence[Source | None] | None = None,
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[tuple[ItemT, dict[str, Any]]]:
    """Each item with plain values of the model's answer to its prompt, in order, each as soon as it is known.

    Args:
        engine, items, prompts: the engine, what is asked, such as questions, and the prompt of each.
        config: the settings. ``max_risk`` is left out: only complete answers can be judged.
        values_of: measures an answer.
        source: the passages of each prompt, as for :meth:`~cocoa_engine.CocoaEngine.generate_batch`.
        cache: values of prompts that were answered before are taken from here, and others are added.
        advance: called with the number of prompts answered since the last call.
    """
    config, size = config.replace(max_risk=None), engine.runtime.max_batch_size
    passages = source or [None] * len(prompts)
    identities = [prompt if of is None else [prompt, of] for prompt, of in zip(prompts, passages, strict=True)]
    cached = [None if cache is None else cache.get(identity) for identity in identities]
    missing = [number for number, values in enumerate(cached) if values is None]
    advance(len(cached) - len(missing))

    def answers() -> Iterator[Generation]:
        for start in range(0, len(missing), size):
            batch = missing[start : start + size]
            of_batch = [passages[number] for number in batch]
            generations = engine.generate_batch([prompts[number] for number in batch], config=config, source=of_batch)
            advance(len(generations))
            yield from generations

    generations = answers()
    for identity, item, values in zip(identities, items, cached, strict=True):
        if values is None:
            values = values_of(next(generations))
            if cache is not None:
                cache.add(identity, values)
        yield item, values
