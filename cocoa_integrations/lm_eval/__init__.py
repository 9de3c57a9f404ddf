"""The engine as a model of lm-evaluation-harness, and the paper's tasks for the harness.

Importing this package registers the model ``cocoa``. ``python -m cocoa_integrations.lm_eval`` runs the command line of
the harness with the model and the tasks registered. The harness downloads the data of its tasks:

>>> import cocoa_integrations.lm_eval
>>> import lm_eval
>>> arguments = "method=cocoa-sig,alpha=1.0"
>>> lm_eval.simple_evaluate(model="cocoa", model_args=arguments, tasks=["hellaswag"])  # doctest: +SKIP
"""

from pathlib import Path

from cocoa_engine.integration import need

need("lm_eval.api.model", extra="eval", what=__name__)

from cocoa_integrations.lm_eval.model import CocoaLM

TASKS_PATH = str(Path(__file__).with_name("tasks"))
"""The folder of the tasks, for ``TaskManager(include_path=...)``."""

__all__ = ["TASKS_PATH", "CocoaLM"]
