"""Labelled data and questions of a command: its options, and what the model measures of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.unfinished import fate
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CalibrationError, DataError
from cocoa_engine.lab.data import FORMATS, LabelledText, Question, checked, read_labelled, read_questions, sample
from cocoa_engine.lab.files import read_document
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_engine.risk.features import Level

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_engine.lab.cache import CacheFolder
    from cocoa_engine.lab.fit import LabelledFeatures
    from cocoa_engine.lab.forced import TeacherForced

DataPath = Annotated[Path, typer.Option("--data", help="A labelled data set: a file or a folder.")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="|".join(FORMATS), help="The format of the data. Default: detected.", show_default=False
    ),
]
Prompts = Annotated[
    int | None,
    typer.Option(min=2, max=10**7, help="Use the answers to this many prompts, drawn at random. Default: all."),
]
Chat = Annotated[bool, typer.Option("--chat", help="Use the model's chat template instead of a plain-text prompt.")]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        file_okay=False,
        help="Keep what is measured of each answer in this folder for good, for other commands too. Without it, an "
        "interrupted command continues when it is given again.",
        show_default=False,
    ),
]
Draws = Annotated[int, typer.Option(min=20, max=100_000, help="Number of bootstrap draws.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of all random draws.")]


def read(path: Path, format: str | None, prompts: int | None, seed: int) -> list[LabelledText]:
    """Read the labelled answers of a command.

    Raises:
        DataError: the data cannot be read, or has labels of one class only.
    """
    records = sample(read_labelled(path, format), prompts, seed)
    return checked(records, path)


def read_documents(path: Path) -> list[str]:
    """The text of a file, or of each ``.txt`` and ``.md`` file of a folder, in the order of their names.

    Raises:
        DataError: there are none, or one cannot be read.
    """
    files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no .txt or .md files.")
    return [read_document(file) for file in files]


@contextmanager
def teacher_forced(
    engine: CocoaEngine,
    records: list[LabelledText],
    config: CocoaConfig,
    *,
    chat: bool,
    without_source: bool = False,
    layer: int | None = None,
    cache: CacheFolder | None = None,
    progress: Progress,
) -> Iterator[Iterator[TeacherForced]]:
    """Feed answers as :func:`~cocoa_engine.lab.forced.force` does, as the stage ``feeding answers``.

    ``cache`` is a folder in which they are kept, with the mean states of their spans at a ``layer``.
    """
    from cocoa_engine.lab.forced import ProfileCache, force

    options: dict[str, Any] = {"chat": chat, "without_source": without_source}
    fed = None if cache is None else ProfileCache(cache, engine, config, layer=layer, **options)
    with progress.stage("feeding answers", "answers", len(records), fate=partial(fate, cache)) as stage:
        yield force(engine, records, config, cache=fed, advance=stage.advance, **options)


def short_name(model: str | None) -> str:
    """The last part of a model's name, for file names."""
    return (model or MODEL_NAME).rstrip("/").rpartition("/")[2]


def command_line() -> str:
    """The command line of this process, with ``cocoa`` as the program's name."""
    return shlex.join(["cocoa", *sys.argv[1:]])


ANSWER = 10.0
"""The work of an answer to a question, where that of feeding a text is 1."""


@dataclass(frozen=True, kw_only=True)
class LabelledAnswers:
    """Where labelled answers come from. At least one source is named.

    Attributes:
        data: a file or folder of labelled answers.
        records: what was read from it.
        questions: a file of questions with known answers, for the model to answer.
        asked: what was read from it.
        self_made: whether the model answers questions about invented passages, and about ``texts``.
        texts: the documents to ask about.
        count: the number of questions of that kind; `None`: the default.
        chat: whether given answers follow a chat prompt.
        seed: chooses prompts and makes questions.
        cache: the folder in which what is measured is kept.
    """

    data: Path | None
    records: list[LabelledText]
    questions: Path | None
    asked: Sequence[Question]
    self_made: bool
    texts: Sequence[str]
    count: int | None
    chat: bool
    seed: int
    cache: CacheFolder | None = None

    @classmethod
    def read(
        cls,
        *,
        data: Path | None,
        format: str | None,
        questions: Path | None,
        self_made: bool,
        documents: Path | None,
        prompts: int | None,
        chat: bool,
        seed: int,
    ) -> LabelledAnswers:
        """Read the files. The arguments are options of ``cocoa calibrate``.

        Raises:
            DataError: a file cannot be read, or has no usable records.
        """
        return cls(
            data=data,
            records=[] if data is None else read(data, format, prompts, seed),
            questions=questions,
            asked=[] if questions is None else sample(read_questions(questions), prompts, seed),
            self_made=self_made,
            texts=[] if documents is None else read_documents(documents),
            count=prompts,
            chat=chat,
            seed=seed,
        )

    def shares(self) -> dict[str, float]:
        """The stages of :meth:`measured`, and the work of each: that of feeding a text is 1."""
        from cocoa_engine.lab.self_made import QUESTIONS

        made = (self.count or QUESTIONS) if self.self_made else 0
        return {
            "feeding answers": len(self.records),
            "answering questions": ANSWER * (len(self.asked) + made),
            "feeding texts": made // 2,
        }

    def measured(
        self, engine: CocoaEngine, config: CocoaConfig, level: Level | None, *, states: bool, progress: Progress
    ) -> tuple[dict[Level, LabelledFeatures], dict[Level, str]]:
        """The features of the answers, and a description of their source, by level.

        Args:
            engine: the engine with the model.
            config: the settings.
            level: the only level to return; `None`: all that are labelled.
            states: whether hidden states are kept, for a probe.
            progress: that of the command.

        Raises:
            CalibrationError: nothing is labelled by this level.
        """
        from cocoa_engine.lab.cache import answers_cache
        from cocoa_engine.lab.fit_calibrator import about_self_made
        from cocoa_engine.lab.forced import ProfileCache
        from cocoa_engine.lab.indicators import Layers
        from cocoa_engine.lab.measured import labelled_features, own_answers, probe_layer
        from cocoa_engine.lab.self_made import QUESTIONS, made_questions, self_made_features

        Layers.of(config, engine.num_layers)  # refuse bad settings before the work
        becomes = partial(fate, self.cache)
        asks = self.questions is not None or self.self_made
        answers_kept = answers_cache(self.cache, "answers", engine, config) if self.cache and asks else None
        found: dict[Level, LabelledFeatures] = {}
        about: dict[Level, str] = {}
        if self.data is not None:
            layer = probe_layer(engine.num_layers) if states else None
            how_fed: Any = {"chat": self.chat, "layer": layer, "cache": self.cache, "progress": progress}
            with teacher_forced(engine, self.records, config, **how_fed) as answers:
                found = labelled_features(answers, config, engine.num_layers, states=states)
            how = "as a chat" if self.chat else "plain prompts"
            about = dict.fromkeys(found, f"{self.data.name}, {len(self.records)} given answers, {how}")
        if self.questions is not None:
            with progress.stage("answering questions", "questions", len(self.asked), fate=becomes) as stage:
                found["answer"] = own_answers(engine, self.asked, config, cache=answers_kept, advance=stage.advance)
            about["answer"] = f"{self.questions.name}, the model's own answers to {len(self.asked)} questions"
        if self.self_made:
            made = made_questions(self.texts, self.count or QUESTIONS, self.seed)
            known = None if self.cache is None else ProfileCache(self.cache, engine, config, chat=self.chat)
            with progress.stage("answering questions", "questions", len(made), fate=becomes) as stage:
                found = self_made_features(
                    engine,
                    made,
                    config,
                    chat=self.chat,
                    seed=self.seed,
                    cache=answers_kept,
                    known=known,
                    advance=stage.advance,
                    feeding=partial(progress.track, "feeding texts", "texts"),
                )
            about = about_self_made(found, len(made), len(self.texts))
        found = {one: items for one, items in found.items() if level in (None, one)}
        if not found:
            raise CalibrationError(f"the data has no labels{f' by {level}' if level else ''}.")
        return found, about
