"""``python -m docs._generate settings`` prints a generated part of the reference as Markdown; by default, all parts."""

from __future__ import annotations

import sys

from docs._generate.parts import PARTS

for name in sys.argv[1:] or PARTS:
    print(PARTS[name]())
