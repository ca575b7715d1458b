"""`trashd umount`."""

from __future__ import annotations

import os

from fusefs.core.errors import NotFound
from fusefs.linux.mountinfo import read_mounts
from fusefs.mount import runtime
from fusefs.mount.attach import Way, detach
from fusefs.mount.points import real_path, top_mount

_PATIENCE_S = 5.0
"""For the daemon to answer what was asked before, and to end."""


def unmount(path: bytes, way: Way) -> bool:
    """Unmount a mount of ours; whether its daemon is known to have ended, so that what is below can be unmounted too.

    Raises  NotFound: none of ours stands there; Busy; NotPermitted
    """
    target = real_path(path)
    mount = top_mount(target, read_mounts())
    if mount is None or not mount.is_ours():
        raise NotFound(target, "trashd mounted nothing there; findmnt -t fuse.trashd lists its mounts")
    detach(mount, way)
    if os.geteuid():
        return True
    return runtime.clear(target, 0 if way is Way.LAZY else _PATIENCE_S) or way is Way.LAZY
