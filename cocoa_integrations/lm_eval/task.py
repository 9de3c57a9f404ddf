"""The tasks for lm-evaluation-harness. Each has a YAML file in ``tasks/`` that refers to the class defined here.

Prompts, metrics and data files are those of :mod:`cocoa_integrations.evaluation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from cocoa_engine.errors import ConfigError
from cocoa_integrations.evaluation import generated_code
from cocoa_integrations.evaluation.data import load_samples
from cocoa_integrations.evaluation.tasks import TASKS, EvalTask, Sample


class CocoaTask(ConfigurableTask):
    """A task of :mod:`cocoa_integrations.evaluation` as a task of the harness.

    ``dataset_kwargs: {task_name: ...}`` in the YAML file selects the task. The choices of a multiple-choice question
    are scored by the decoding method: the task requests ``span_score``, which only the model ``cocoa`` has.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.cocoa_task = TASKS[config["dataset_kwargs"]["task_name"]]
        own = {name: value for name, value in config.items() if name != "class"}
        super().__init__(config={**_config(self.cocoa_task), **own})

    def construct_requests(self, doc: Any, ctx: str, **options: Any) -> Any:
        """The requests to the model for one document."""
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
        """The metrics of an answer, or of the scores of the choices."""
        sample = Sample.model_validate({name: doc[name] for name in Sample.model_fields})
        if self.cocoa_task.multiple_choice:
            return self.cocoa_task.measure(sample, list(results))
        # the harness refuses the task where nothing confines the code, unless it has --confirm_run_unsafe_code
        options = {"confirm_run_unsafe_code": True} if self.cocoa_task.runs_code else {}
        return self.cocoa_task.measure(sample, self.cocoa_task.answer(str(results[0])), **options)


def load(task_name: str, data: str | Mapping[str, str] | None = None, **_: Any) -> dict[str, Dataset]:
    """The documents of a task.

    Args:
        task_name: the name of the task.
        data: the path of the data file, from the harness's ``--metadata``. For several tasks in one run, a dict of
            paths by the harness's task names.

    Raises:
        ConfigError: no path was given.
        DataError: the file cannot be used.
    """
    name = f"cocoa_{task_name}"
    path = data.get(name) if isinstance(data, Mapping) else data
    if not path:
        raise ConfigError(
            f'{name} needs its data file: pass --metadata \'{{"data": "path"}}\', or for several tasks '
            f'\'{{"data": {{"{name}": "path", ...}}}}\''
        )
    documents = [
        {**sample.model_dump(), "target": sample.references[0], "choices": sample.choices}
        for sample in load_samples(task_name, path)
    ]
    return {"test": Dataset.from_list(documents)}


def _config(task: EvalTask) -> dict[str, Any]:
    """The harness configuration of a task."""
    config: dict[str, Any] = {
        "custom_dataset": load,
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "prompt",
        "doc_to_target": "target",
        "process_results": "process_results",  # the method of this class
        "unsafe_code": task.runs_code and not generated_code.confines(),
        "metric_list": [
            {"metric": column.metric, "aggregation": "mean", "higher_is_better": column.better == "more"}
            for column in task.columns
        ],
    }
    if task.multiple_choice:
        return {**config, "output_type": "multiple_choice", "doc_to_choice": "choices", "target_delimiter": ""}
    generation = {
        "until": list(task.until),
        "max_gen_toks": task.max_new_tokens,
        "do_sample": False,
        "temperature": 0.0,
    }
    return {**config, "output_type": "generate_until", "generation_kwargs": generation}
