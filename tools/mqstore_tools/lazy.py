"""Groups of commands whose modules are imported when used: click command NAME is in module NAME."""

from __future__ import annotations

import importlib

import click

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """Group that imports a sub-command when it is used, so that `mqstore produce` starts fast."""

    package = "mqstore_tools"
    names: tuple[str, ...] = ()
    """The commands, in the order of the help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.names:
            return None
        command = getattr(importlib.import_module(f"{self.package}.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command
