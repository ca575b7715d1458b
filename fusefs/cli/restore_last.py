"""`trashd undo` and `restore --last`: what the last command of this terminal's session took away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import click

from fusefs.cli import output
from fusefs.cli.expiry_notice import look_for_soon
from fusefs.core.durations import format_duration
from fusefs.core.errors import NotFound, TrashdError
from fusefs.core.lifecycle import State
from fusefs.core.record import Method
from fusefs.linux.boot_id import session
from fusefs.linux.kernel import Kernel
from fusefs.store.find_orphans import all_entries, not_looked_at
from fusefs.store.list_orphans import ListedContainer
from fusefs.store.restore import Restored
from fusefs.store.restore_by_id import restore_by_id


def restore_last(kernel: Kernel, volumes: Sequence[bytes], tell: Callable[[Restored], int], *, as_json: bool) -> int:
    """Take back all that the caller's last command in this session took away and is not back yet, the newest first.

    tell    prints a result; its exit code. What can't be taken back is told too, and the rest comes all the same
    Raises  NotFound
    """
    lost: list[TrashdError] = []
    silent: list[bytes] = []
    meant = _of_last(all_entries(kernel, volumes, lost, (), silent))
    if not meant:
        if lost:
            raise lost[0]
        hint = not_looked_at(silent) or "trashd list shows what there is; trashd restore PATH takes it back"
        raise NotFound("nothing that a command of yours took away in this terminal is there", hint)
    if not as_json:
        for line in _told(meant):
            click.echo(line, err=True)
    codes, paths = [], []
    for entry in meant:
        try:
            done = restore_by_id(kernel, volumes, entry, None, None)
            codes.append(tell(done))
            paths.append(done.path)
        except TrashdError as error:
            codes.append(output.failed(error, as_json=as_json))
    look_for_soon(kernel, paths, as_json=as_json)
    return output.exit_code(codes)


def _of_last(listed: Sequence[ListedContainer]) -> list[ListedContainer]:
    here, uid = session(), os.geteuid()
    own = [
        entry for entry in listed
        if here and entry.uid == uid and entry.state is State.ORPHANS
        and entry.invocation is not None and entry.invocation.session == here
    ]  # fmt: skip
    own.sort(key=lambda entry: entry.created_ns, reverse=True)
    return [entry for entry in own if entry.invocation == own[0].invocation]


def _told(meant: Sequence[ListedContainer]) -> list[str]:
    """What will be done, in words."""
    age = format_duration(meant[0].age_s(time.time_ns()))
    return [f"taken away {age} ago, comes back:", *(f"  {_what(entry)}" for entry in meant)]


def _what(entry: ListedContainer) -> str:
    origin = output.origin(entry.origin)
    return f"what was taken out of {origin}" if entry.method is Method.SWEEP else origin
