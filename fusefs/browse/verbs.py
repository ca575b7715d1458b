"""What can be done with an orphan: asked about, then left to the command that does it."""

from __future__ import annotations

import os
import time

from fusefs.browse.command_app import CommandApp
from fusefs.browse.dialogs import LineTyped, Notice, YesOrNo
from fusefs.browse.table_rows import OrphanRow
from fusefs.core.printable_names import printable
from fusefs.core.sizes import format_size


async def restore(app: CommandApp, row: OrphanRow, inside: bytes | None = None) -> None:
    """Take it back, or a part of it, where a person says."""
    part = [] if inside is None else [printable(inside), "of"]
    lines = [*part, row.path(), "", "To which path, on the same filesystem?"]
    to = await app.push_screen_wait(LineTyped("Restore", lines, "where it came from", "restore"))
    if to is None:
        return
    place = ("--to", os.path.expanduser(to)) if to else ()
    which = () if inside is None else (inside,)
    await _act(app, f"restoring {' '.join(lines[:-2])}", row, "restore", *place, "--", row.entry.id, *which)


async def keep(app: CommandApp, row: OrphanRow) -> None:
    """Keep it, for as long as a person says."""
    lines = [row.path(), "", "For how long: 12h, 7d, 2w?"]
    term = await app.push_screen_wait(LineTyped("Keep", lines, "until you release it: u", "keep"))
    if term is not None:
        await _act(app, f"keeping {row.path()}", row, "keep", *(("--for", term) if term else ()), "--", row.entry.id)


async def release(app: CommandApp, row: OrphanRow) -> None:
    """Keep it no longer than usual."""
    lines = [row.path(), "", "It goes after the usual time then, counted from when it was taken away: perhaps at once."]
    if await app.push_screen_wait(YesOrNo("Keep it no longer?", lines, "release it")):
        await _act(app, f"releasing {row.path()}", row, "keep", "--release", "--", row.entry.id)


async def reap(app: CommandApp, row: OrphanRow) -> None:
    """Delete it."""
    now_ns = time.time_ns()
    term = {"kept": "It is kept: nothing else would delete it.", "expired": "Its time is over."}.get(
        row.left(now_ns), f"Left: {row.left(now_ns)}."
    )
    size = "of unknown size" if row.n_bytes < 0 else row.size
    lines = [row.path(), f"{row.owner}'s, {size}, {row.age(now_ns)} old.", term, "It can't be restored after that."]
    if await app.push_screen_wait(YesOrNo("Delete it for good?", lines, "delete")):
        await _act(app, f"deleting {row.path()}", row, "reap", "--now", "--", row.entry.id)


async def count(app: CommandApp, row: OrphanRow) -> None:
    """Find out what it takes; the list has it afterwards."""
    app.tell(f"counting {row.path()}...")
    volume = row.entry.base_path()
    answer = await app.commands.ask(dict, "du", "--json", "--volume", volume, "--", row.entry.id)
    for told in answer.objects:
        known = told["n_bytes"] is not None
        size = format_size(told["n_bytes"]) if known else "nobody knows how much"
        bound = "at least " if known and told["is_at_least"] else ""
        app.tell(f"{row.path()} takes {bound}{size}")
    if answer.err:
        app.push_screen(Notice(f"counting {row.path()}", answer.err))
    app.look()


async def _act(app: CommandApp, doing: str, row: OrphanRow, command: str, *words: str | bytes) -> None:
    """Run a command, and say what it said: on the status line if all is well."""
    app.tell(f"{doing}...")
    answer = await app.commands.act(doing, command, "--volume", row.entry.base_path(), *words)
    app.tell(*answer.out)
    if answer.code or answer.err:
        app.push_screen(Notice(f"{doing}:", [*answer.out, *answer.err]))
    app.look()
