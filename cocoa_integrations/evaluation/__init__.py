"""Evaluation on local data files: the paper's prompts, common metrics, and runs that can be resumed.

>>> from cocoa_integrations.evaluation import Arm, evaluate, load_samples, TASKS
>>> samples = load_samples("truthfulqa_mc", "TruthfulQA.csv", limit=40)
>>> results = evaluate(engine, TASKS["truthfulqa_mc"], samples, [Arm("greedy"), Arm("cocoa-sig", "f_mlds", 2.5)], "out")
"""

from cocoa_integrations.evaluation.harness import evaluate
from cocoa_integrations.evaluation.tasks import TASKS, Arm, EvalTask, Sample, load_samples, make_arms

__all__ = ["TASKS", "Arm", "EvalTask", "Sample", "evaluate", "load_samples", "make_arms"]
