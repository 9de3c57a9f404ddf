"""Options under their former names: they still work, and a note names the new ones."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from cocoa_engine.cli.terminal import print_note

FORMER = {"--jsonl": "--rows", "--table": "--details", "--no-table": "--no-details"}
"""The new name of each former one."""


class FormerOptions(TyperCommand):
    """A command that also takes the former names of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with new names in place of former ones. Values of other options are left alone."""
        options = [one for one in self.get_params(ctx) if one.param_type_name == "option"]
        names = {name for one in options for name in (*one.opts, *one.secondary_opts)}
        with_value = {name for one in options if not getattr(one, "is_flag", False) for name in one.opts}
        renamed: list[str] = []
        for before, given in zip(["", *args], args, strict=False):
            former, equals, value = given.partition("=")
            is_option = before not in with_value and "--" not in renamed
            if is_option and (name := FORMER.get(former)) in names:
                print_note(f"warning: {former} is now {name}")
                given = f"{name}{equals}{value}"
            renamed.append(given)
        return super().parse_args(ctx, renamed)
