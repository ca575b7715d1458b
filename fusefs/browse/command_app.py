"""What screens find in the program that shows them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from textual import events
from textual.app import App

from fusefs.browse.other_commands import OtherCommands


class CommandApp(App[int]):
    """A program whose work is done by other commands.

    commands  runs them
    typed_s   when a key was pressed last (time.monotonic)
    """

    def __init__(self, trashd: Sequence[str]) -> None:
        """trashd: the words by which it is started."""
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.commands = OtherCommands(trashd)
        self.typed_s = time.monotonic()

    async def on_event(self, event: events.Event) -> None:
        """See App: somebody is there."""
        if isinstance(event, events.Key):
            self.typed_s = time.monotonic()
        await super().on_event(event)

    def look(self) -> None:
        """Something was done: look again at what is seen."""
        raise NotImplementedError

    def tell(self, *lines: str) -> None:
        """Say what happened, on the screen that is seen by now."""
        raise NotImplementedError
