"""The table of parameters of other servers, from the table that the server checks."""

from __future__ import annotations

from itertools import groupby

from cocoa_integrations.server.parameters import REFUSED, SAME_SETTING, WITHOUT_EFFECT
from docs._generate.markdown import code, prose, table


def request_parameters() -> str:
    """The table of the parameters of a request that are settings, refused, or without effect."""
    rows = [
        [
            _listed([name for name, setting in SAME_SETTING.items() if setting == setting_of]),
            "any",
            f"the setting {code(setting_of)}",
        ]
        for setting_of in dict.fromkeys(SAME_SETTING.values())
    ]
    for (neutral, instead), entries in groupby(REFUSED.items(), key=lambda entry: entry[1]):
        accepted = ", ".join(code(repr(value).lower().replace("'", '"')) for value in neutral) or "none"
        rows.append([_listed([name for name, _ in entries]), accepted, f"refused: {prose(instead)}"])
    rows.append([_listed(WITHOUT_EFFECT), "any", "no effect: the answer would be the same"])
    return table(["Parameter", "Values that are accepted", "What it does"], rows)


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(map(code, names))
