"""The application behind `trashd browse`: its screens, its colours, and how it quits."""

from __future__ import annotations

import asyncio
import locale
import signal
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from fusefs.browse.command_app import CommandApp
from fusefs.browse.orphans_screen import Notice, OrphansScreen, YesOrNo
from fusefs.browse.table_screen import TableScreen
from fusefs.core.errors import Exit

_HELP = """\
Up Down PgUp PgDn  move the selection; Home, End: select the first or the last row
Enter, Right       open an orphan, or a directory in it
Left, Esc          go back
/                  filter by path, owner, ID, note (Enter: keep the filter, Esc: clear it)
o                  sort by age, time left, size, path, owner
s                  count the space that the orphan uses
r                  restore the orphan, or the selected file or directory in it
k, u               keep the orphan (for a time or until released); release it
d                  delete the orphan permanently, after a confirmation
Ctrl-R             refresh now (the list refreshes by itself every few seconds)
Ctrl-Z             suspend; `fg` resumes
q, Ctrl-C          quit

Each action runs another command: see `trashd help restore`, for example."""


class Browser(CommandApp):
    """The full-screen application of `trashd browse`."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    ModalScreen { background: transparent; align: center middle; }
    #title, #keys, #find { height: 1; }
    #find Static { width: auto; }
    #detail { height: 2; text-wrap: nowrap; text-overflow: ellipsis; }
    #status { height: auto; min-height: 1; max-height: 4; color: ansi_yellow; }
    RowTable { height: 1fr; }
    Input, Input:focus { background: ansi_default; color: ansi_default; }
    .dialog {
        width: auto; max-width: 100%; height: auto; max-height: 100%; padding: 0 1;
        background: ansi_default; border: solid ansi_default; scrollbar-size: 0 0;
    }
    .-plain .dialog { border: ascii ansi_default; }
    .dialog Static, .dialog Input { width: auto; min-width: 60; max-width: 76; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,f1", "help", show=False),
        Binding("q", "quit", show=False),
        Binding("ctrl+c,ctrl+q", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, trashd: Sequence[str], volumes: Sequence[bytes]) -> None:
        """trashd: the argv that starts trashd; volumes: as for `trashd list`"""
        super().__init__(trashd)
        self._orphans = OrphansScreen(volumes)

    def on_mount(self) -> None:
        self.set_class(self.no_color or "utf" not in locale.getpreferredencoding().lower(), "-plain")
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end, Exit.TERMINATED)
        self.push_screen(self._orphans)

    def reload(self) -> None:
        self._orphans.reload()
        if isinstance(self.screen, TableScreen):
            self.screen.reload()

    def show_message(self, *lines: str) -> None:
        next(one for one in reversed(self.screen_stack) if isinstance(one, TableScreen)).show_message(*lines)

    def action_help(self) -> None:
        if isinstance(self.screen, TableScreen):
            self.push_screen(Notice("Keys", _HELP.splitlines()))

    async def action_quit(self) -> None:
        """Quit, but ask first if a command is still changing something."""
        self.run_worker(self._quit(), exclusive=True, group="quit")

    async def _quit(self) -> None:
        doing = self.commands.doing()
        if not doing or await self.push_screen_wait(YesOrNo("Stop this command?", doing, "stop it and quit")):
            self._end(Exit.DONE)

    def _end(self, code: int) -> None:
        async def end() -> None:
            await self.commands.end()
            self.exit(code, return_code=code)

        self.run_worker(end(), exclusive=True, group="end")
