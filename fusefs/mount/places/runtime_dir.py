"""/run/trashd/<mount>/: the lock of root's daemon, its counters, and the backing tree of a mount over itself.

A directory mounted over itself hides its backing tree from all processes, including trashd's commands. So a clone of
the tree is mounted here, and root's commands reach it by path. Other users can't; their commands get an fd through a
socket (mount/life/backing_fd_server.py). The clone is private because the FUSE mount would otherwise appear in it, too,
in mount namespaces that were created earlier.

A user's daemon keeps only its counters and fast paths, below $XDG_RUNTIME_DIR.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fusefs.core.errors import Busy
from fusefs.linux import mount_calls
from fusefs.linux.backing_fd_socket import SOCKET_NAME, TREE
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.mount_calls import claim_directory, claim_name
from fusefs.linux.mountinfo import is_inside, read_mounts
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME, NEW

STATS, FAST_PATHS = b"stats", b"fast-paths"
"""Files with the daemon's counters (counters.py), and its fast paths (fast_path_states.py)."""
_LOCK_TIMEOUT_S = 5.0
"""How long to wait for an earlier daemon of the same mount point to end; its mount is already gone."""
_POLL_S = 0.02


def base_directory() -> bytes | None:
    """Return the directory that holds the runtime directories of this user's mounts; None without a login session."""
    if os.geteuid() == 0:
        return MOUNTS_RUNTIME
    for path in (os.environb.get(b"XDG_RUNTIME_DIR", b""), b"/run/user/%d" % os.geteuid()):
        with suppress(OSError):
            if path.startswith(b"/") and os.stat(path).st_uid == os.geteuid():  # after su, it may be another user's
                return path + b"/trashd"
    return None


def path_of(target: bytes, name: bytes) -> bytes | None:
    """Return the path of a file in the runtime directory of a mount point; None if this user can't have one."""
    base = base_directory()
    return None if base is None else b"/".join([base, claim_name(target), name])


@contextmanager
def lock_directory(target: bytes) -> Iterator[bytes]:
    """Lock the runtime directory of a mount point during the block; remove obsolete files before and after it.

    Raises  Busy: an earlier daemon still serves files that were open when its mount was unmounted
    """
    path = claim_directory(target)
    _make(MOUNTS_RUNTIME)
    fd = _lock(path, _LOCK_TIMEOUT_S, makes=True)
    if fd is None:
        raise Busy(
            target,
            "an earlier daemon still serves programs that have files open there; end those programs, or the daemon "
            f"listed by fuser -v {os.fsdecode(path)}",
        )
    with fd:
        try:
            _remove(path, keeps_itself=True)
            yield path
        finally:
            if not is_mounted(target):
                _remove(path)


def is_mounted(target: bytes) -> bool:
    """Return whether this user has a trashd mount at `target`, even a dead one, whose last counters can be read."""
    return any(mount.point == target and mount.is_trashd() and mount.owner == os.geteuid() for mount in read_mounts())


def remove_unless_served(target: bytes, patience_s: float) -> bool:
    """Remove the runtime files of one of root's mount points, unless a daemon still serves that mount point.

    Returns  True: no daemon serves it
    """
    path = claim_directory(target)
    try:
        fd = _lock(path, patience_s, makes=False)
    except (FileNotFoundError, PermissionError):
        return True
    if fd is None:
        return False
    with fd:
        _remove(path)
    return True


def clone_backing_tree(path: bytes, dir_fd: int, flags: int) -> tuple[Fd, bytes]:
    """Mount a private clone of a directory tree in the runtime directory `path`. Only root can reach the clone by path.

    flags    of the FUSE mount, as bits for mount(2); they restrict the clone, too
    Returns  an O_PATH fd of the clone's root, and its path
    """
    tree = path + b"/" + TREE
    for directory in (os.path.dirname(tree), tree):
        os.mkdir(directory, 0o700)
    mount_fd = mount_calls.clone_tree(dir_fd)
    with close_on_error(mount_fd):
        mount_calls.make_private(mount_fd, flags)
        with Fd(os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as tree_fd:
            mount_calls.move_mount(mount_fd, tree_fd)
    return mount_fd, tree


def _make(path: bytes) -> None:
    with suppress(FileExistsError):
        os.mkdir(path)
        os.chmod(path, 0o711)


def _lock(path: bytes, patience_s: float, *, makes: bool) -> Fd | None:
    deadline_s = time.monotonic() + patience_s
    while True:
        if makes:
            _make(path)
        fd = Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass  # an earlier daemon removed it when it ended
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                fd.close()
                return None
            time.sleep(_POLL_S)
        fd.close()


def _remove(path: bytes, *, keeps_itself: bool = False) -> None:
    """Remove the clone, the files and the directories, unless the clone is the source of a mount, even a dead one."""
    mounts = read_mounts()
    if any(mount.is_trashd() and mount.owner == 0 and is_inside(mount.source, path) for mount in mounts):
        return
    for mount in reversed(mounts):
        if is_inside(mount.point, path):
            mount_calls.unmount(mount.point, mount_calls.MNT_DETACH)
    for name in (STATS, STATS + NEW, FAST_PATHS, FAST_PATHS + NEW, SOCKET_NAME):
        with suppress(FileNotFoundError):
            os.unlink(path + b"/" + name)
    tree = path + b"/" + TREE
    for directory in (tree, os.path.dirname(tree), *([] if keeps_itself else [path])):
        with suppress(FileNotFoundError):
            os.rmdir(directory)
