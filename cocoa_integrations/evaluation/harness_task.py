"""The tasks for lm-evaluation-harness, and its run of one task for several arms.

The YAML files of :mod:`cocoa_integrations.lm_eval` refer to :class:`CocoaTask`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from json import loads
from typing import Any, Literal, Protocol, runtime_checkable

import lm_eval
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask

from cocoa_engine import METHODS, CocoaConfig, CocoaEngine, Span, rescore
from cocoa_engine.errors import ConfigError
from cocoa_integrations.evaluation import generated_code
from cocoa_integrations.evaluation.tasks import TASKS, Arm, EvalTask, Sample, load_samples
from cocoa_integrations.lm_eval.model import CocoaLM


class CocoaTask(ConfigurableTask):
    """A task of :mod:`cocoa_integrations.evaluation` as a task of the harness.

    ``dataset_kwargs: {task_name: ...}`` in the YAML file selects the task. The choices of a multiple-choice question
    are scored by the decoding method: the task requests ``span_score``, which only the model ``cocoa`` has.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.cocoa_task = task = TASKS[config["dataset_kwargs"]["task_name"]]
        metrics = [
            {"metric": column.metric, "aggregation": "mean", "higher_is_better": column.better == "more"}
            for column in task.columns
        ]
        generation = {"until": list(task.until), "max_gen_toks": task.max_new_tokens}
        choice = {"output_type": "multiple_choice", "doc_to_choice": "choices", "target_delimiter": ""}
        greedy = {"do_sample": False, "temperature": 0.0}
        generated = {"output_type": "generate_until", "generation_kwargs": {**generation, **greedy}}
        defaults = {
            "custom_dataset": load,
            "test_split": "test",
            "num_fewshot": 0,
            "doc_to_text": "prompt",
            "doc_to_target": "target",
            "process_results": "process_results",  # the method of this class
            "unsafe_code": task.runs_code and not generated_code.confines(),
            "metric_list": metrics,
            **(choice if task.multiple_choice else generated),
        }
        super().__init__(config=defaults | {name: value for name, value in config.items() if name != "class"})

    def construct_requests(self, doc: Any, ctx: str, **options: Any) -> Any:
        if not self.cocoa_task.multiple_choice:
            return super().construct_requests(doc, ctx, **options)
        options.pop("chat_template", None)
        choices = doc["choices"]
        if options.pop("apply_chat_template", False):  # the answer of an assistant begins without a space
            choices = [choice.lstrip() for choice in choices]
        return [
            Instance(request_type="span_score", doc=doc, arguments=(ctx, choice), idx=number, **options)
            for number, choice in enumerate(choices)
        ]

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        sample = Sample.model_validate({name: doc[name] for name in Sample.model_fields})
        if self.cocoa_task.multiple_choice:
            return self.cocoa_task.measure(sample, list(results))
        # the harness refuses the task where nothing confines the code, unless it has --confirm_run_unsafe_code
        options = {"confirm_run_unsafe_code": True} if self.cocoa_task.runs_code else {}
        return self.cocoa_task.measure(sample, self.cocoa_task.answer(str(results[0])), **options)


def load(task_name: str, data: str | Mapping[str, str] | None = None, **_: Any) -> dict[str, Dataset]:
    """The documents of a task.

    ``data`` is the path of the data file, from the harness's ``--metadata``; for several tasks in one run, a dict of
    paths by the harness's task names.
    """
    name = f"cocoa_{task_name}"
    path = data.get(name) if isinstance(data, Mapping) else data
    if not path:
        raise ConfigError(
            f'{name} needs its data file: pass --metadata \'{{"data": "path"}}\', or for several tasks '
            f'\'{{"data": {{"{name}": "path", ...}}}}\''
        )
    return _documents(load_samples(task_name, path))


def _documents(samples: Sequence[Sample]) -> dict[str, Dataset]:
    documents = [
        {**sample.model_dump(), "target": sample.references[0], "choices": sample.choices} for sample in samples
    ]
    return {"test": Dataset.from_list(documents)}


class ArmTask(CocoaTask):
    """A task with given samples, whose requests :class:`ArmModel` answers with more than texts and scores."""

    def __init__(self, task: EvalTask, name: str, samples: Sequence[Sample], config: CocoaConfig) -> None:
        self._documents = _documents(samples)
        generation = {"max_gen_toks": config.max_new_tokens, "until": list(task.until), "do_sample": False}
        own = {} if task.multiple_choice else {"generation_kwargs": generation}
        super().__init__({"task": name, "dataset_kwargs": {"task_name": task.name}, **own})

    def download(self, dataset_kwargs: Mapping[str, Any] | None = None, **_: Any) -> None:
        self.dataset = self._documents

    def build_all_requests(self, **options: Any) -> None:
        """Build the requests, without the harness's progress bar: `cocoa eval` has its own."""
        with redirect_stderr(StringIO()):
            super().build_all_requests(**options)

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        plain = [response.score if self.cocoa_task.multiple_choice else response.text for response in results]
        return super().process_results(doc, plain)


Kind = Literal["generations", "spans"]
"""A method of :class:`~cocoa_integrations.lm_eval.CocoaLM`."""


@runtime_checkable
class Engines(Protocol):
    """Engines in other processes that answer requests of the harness."""

    def answer(
        self, kind: Kind, requests: Sequence[Any], config: CocoaConfig, advance: Callable[[int], object]
    ) -> list[Any]:
        """As :func:`answer` does."""


class ArmModel(LM):
    """The model of the harness that answers the requests of :class:`ArmTask`, with the settings of an arm, ``config``.

    ``advance`` is called with the number of requests that were answered.
    """

    loglikelihood = loglikelihood_rolling = None  # not requested
    config: CocoaConfig

    def __init__(self, engine: CocoaEngine | Engines, advance: Callable[[int], object]) -> None:
        super().__init__()
        self._engine, self._advance = engine, advance
        self._known: dict[tuple[str, ...], Span] = {}

    def generate_until(self, requests: Sequence[Instance]) -> list[Any]:
        """The answer to each request, which only :class:`ArmTask` can read."""
        return self._answer("generations", requests)

    def span_score(self, requests: Sequence[Instance]) -> list[Span]:
        """The span of each choice, likewise. Arms that need the same statistics share the forward passes."""
        family = self.config.method if METHODS[self.config.method].needs_own_passes else ""
        keys = [(family, *request.args) for request in requests]
        missing = [number for number, key in enumerate(keys) if key not in self._known]
        spans = self._answer("spans", [requests[number] for number in missing])
        self._known |= {keys[number]: span for number, span in zip(missing, spans, strict=True)}
        self._advance(len(keys) - len(missing))
        spans = [self._known[key] for key in keys]
        return spans if family else [rescore(span, self.config) for span in spans]

    def _answer(self, kind: Kind, requests: Sequence[Instance]) -> list[Any]:
        if not requests:
            return []
        if isinstance(self._engine, Engines):
            return self._engine.answer(kind, requests, self.config, self._advance)
        return answer(kind, self.config, self._advance, self._engine, requests)


def answer(
    kind: Kind, config: CocoaConfig, advance: Callable[[int], object], engine: CocoaEngine, requests: Sequence[Instance]
) -> list[Any]:
    """What ``CocoaLM`` returns for requests, with these settings. Generations have the risk of the engine."""
    lm = CocoaLM(engine=engine)
    lm.config = config
    if kind == "generations":
        lm.engine = engine
    answers: list[Any] = getattr(lm, kind)(requests, advance)
    return answers


def run_arm(
    lm: ArmModel,
    task: EvalTask,
    arm: Arm,
    samples: Sequence[Sample],
    config: CocoaConfig,
    confirm_run_unsafe_code: bool,
) -> list[dict[str, Any]]:
    """The row of each sample, from a run of the harness with the settings of one arm."""
    lm.config = config
    name = f"{task.name}, {arm}"
    tasks = {"tasks": {name: ArmTask(task, name, samples, config)}}
    options: Any = {"bootstrap_iters": 0, "confirm_run_unsafe_code": confirm_run_unsafe_code}
    logged = lm_eval.evaluate(lm, tasks, **options)["samples"][name]
    rows = []
    for sample, logged_row in zip(samples, logged, strict=True):
        answers = logged_row["filtered_resps"]
        if task.multiple_choice:
            choices = [
                {
                    "text": span.text,
                    "correct": at < len(sample.references),
                    "score": span.score,
                    "spans": _as_json([span]),
                }
                for at, span in enumerate(answers)
            ]
            best = max(answers, key=lambda span: span.score)
            own = {"answer": best.text.strip(), "choices": choices}
        else:
            (generation,) = answers
            own = {
                "answer": task.answer(generation.text),
                "finish_reason": generation.finish_reason,
                "usage": generation.usage.model_dump(mode="json"),
                "spans": _as_json(generation.spans),
            }
        rows.append(
            {
                "arm": str(arm),
                "id": sample.id,
                **arm._asdict(),
                "sample": sample.digest,
                **sample.model_dump(include={"question", "references", "incorrect", "context"}),
                **own,
                "metrics": {column.metric: float(logged_row[column.metric]) for column in task.columns},
            }
        )
    return rows


def _as_json(spans: Sequence[Span]) -> list[Any]:
    return [loads(span.model_dump_json()) for span in spans]
