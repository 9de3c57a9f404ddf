"""``python -m tests.conformance [SUITE ...]``: run suites, each against a server of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tests.conformance.suites import SUITES
from tests.conformance.tools import ROOT, SuiteError, Tools


def main() -> int:
    parser = argparse.ArgumentParser(description="Suites that others wrote, against this server.")
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="default: all")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-conformance", help="with requirements.txt")
    given = parser.parse_args()
    environment = given.environment.absolute()
    tools = Tools(folder=environment / "work", python=str(environment / "bin" / "python"))
    tools.folder.mkdir(parents=True, exist_ok=True)
    lines, failed = [], False
    for name in given.suites or SUITES:
        begun = time.monotonic()
        try:
            outcome = SUITES[name](tools)
        except (SuiteError, subprocess.SubprocessError) as error:
            outcome, failed = f"FAILED: {error}", True
        lines.append(f"{name}: {outcome} ({time.monotonic() - begun:.0f} s)")
        print(lines[-1], flush=True)
    print("\n".join(["", *lines]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
