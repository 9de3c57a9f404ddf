"""``python -m cocoa_integrations.lm_eval``: the command line of lm-evaluation-harness with the model ``cocoa``."""

import sys

from lm_eval.__main__ import cli_evaluate

from cocoa_integrations.lm_eval import TASKS_PATH


def main() -> None:
    """Run the harness. ``--include_path`` defaults to the folder of the tasks."""
    if not any(argument.split("=")[0] == "--include_path" for argument in sys.argv):
        sys.argv += ["--include_path", TASKS_PATH]
    cli_evaluate()


if __name__ == "__main__":
    main()
