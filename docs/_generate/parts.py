"""The generated parts of the reference, by name, and their insertion into pages.

A page contains a block like this. The site shows the generated Markdown instead of the note::

    <!-- generated: settings -->
    Note for readers of the plain file.
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable

from docs._generate.command_line import command_line
from docs._generate.error_classes import error_classes
from docs._generate.metadata_keys import metadata_keys
from docs._generate.request_parameters import request_parameters
from docs._generate.setting_tables import ray_settings, runtime_settings, server_settings, settings

PARTS: dict[str, Callable[[], str]] = {
    "cli": command_line,
    "settings": settings,
    "runtime": runtime_settings,
    "server": server_settings,
    "parameters": request_parameters,
    "ray": ray_settings,
    "metadata": metadata_keys,
    "errors": error_classes,
}

_BLOCK = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str) -> str:
    """The page with every generated block filled in.

    Raises:
        KeyError: a block asks for a part that does not exist.
    """
    return _BLOCK.sub(lambda block: PARTS[block[1]](), page)
