"""A line on a terminal: orphans of the caller's expire soon. Seldom, and of stores alone that were looked at anyway."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice

from fusefs.cli import output
from fusefs.core.durations import format_duration
from fusefs.core.errors import BadConfig, TrashdError
from fusefs.core.lifecycle import State
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import lasting_dir, make_dir
from fusefs.store.layout import UserFolder
from fusefs.store.list_orphans import ListedContainer

_EVERY_S = 6 * 3600.0
_SOON_S, _LAST_PART = 86_400, 4
"""Within a day, and in the last quarter of its term: who took it away for a day just now knows it."""
_MOST_READ = 200
"""Records, the oldest: some milliseconds."""
_FILE = b"told-what-expires"
"""In the user's state: its time is that of the last notice."""


def tell_soon(listed: Iterable[ListedContainer], *, as_json: bool) -> None:
    """Tell of those of some that expire soon, if a person reads that, and has not been told lately."""
    if _is_time(as_json=as_json):
        _tell(listed)


def look_for_soon(kernel: Kernel, paths: Sequence[bytes], *, as_json: bool) -> None:
    """Tell of the caller's own in the stores at and above paths, where something was done just now."""
    if not paths or not _is_time(as_json=as_json):
        return
    from fusefs.linux.clocks import moment  # who looked, or was told, not long ago is spared it
    from fusefs.store.discover import discover
    from fusefs.store.find_orphans import each_folder
    from fusefs.store.list_orphans import ListedContainer, entries

    now, uid, lost = moment(kernel, ()), os.geteuid(), list[TrashdError]()

    def body(folder: UserFolder) -> list[ListedContainer]:
        return list(islice(entries(folder, now), _MOST_READ))

    with suppress(OSError, TrashdError):  # what it was called for is done
        stores = discover(kernel, [os.path.dirname(os.path.abspath(path)) for path in paths])
        found = each_folder(stores, body, list[ListedContainer], lost, serves=lambda folder: folder.uid == uid)
        _tell(entry for part in found for entry in part)


def _is_time(*, as_json: bool) -> bool:
    """Whether somebody sits there who was not told for a while; costs a system call or two."""
    if as_json or not sys.stderr.isatty():
        return False
    try:
        ago_s = time.time() - os.stat(os.path.join(lasting_dir(), _FILE)).st_mtime
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return not 0 <= ago_s < _EVERY_S


def _tell(listed: Iterable[ListedContainer]) -> None:
    now_ns, uid = time.time_ns(), os.geteuid()
    soon = [left_s for entry in listed if entry.uid == uid and (left_s := _left_s(entry, now_ns)) is not None]
    # Noted first: where that can't be, each command would tell it.
    if soon and _is_wanted() and _noted():
        what = output.counted(len(soon), "orphan of yours expires", "orphans of yours expire")
        first = "in" if len(soon) == 1 else "the first in"
        left = format_duration(_about_s(min(soon)))
        print(f"trashd: {what} soon, {first} {left}: trashd list --within 1d", file=sys.stderr)


def _about_s(left_s: int) -> int:
    """In whole hours, or minutes: at least so long."""
    return left_s - left_s % (3600 if left_s >= 3600 else 60) or left_s


def _left_s(entry: ListedContainer, now_ns: int) -> int | None:
    """How long it can be restored, if that is not long any more."""
    left_s = None if entry.problem or entry.state is not State.ORPHANS else entry.left_s(now_ns)
    if left_s is None or not 0 < left_s <= min(_SOON_S, (left_s + entry.age_s(now_ns)) // _LAST_PART):
        return None
    return left_s


def _is_wanted() -> bool:
    """What the system's configuration says to all, and the caller's own to him; one that is wrong says nothing."""
    from fusefs.linux.config_files import load_config, load_system_config

    for load in (load_system_config, load_config):
        with suppress(BadConfig):
            if not load().config.notices:
                return False
    return True


def _noted() -> bool:
    """Note that it is told now; whether that could be."""
    with suppress(OSError):
        path = os.path.join(make_dir(lasting_dir()), _FILE)
        how = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with Fd(os.open(path, how, 0o600)) as fd:
            os.utime(fd)
        return True
    return False
