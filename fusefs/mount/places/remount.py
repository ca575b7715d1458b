"""`mount -o remount,…` of a mount of ours: it changes the kernel's flags alone, and the daemon need not know.

Of a mount over itself the tree below /run/trashd is restricted as the mount is: first the mount, or what is refused
there would go the other way.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

from fusefs.core.errors import Busy, NotPermitted, Refused
from fusefs.core.mount_options import flags_after
from fusefs.core.printable_names import printable
from fusefs.linux import mount_calls
from fusefs.linux.fd import Fd
from fusefs.linux.mountinfo import Mount, covering, is_inside, read_mounts
from fusefs.linux.runtime_directories import HOME
from fusefs.mount.places.attach import INHERITED, numbers
from fusefs.mount.places.mount_points import top_mount

_PATIENCE_S, _GLANCE_S = 5.0, 0.02
"""For the daemon to close what the last writer has closed."""
_ALL = (
    mount_calls.MS_RDONLY | mount_calls.MS_NOSUID | mount_calls.MS_NODEV | mount_calls.MS_NOEXEC
    | mount_calls.MS_NOSYMFOLLOW
)  # fmt: skip


def remount(target: bytes, texts: Sequence[str], *, is_sloppy: bool = False) -> bool:
    """Change the flags of the mount at a mount point as `-o` says; whether it says remount at all.

    What SRC's own mount refuses stays refused, and what a user's mount does: its daemon may say that all is root's.
    Raises  UsageError; Refused: it is no mount of ours; NotPermitted; Busy: a file is open for writing
    """
    if flags_after(texts, frozenset(), is_sloppy=is_sloppy) is None:
        return False
    path, mounts = printable(target), read_mounts()
    mount = top_mount(target, mounts)
    if mount is None or not mount.is_ours():
        raise Refused(f"{path} is no mount of trashd", "findmnt -t fuse.trashd lists its mounts")
    if os.geteuid():
        raise NotPermitted(target, "only root can change a mount; mount it anew")
    before = mount.flags()
    wanted = numbers((flags_after(texts, before, is_sloppy=is_sloppy) or frozenset()) | _kept(mount, mounts))
    with ExitStack() as stack:
        point = stack.enter_context(_open(target))
        try:
            if _is_over_itself(mount):
                tree = stack.enter_context(_open(mount.source))
                _change(point, tree, wanted, was_read_only="ro" in before)
            else:
                mount_calls.remount(point, wanted)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise Busy(path, f"somebody has a file open for writing: fuser -vm {path} tells who") from error
    return True


def _change(point: Fd, tree: Fd, wanted: int, *, was_read_only: bool) -> None:
    if not wanted & mount_calls.MS_RDONLY:
        mount_calls.set_flags(tree, wanted, _ALL)
    mount_calls.remount(point, wanted)
    if wanted & mount_calls.MS_RDONLY:
        try:
            _restrict(tree, wanted)
        except OSError:
            if not was_read_only:
                mount_calls.remount(point, wanted & ~mount_calls.MS_RDONLY)
            raise


def _restrict(tree: Fd, wanted: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            mount_calls.set_flags(tree, wanted, _ALL)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(_GLANCE_S)
        else:
            return


def _kept(mount: Mount, mounts: Sequence[Mount]) -> frozenset[str]:
    """The flags of the mount that SRC is on, which over itself is the one below ours; and of a user's mount its own."""
    holder = mount.parent_id if _is_over_itself(mount) else covering(mount.source, mounts)
    flags = frozenset(flag for one in mounts if one.mnt_id == holder for flag in one.flags())
    return flags & INHERITED.keys() | (mount.flags() & INHERITED.keys() if mount.owner else frozenset())


def _is_over_itself(mount: Mount) -> bool:
    return is_inside(mount.source, HOME)


def _open(path: bytes) -> Fd:
    return Fd(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
