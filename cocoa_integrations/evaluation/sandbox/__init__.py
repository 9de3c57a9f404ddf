"""Runs Python code that a model wrote, and judges it by tests that run in another process.

The code runs in a *worker* process, the tests in a *judge* process. When a test calls a function of the code, the judge
sends the arguments to the worker and gets back plain data, of bounded size. The judge compares it. The code never sees
the expected values, and cannot change how they are compared.

The kernel confines both processes before any of the code runs (:mod:`.confinement`). Where it cannot,
:func:`run_code` refuses, unless ``unsafe`` is given.
"""

from __future__ import annotations

from cocoa_integrations.evaluation.sandbox.runner import Verdict, require_confinement, run_code

__all__ = ["Verdict", "require_confinement", "run_code"]
