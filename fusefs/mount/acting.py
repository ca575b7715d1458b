"""Changes of what an inode is, done as whoever asks for them: the filesystem below judges, at that moment.

The kernel has judged too, by the owner and mode that it was told last. If somebody has changed these behind the mount,
the inode may be another's by now: root's word alone would have a former owner make a set-user-ID program of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from fusefs.core.inodes import Node
from fusefs.linux.attributes import look_at
from fusefs.linux.caller import Caller, groups_of, has, in_group, judged_as
from fusefs.linux.capabilities import Capability
from fusefs.linux.fd import Fd
from fusefs.mount.vfs import Vfs

R = TypeVar("R")


def as_caller(
    vfs: Vfs,
    node: Node,
    fd: Fd,
    caller: Caller,
    needed: Capability,
    act: Callable[[], R],
    *,
    gid: int | None = None,
    given: tuple[int, int] | None = None,
    as_root: Callable[[], R] | None = None,
) -> R:
    """What one call returns that changes a node: made as the caller, then with what he has.

    First by his ids; if that is refused, as a member of his other groups too, of which /proc tells; if he has the
    capability that allows it, as root, as for root's own calls. A user's own mount is himself.

    fd       of the node; O_PATH will do
    needed   the capability
    act      the call, by `vfs.gate.call`: no more than that, and looks, may be done as somebody else
    gid      the group to act in; None: his own
    given    the owner and group that the node is to have; None: those that it has
    as_root  the call as root makes it, if that differs
    Raises   OSError EPERM, EACCES: refused. The kernel is told to ask what the node is before it judges the next time
    """
    if caller.uid == 0 or os.geteuid():
        return _as_root(as_root or act, gid)
    try:
        with judged_as(caller, gid):
            return act()
    except PermissionError as error:
        refused = error
    groups = groups_of(caller)
    if groups:
        try:
            with judged_as(caller, gid, groups):
                return act()
        except PermissionError as error:
            refused = error
    seen = vfs.gate.call(look_at, fd)
    owned = (seen.uid, seen.gid)
    if has(caller, needed, owned, given or owned):
        return _as_root(as_root or act, gid)
    vfs.lasting.renew(node)
    raise refused


def _as_root(act: Callable[[], R], gid: int | None) -> R:
    if gid is None:
        return act()
    with in_group(gid):
        return act()
