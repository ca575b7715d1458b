"""Whether access times tell when files were read last: where they don't, what is read every day looks old."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from fusefs.core.errors import Refused
from fusefs.core.printable_names import printable
from fusefs.core.stat_bounds import TimeBound
from fusefs.core.timestamps import SECOND_NS
from fusefs.linux.mountinfo import Mount, is_inside, views
from fusefs.store.backing_and_mount import Scope
from fusefs.store.layout import trusted_owners

_RELATIME_NS = 86_400 * SECOND_NS
"""Under `relatime` a read is recorded if the last recorded one is older than a day. Source  mount(8)"""


def refuse_stale(scope: Scope, times: Iterable[TimeBound], now_ns: int, *, takes_dirs: bool, key: str) -> None:
    """Refuse to choose by access times that the mounts of a directory don't keep.

    takes_dirs  directories are chosen too
    key         what a person writes who means that all the same
    Raises      Refused
    """
    bounds = [bound for bound in times if bound.field == "atime"]
    if not bounds:
        return
    is_short = any(bound.before_ns is not None and now_ns - bound.before_ns < _RELATIME_NS for bound in bounds)
    why = next(_reasons(scope, takes_dirs=takes_dirs, is_short=is_short), "")
    if why:
        hint = f"choose by another time (mtime), or mount it with relatime; {key} if these access times are meant"
        raise Refused(f"{printable(scope.path())}: access times don't tell what is read there: {why}", hint)


def _reasons(scope: Scope, *, takes_dirs: bool, is_short: bool) -> Iterator[str]:
    for mount in _mounts_of(scope):
        flags, where = mount.options.split(b","), printable(mount.point)
        if b"noatime" in flags:
            yield f"{where} is mounted with noatime"
        if takes_dirs and b"nodiratime" in flags:
            yield f"{where} is mounted with nodiratime"
        if is_short and b"relatime" in flags:
            yield f"{where} is mounted with relatime, which records a read at most once a day"
    place = scope.place()
    for view in views(scope.mounts, trusted_owners(os.geteuid())):
        if view.backing.holds(place) or place.holds(view.backing) or view.shown().holds(place):
            yield f"files are read through {printable(view.mount.point)}, a mount of trashd that keeps their pages"


def _mounts_of(scope: Scope) -> Iterator[Mount]:
    """All mounts through which something in a directory is read: another one may be mounted otherwise."""
    place = scope.place()
    for mount in scope.mounts:
        if mount.device == place.device and (is_inside(mount.root, place.path) or is_inside(place.path, mount.root)):
            yield mount
