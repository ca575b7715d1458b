"""A group of commands that is listed in the order in which people need them."""

from __future__ import annotations

import click


class InOrder(click.Group):
    """In the order of their definition: click itself sorts by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As they were defined."""
        return list(self.commands)
