"""What can be done with an orphan: asked about, then left to the command that does it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from fusefs.browse.dialogs import LineTyped, Notice, YesOrNo
from fusefs.browse.table_rows import OrphanRow
from fusefs.core.printable_names import printable
from fusefs.core.sizes import format_size

if TYPE_CHECKING:
    from fusefs.browse.table_screen import TableScreen


async def restore(screen: TableScreen, row: OrphanRow, inside: bytes | None = None) -> None:
    """Take it back, or a part of it, where a person says."""
    part = [] if inside is None else [printable(inside), "of"]
    lines = [*part, row.path(), "", "To which path, on the same filesystem?"]
    to = await screen.browser.push_screen_wait(LineTyped("Restore", lines, "where it came from", "restore"))
    if to is None:
        return
    place = ("--to", os.path.expanduser(to)) if to else ()
    which = () if inside is None else (inside,)
    await _act(screen, f"restoring {' '.join(lines[:-2])}", row, "restore", *place, "--", row.entry.id, *which)


async def keep(screen: TableScreen, row: OrphanRow) -> None:
    """Keep it, for as long as a person says."""
    lines = [row.path(), "", "For how long: 12h, 7d, 2w?"]
    term = await screen.browser.push_screen_wait(LineTyped("Keep", lines, "until you release it: u", "keep"))
    if term is not None:
        await _act(screen, f"keeping {row.path()}", row, "keep", *(("--for", term) if term else ()), "--", row.entry.id)


async def release(screen: TableScreen, row: OrphanRow) -> None:
    """Keep it no longer than usual."""
    lines = [row.path(), "", "It goes after the usual time then, counted from when it was taken away: perhaps at once."]
    if await screen.browser.push_screen_wait(YesOrNo("Keep it no longer?", lines, "release it")):
        await _act(screen, f"releasing {row.path()}", row, "keep", "--release", "--", row.entry.id)


async def reap(screen: TableScreen, row: OrphanRow) -> None:
    """Delete it."""
    now_ns = time.time_ns()
    term = {"kept": "It is kept: nothing else would delete it.", "expired": "Its time is over."}.get(
        row.left(now_ns), f"Left: {row.left(now_ns)}."
    )
    size = "of unknown size" if row.n_bytes < 0 else row.size
    lines = [row.path(), f"{row.owner}'s, {size}, {row.age(now_ns)} old.", term, "It can't be restored after that."]
    if await screen.browser.push_screen_wait(YesOrNo("Delete it for good?", lines, "delete")):
        await _act(screen, f"deleting {row.path()}", row, "reap", "--now", "--", row.entry.id)


async def count(screen: TableScreen, row: OrphanRow) -> None:
    """Find out what it takes; the list has it afterwards."""
    screen.tell(f"counting {row.path()}...")
    volume = row.entry.base_path()
    answer = await screen.browser.commands.ask(dict, "du", "--json", "--volume", volume, "--", row.entry.id)
    for told in answer.objects:
        known = told["n_bytes"] is not None
        size = format_size(told["n_bytes"]) if known else "nobody knows how much"
        bound = "at least " if known and told["is_at_least"] else ""
        screen.tell(f"{row.path()} takes {bound}{size}")
    if answer.err:
        screen.browser.push_screen(Notice(f"counting {row.path()}", answer.err))
    screen.browser.look()


async def _act(screen: TableScreen, doing: str, row: OrphanRow, command: str, *words: str | bytes) -> None:
    """Run a command, and say what it said: on the status line if all is well."""
    screen.tell(f"{doing}...")
    answer = await screen.browser.commands.act(doing, command, "--volume", row.entry.base_path(), *words)
    screen.tell(*answer.out)
    if answer.code or answer.err:
        screen.browser.push_screen(Notice(f"{doing}:", [*answer.out, *answer.err]))
    screen.browser.look()
